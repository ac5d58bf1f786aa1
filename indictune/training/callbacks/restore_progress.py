"""Resume a training as if it had never stopped."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from indictune import upstream
from indictune.checkpoint import compatibility, store, train_state
from indictune.checkpoint.compatibility import COMPARES, manifest_of
from indictune.checkpoint.resume import ResumePoint, best_of
from indictune.checkpoint.store import Manifest
from indictune.checkpoint.train_state import read_counters
from indictune.distributed import collectives
from indictune.distributed.launch import shown_axes
from indictune.errors import UserError
from indictune.training.exact_trainer import ExactTrainer
from indictune.training.task_trainer import NothingLeft

logger = logging.getLogger(__name__)


def check_rows(trainer: ExactTrainer, checkpoint: Path, values: Mapping[str, Any]) -> None:
    """Refuse to resume with other rows: the checkpoint's position in them would mean nothing.

    Args:
        values: of the recipe, which names the files.
    """
    if manifest_of(checkpoint).data != trainer.data_digest:
        changed = compatibility.changed_files(checkpoint, compatibility.train_file_digests(values))
        raise UserError("resume-other-rows", "--resume_from_checkpoint", checkpoint, changed=changed)


def unlogged_loss(checkpoint: Path, manifest: Manifest, args: TrainingArguments) -> tuple[float, int]:
    """This rank's sum of losses since the last logged step, and that step.

    With another number of processes, or without this rank's own counters, it is the mean over the ranks.
    """
    counters = read_counters(checkpoint, args.process_index) if manifest.world_size == args.world_size else []
    counters = counters or read_counters(checkpoint)
    if not counters:
        return 0.0, manifest.step
    return sum(each["loss"] for each in counters) / len(counters), counters[0]["since_step"]


class RestoreProgress(TrainerCallback):
    """Restores what the Trainer does not, and finishes what the checkpoint left half done, before the first step."""

    def __init__(self, trainer: ExactTrainer, point: ResumePoint) -> None:
        assert point.checkpoint is not None
        self.trainer, self.checkpoint, self.best = trainer, point.checkpoint, point.best
        self._random_states: Path | None = point.checkpoint  # until they are restored

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step % self.trainer.batches.steps_per_epoch == 0:
            self._restore_random_states(args)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._restore_random_states(args)  # within an epoch: beginning its loader has drawn a number

    def _restore_random_states(self, args: TrainingArguments) -> None:
        checkpoint, self._random_states = self._random_states, None
        if checkpoint is not None:
            is_same_split = manifest_of(checkpoint).axes == shown_axes(self.trainer.launch)
            train_state.restore_generators(checkpoint, args, is_same_split)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        manifest = manifest_of(self.checkpoint)
        # transformers 5.23 continues with the checkpoint's --logging_steps, --eval_steps and --save_steps.
        state.compute_steps(args, state.max_steps)  # type: ignore[no-untyped-call]
        for each in self._early_stopping():  # the Trainer has made it anew, with the checkpoint's patience
            each.early_stopping_patience = cast(int, self.trainer.args.early_stopping_patience)
        self._restore_best(state, args.load_best_model_at_end)
        self._forget_incomparable_best(state, manifest)
        self._restore_counters(manifest, args)
        if manifest.evaluation_due and args.eval_strategy != IntervalStrategy.NO:  # there may be no rows any more
            self._make_up_evaluation(args, state)
        has_lost_patience = any(
            each.early_stopping_patience_counter >= each.early_stopping_patience for each in self._early_stopping()
        )
        if control.should_training_stop or state.global_step >= state.max_steps or has_lost_patience:
            raise NothingLeft

    def _restore_counters(self, manifest: Manifest, args: TrainingArguments) -> None:
        trainer, counters = self.trainer, read_counters(self.checkpoint)
        loss, since_step = unlogged_loss(self.checkpoint, manifest, args)
        of_ranks = collectives.gather_from_all(loss)
        upstream.carry_loss(trainer, loss, since_step, sum(of_ranks) / len(of_ranks))
        trainer.restore_unlogged(counters[0]["task"] if counters else {})
        trainer.throughput.count_on(counters[0]["throughput"] if counters else {})
        left_out = max((each["left_out"] for each in counters), default=0)
        trainer.bad_steps.count = max(trainer.bad_steps.count, *collectives.gather_from_all(left_out))

    def _make_up_evaluation(self, args: TrainingArguments, state: TrainerState) -> None:
        """Evaluate the checkpoint's step, which the run was stopped before, and save it again."""
        trainer = self.trainer
        self._restore_random_states(args)
        upstream.evaluate_as_in_training(trainer)
        trainer._save_checkpoint(trainer.model_wrapped, None)
        trainer.checkpoints.finish()
        # The evaluation has drawn a number.
        self._random_states = store.path_of(Path(str(args.output_dir)), state.global_step)

    def _early_stopping(self) -> list[EarlyStoppingCallback]:
        return [each for each in self.trainer.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]

    def _restore_best(self, state: TrainerState, ends_with_best: bool) -> None:
        """Name the best checkpoint, whatever the state says: it may have moved, or be damaged."""
        if type(state.best_global_step) is not int:
            state.best_global_step = None
        state.best_model_checkpoint, self.trainer.checkpoints.state.best = None, self.best
        if self.best is None and (ends_with_best or best_of(self.checkpoint) is not None):
            # It is lost, or was never saved: the next one evaluated is the best.
            state.best_global_step = state.best_metric = None

    def _forget_incomparable_best(self, state: TrainerState, manifest: Manifest) -> None:
        """Forget the best so far, and begin patience anew, if it was scored by another metric or on other rows."""
        if self.trainer.validation_digest is None:
            self.trainer.checkpoints.facts.validation = manifest.validation  # the best is still of those
        digests = manifest.validation, self.trainer.checkpoints.facts.validation
        has_other_rows = None not in digests and digests[0] != digests[1]
        before, args = compatibility.settings_of(self.checkpoint), self.trainer.args
        by_other_metric = any(before.get(name, getattr(args, name)) != getattr(args, name) for name in COMPARES)
        if has_other_rows or by_other_metric:
            logger.warning(
                "%s was compared with others by another metric or on other validation rows: the best so far is "
                "forgotten, and --early_stopping_patience counts anew.",
                self.checkpoint.name,
            )
            state.best_global_step = state.best_metric = self.trainer.checkpoints.state.best = None
            for each in self._early_stopping():
                each.early_stopping_patience_counter = 0

"""Train on from a checkpoint as if the run had never stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    get_scheduler,
)
from transformers.optimization import GreedyLR
from transformers.trainer_utils import IntervalStrategy, TrainOutput

from indictune.checkpoint import abandoned, compatibility, copying, disk_errors, rng_state, store
from indictune.checkpoint.resume_point import ResumePoint
from indictune.checkpoint.store import Manifest
from indictune.checkpoint.train_state import read_counters
from indictune.config.plan import AnyPlan
from indictune.data.bad_rows import keep_rejected
from indictune.distributed import collectives
from indictune.errors import UserError
from indictune.progress import HERE
from indictune.run import Run
from indictune.stop_signals import NotBegun, StopRequest
from indictune.tasks.protocol import Tokens
from indictune.train.exact_trainer import ExactTrainer
from indictune.train.rank_consistency import check_alike
from indictune.train.start import flag_contents, write_recipe

logger = logging.getLogger(__name__)


def train(trainer: ExactTrainer, plan: AnyPlan, run: Run, point: ResumePoint, tokens: Tokens) -> TrainOutput:
    """Train, from the resume point where there is one. All ranks must call it.

    Args:
        trainer: of the run.
        plan: of the run, which `recipe.yaml` records once nothing can refuse the run any more.
        run: whose folder gets the records.
        point: to resume from.
        tokens: rows of the run.

    Raises:
        UserError: the checkpoint, or another rank, has other rows.
    """
    check_alike(trainer, tokens.test, plan.recipe.values, flag_contents(plan))
    if point.checkpoint is not None:
        check_rows(trainer, point.checkpoint)
    if tokens.folder is not None:
        keep_rejected(tokens.folder, plan.output_dir, run.rank)
    write_recipe(plan, trainer.args, point)
    try:
        return trainer.train(resume_from_checkpoint=None if point.checkpoint is None else str(point.checkpoint))
    except NothingLeft:
        return cast(TrainOutput, trainer._finalize_training(None, 0, time.time()))  # type: ignore[no-untyped-call]


def check_rows(trainer: ExactTrainer, checkpoint: Path) -> None:
    """Refuse to go on in other rows: the checkpoint's place would mean nothing.

    Raises:
        UserError: the rows, or the seed of their order, are not those that it was trained on.
    """
    manifest = store.read_manifest(checkpoint)
    assert manifest is not None
    if manifest.data != trainer.data_digest:
        raise UserError(
            f"--resume_from_checkpoint {checkpoint}: it was trained on other rows, or in another order (--train_file, "
            "--max_length, --packing, --seed, --data_seed). Give those of its recipe.yaml, or start afresh in another "
            "--output_dir."
        )


def unlogged(checkpoint: Path, manifest: Manifest, args: TrainingArguments) -> tuple[float, int]:
    """The loss that this rank had summed up when the checkpoint was written, and the step that was logged last.

    Other numbers of processes take the mean, which is what would have been logged; so does a rank that another node
    has taken over, of those that this disk has.
    """
    noted = read_counters(checkpoint, args.process_index) if manifest.world_size == args.world_size else []
    noted = noted or read_counters(checkpoint)
    if not noted:
        logger.warning(
            "%s does not hold the loss since the step that was logged last: the next one that is logged is of the "
            "steps after %d alone.",
            *(checkpoint.name, manifest.step),
        )
        return 0.0, manifest.step
    return sum(each["loss"] for each in noted) / len(noted), noted[0]["since_step"]


def alike(checkpoint: Path, name: str) -> dict[str, Any]:
    """What all ranks had alike: of the `task` (`ExactTrainer.unlogged`), or the `throughput`; empty where this disk
    does not hold it."""
    found = read_counters(checkpoint)
    return dict(found[0].get(name, {})) if found else {}


def left_out(checkpoint: Path) -> int:
    """How many bad steps were left out until a checkpoint, in whichever folder; 0 where this disk does not tell."""
    return max((each.get("left_out", 0) for each in read_counters(checkpoint)), default=0)


@dataclass(frozen=True)
class _Agreed:
    """What all ranks know of what is moved away.

    Attributes:
        names: of what is on all disks.
        folder: it is moved to.
        is_asked: whether a rank is asked to stop.
    """

    names: list[str]
    folder: Path
    is_asked: bool


class LeaveBehind(TrainerCallback):
    """Moves away what the run does not go on from, before its first step, when nothing can refuse the checkpoint any
    more. It would be taken for this run's: `auto` would return to it, and a step that is bad roll back to it.

    The checkpoint that it goes on from stays or is copied from where it is, so that the run goes on from there if it
    is killed before it has saved one; and so does what was the best until then, for the run may end with it. All that
    takes room is written before anything is moved: a disk that has none, and a stop, leave all as it was.

    Args:
        output_dir: of the run.
        checkpoint: that it goes on from; None where it starts afresh.
        best: of the checkpoints until then; None where there is none, or it is lost.
        stop_request: of this process.
    """

    def __init__(
        self, output_dir: Path, checkpoint: Path | None, best: Path | None, stop_request: StopRequest
    ) -> None:
        self.output_dir = output_dir
        self.checkpoint = checkpoint
        self.best = best
        self.stop_request = stop_request

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.stop_request.wait_for_the_step()  # a build before it may take minutes
        left = self._left_behind()
        taken = self._from_elsewhere() if args.should_save else []
        what = taken[0].name if taken else "the records of what is left behind"
        needed = sum(_bytes_in(each) for each in taken) + (abandoned.bytes_of_records(self.output_dir) if left else 0)
        copies: list[Path] = []
        # Copying a checkpoint may take long.
        long_wait = None if self.checkpoint is None else collectives.long_wait_group(args)
        HERE.passed("copying what is gone on from")
        if args.should_save:
            with disk_errors.telling_of_copy(self.output_dir, what, needed):
                copies = copying.copy(taken, self.output_dir, lambda: self.stop_request.asked)
                if left:
                    abandoned.copy_records(self.output_dir)
        collectives.wait_for_all(long_wait)
        agreed = self._agreed(left)
        if agreed.is_asked:
            if args.should_save:
                store.remove_leftovers(self.output_dir)
            raise NotBegun("stopped before its first step.")
        if args.should_save:
            with disk_errors.telling_of_names(self.output_dir, what, needed):
                if left:
                    abandoned.move(left, agreed.folder)
                copying.adopt(copies, self.output_dir)
        collectives.barrier()
        if agreed.names and args.process_index == 0:
            logger.warning("%s", abandoned.told(agreed.names, agreed.folder))

    def _left_behind(self) -> list[Path]:
        """What is to be moved from this rank's disk."""
        kept = [self.best.name] if self.best is not None and abandoned.is_own(self.output_dir, self.best) else []
        found = abandoned.not_gone_on_from(self.output_dir, self.checkpoint)
        return [path for path in found if path.name not in kept]

    def _from_elsewhere(self) -> list[Path]:
        """The checkpoint and the best, where they are not the run's own; a best that is damaged is lost."""
        both = dict.fromkeys(each for each in (self.checkpoint, self.best) if each is not None)
        found = [each for each in both if not abandoned.is_own(self.output_dir, each)]
        return [each for each in found if each == self.checkpoint or not _is_damaged(each)]

    def _agreed(self, left: list[Path]) -> _Agreed:
        number = max(map(abandoned.number_of, abandoned.folders(self.output_dir)), default=0)
        on_disks = collectives.gather_from_all((number, [path.name for path in left], self.stop_request.asked))
        names = dict.fromkeys(name for _, own, _ in on_disks for name in own)
        folder = self.output_dir / f"{abandoned.PREFIX}{max(number for number, _, _ in on_disks) + 1}"
        return _Agreed(list(names), folder, any(is_asked for _, _, is_asked in on_disks))


def _bytes_in(checkpoint: Path) -> int:
    manifest = store.read_manifest(checkpoint)
    return 0 if manifest is None else manifest.bytes


def _is_damaged(best: Path) -> bool:
    problems = store.damage(best)
    if problems:
        logger.warning("%s, the best, is not copied, and is forgotten: %s", best, "; ".join(problems[:3]))
    return bool(problems)


class NothingLeft(Exception):  # noqa: N818, nothing is wrong
    """The checkpoint is the end of the training. The Trainer (5.23) would do another step."""


class GoOn(TrainerCallback):
    """Does what a checkpoint left half done, before the first step after it.

    Args:
        trainer: of the run.
        checkpoint: that it goes on from.
        best: where the best of the checkpoints until then is now, if `LeaveBehind` could copy it; None where there is
            none, or it is lost.
    """

    def __init__(self, trainer: ExactTrainer, checkpoint: Path, best: Path | None) -> None:
        self.trainer = trainer
        self.checkpoint = checkpoint
        self.best = best
        self._random_states: Path | None = checkpoint  # until they are restored

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step % self.trainer.batches.steps_per_epoch == 0:
            self._restore_random_states(args)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._restore_random_states(args)  # in the middle of an epoch: to begin its loader has drawn a number

    def _restore_random_states(self, args: TrainingArguments) -> None:
        if self._random_states is not None:
            rng_state.load(self._random_states, args)
            self._random_states = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self.trainer
        manifest = store.read_manifest(self.checkpoint)
        assert manifest is not None
        # transformers 5.23 goes on with the checkpoint's --logging_steps, --eval_steps and --save_steps.
        state.compute_steps(args, state.max_steps)  # type: ignore[no-untyped-call]
        for each in self._early_stopping():  # the Trainer has made it anew, with the checkpoint's patience
            each.early_stopping_patience = cast(int, trainer.args.early_stopping_patience)
        self._find_best(state, args.load_best_model_at_end)
        self._forget_best_that_was_judged_otherwise(state, manifest)
        loss, since_step = unlogged(self.checkpoint, manifest, args)
        trainer._tr_loss += loss
        carried = collectives.gather_from_all(loss)  # the Trainer's own mean is of this start's steps alone
        trainer._total_loss_scalar -= sum(carried) / len(carried)
        trainer._globalstep_last_logged = since_step
        trainer.log_on(alike(self.checkpoint, "task"))
        trainer.throughput.count_on(alike(self.checkpoint, "throughput"))
        trainer.bad_steps.count = max(trainer.bad_steps.count, *collectives.gather_from_all(left_out(self.checkpoint)))
        if manifest.evaluation_due and args.eval_strategy != IntervalStrategy.NO:  # there may be no rows any more
            rng_state.load(self.checkpoint, args)
            trainer._determine_best_metric(trainer._evaluate(None, None), None)
            trainer._save_checkpoint(trainer.model_wrapped, None)
            trainer.checkpoints.finish()
            # The evaluation has drawn a number.
            self._random_states = store.path_of(Path(str(args.output_dir)), state.global_step)
        if control.should_training_stop or state.global_step >= state.max_steps or self._has_lost_patience():
            raise NothingLeft

    def _early_stopping(self) -> list[EarlyStoppingCallback]:
        return [each for each in self.trainer.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]

    def _has_lost_patience(self) -> bool:
        return any(
            each.early_stopping_patience_counter >= each.early_stopping_patience for each in self._early_stopping()
        )

    def _find_best(self, state: TrainerState, ends_with_best: bool) -> None:
        """Name the best checkpoint where it now is, whatever the state says: it is a file, and the folder may move."""
        if type(state.best_global_step) is not int:
            state.best_global_step = None
        if self.best is not None and not all(collectives.gather_from_all(self.best.is_dir())):
            self.best = None
        state.best_model_checkpoint, self.trainer.checkpoints.state.best = None, self.best
        if self.best is None and (ends_with_best or store.best_step(self.checkpoint) is not None):
            # It is lost, or was never saved: the next one evaluated is the best.
            state.best_global_step = state.best_metric = None

    def _forget_best_that_was_judged_otherwise(self, state: TrainerState, manifest: Manifest) -> None:
        """A loss and a score cannot be compared, nor can scores on different rows: the next one evaluated is the best,
        and patience begins anew."""
        if self.trainer.validation_digest is None:
            self.trainer.checkpoints.facts.validation = manifest.validation  # the best is still of those
        digests = manifest.validation, self.trainer.checkpoints.facts.validation
        has_other_rows = None not in digests and digests[0] != digests[1]
        if has_other_rows:
            logger.warning(
                "%s was compared with others on other validation rows: what was the best until now is forgotten, and "
                "--early_stopping_patience counts anew.",
                self.checkpoint.name,
            )
        if has_other_rows or self._has_others(compatibility.OF_THE_BEST):
            state.best_global_step = state.best_metric = self.trainer.checkpoints.state.best = None
            for each in self._early_stopping():
                each.early_stopping_patience_counter = 0
        if has_other_rows or self._has_others(compatibility.OF_SUCH_A_SCHEDULE):
            self._begin_schedule_anew()

    def _has_others(self, names: Iterable[str]) -> bool:
        return compatibility.has_others(self.checkpoint, {name: getattr(self.trainer.args, name) for name in names})

    def _begin_schedule_anew(self) -> None:
        """Let a schedule that goes by evaluations compare those to come alone, by the settings of this run, from the
        learning rate as it is. The Trainer has loaded what was the best, and the settings of then, over those of now
        (torch 2.13, `ReduceLROnPlateau.load_state_dict`)."""
        schedule, args = self.trainer.lr_scheduler, self.trainer.args
        if isinstance(schedule, ReduceLROnPlateau | GreedyLR):
            settings_of_now = args.lr_scheduler_kwargs
            anew = get_scheduler(args.lr_scheduler_type, schedule.optimizer, scheduler_specific_kwargs=settings_of_now)
            state = anew.state_dict()
            if isinstance(schedule, GreedyLR):
                # Where its reset returns to; the new one takes the rate as it is for that (transformers 5.23).
                state["_init_lrs"] = schedule._init_lrs
            schedule.load_state_dict(state)

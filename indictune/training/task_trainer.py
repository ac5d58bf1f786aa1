"""The state of a trainer, what it asks its task, and how it skips bad steps and writes its model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from accelerate.utils import send_to_device
from datasets import Dataset
from peft import PeftModel
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from indictune.checkpoint import store
from indictune.checkpoint.compatibility import data_digest, validation_digest
from indictune.checkpoint.resume import AllRanksReader, check_trusted, newest_whole
from indictune.checkpoint.save import Checkpoints, planned_checkpoints
from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import SINGLE, Launch
from indictune.data.batching import EvaluationBatches, TrainingBatches, lengths_of
from indictune.data.collation import IndexedRows, Row
from indictune.data.languages import scripts_of
from indictune.distributed import collectives, sharding
from indictune.distributed.parallelism import Parallelism
from indictune.files import Record
from indictune.models.active_vocabulary import save_row_ids, save_whole_vocabulary
from indictune.models.adapters import save_adapter_extras
from indictune.stop_signals import SignalIgnoringContext, Stopped, StopRequest
from indictune.tasks.protocol import Batch, Collator, Objective, Origins, Samples
from indictune.training.bad_steps import BadSteps, CollectiveFlags, NonFinite, mean_over_ranks

if TYPE_CHECKING:
    from indictune.evaluation.breakdown import Breakdown
    from indictune.evaluation.own_metrics import OwnScores

logger = logging.getLogger(__name__)


class NothingLeft(Exception):  # noqa: N818, nothing is wrong
    """The checkpoint is the end of the training. The Trainer (5.23) would do another step."""


@dataclass(frozen=True)
class RunContext:
    """What a trainer knows of its run besides model, rows and objective. By default it is a trainer without a run.

    Attributes:
        trusts_checkpoint: `--trust_checkpoint`: read pickles of checkpoints.
        row_location: the `file:line` of a training row, given by its number.
        bad_steps: the record of bad steps; None on ranks that write none.
        validation_origins: where the validation rows come from, if known.
        samples: conversations that the model answers.
        test_rows: that the finished model is evaluated on.
    """

    launch: Launch = SINGLE
    stop_request: StopRequest = field(default_factory=StopRequest)
    trusts_checkpoint: bool = False
    row_location: Callable[[int], str] = str
    bad_steps: Record | None = None
    validation_origins: Origins | None = None
    samples: Samples | None = None
    test_rows: Dataset | None = None


class TaskTrainer(Trainer):
    """A Trainer with the parts of a run, and the objective of its task."""

    args: IndicTrainingArguments
    train_dataset: Dataset | None
    eval_dataset: Dataset | None
    test_dataset: Dataset | None
    launch: Launch  # this and the next four as in `RunContext`
    stop_request: StopRequest
    trusts_checkpoint: bool
    samples: Samples | None
    validation_origins: Origins | None
    objective: Objective
    batches: TrainingBatches
    bad_steps: BadSteps
    nonfinite: NonFinite
    detailed_metrics: dict[str, dict[str, Any]]  # of each evaluation, by its prefix
    measured: list[np.ndarray] | None = None  # by the latest evaluation, if the objective keeps scores
    parallelism: Parallelism
    checkpoints: Checkpoints  # made when the training is prepared, with its optimizer
    asked_before: CollectiveFlags | None = None  # whether to stop, from the previous call of `look_for_stop`
    has_begun = False  # the training
    written: Breakdown | None = None  # scores of its answers
    own_scores: OwnScores | None = None  # by `--metrics`, of the latest evaluation
    answers_before: list[list[int]] | None = None  # to the samples, of the model before a training on preferences
    answer_lengths: dict[str, float] | None = None  # mean tokens of the right answers and of those before and after it
    _best_before: tuple[Any, Any] | None = None  # best metric and step before a step without evaluation

    def before_steps(self) -> None:
        """Look at the prepared model, with the weights before training also in a resumed run. All ranks call it."""

    def before_step(self, batches: list[Batch]) -> None:
        """Measure what the losses of a step depend on, in all its micro-batches here. All ranks call it."""

    def unlogged(self) -> dict[str, Any]:
        """Values for the next log entry besides the loss, as JSON. They are equal on all ranks."""
        return {}

    def restore_unlogged(self, unlogged: dict[str, Any]) -> None:
        """Restore what `unlogged` returned for a checkpoint."""

    def forget_uncompared_best(self) -> None:
        """Restore the best step, if the Trainer (5.23) took one whose weights are not kept."""
        if self._best_before is not None:
            self.state.best_metric, self.state.best_global_step = self._best_before
            self._best_before = None

    @cached_property
    def disks_group(self) -> ProcessGroup | None:
        """The ranks that write files for their node, if each node has its own disk. All ranks must call it."""
        return collectives.group_of_disks(self.args) if self.args.save_on_each_node else None

    @cached_property
    def data_digest(self) -> str:
        """Digest of the training rows and their order."""
        assert self.train_dataset is not None
        return data_digest(self.train_dataset, self.batches)

    @cached_property
    def validation_digest(self) -> str | None:
        """Digest of the validation rows, or None."""
        return None if self.eval_dataset is None else validation_digest(self.eval_dataset)

    @cached_property
    def validation_scripts(self) -> list[str] | None:
        """Of each validation row, as of `scripts_of`; None if unknown."""
        if self.eval_dataset is None or self.validation_origins is None:
            return None
        return scripts_of(self.validation_origins.texts, self.eval_dataset["language"][:])

    def look_for_stop(self, what: str, at_once: bool = False) -> None:
        """Raise `Stopped` if a rank was asked in the previous call, unless that would lose the step. So no rank waits.

        `what` was done, and what does a resumed run? `at_once`: wait for the other ranks now, for a long step follows.
        """
        last = store.path_of(Path(str(self.args.output_dir)), self.state.global_step)
        is_lost = not self.is_in_train and not last.is_dir()  # in training, the step will be saved
        now = CollectiveFlags(self.stop_request.asked, is_lost, device=self.args.device)
        before, self.asked_before = now if at_once else self.asked_before, now
        if before is not None and before.read() == [True, False]:
            raise Stopped(f"stopped while {what}.")

    def on_device(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a batch's tensors to the device. The Trainer's own copy waits for each (5.23, `_prepare_input`)."""
        moved: dict[str, Any] = send_to_device(dict(batch), self.args.device, non_blocking=True)
        return moved

    def evaluation_loader(self, dataset: Dataset) -> DataLoader[Row]:
        """Reads every row once over all ranks."""
        size, launch = self.args.per_device_eval_batch_size, self.launch
        batches = EvaluationBatches(lengths_of(dataset), size, rank=launch.data_rank, world_size=launch.data_size)
        return self._loader(dataset, batches, self.objective.collator(evaluating=True))

    def _loader(
        self, dataset: Dataset, batches: TrainingBatches | EvaluationBatches, collator: Collator
    ) -> DataLoader[Row]:
        return DataLoader(
            IndexedRows(dataset, batches if isinstance(batches, TrainingBatches) else None),
            batch_sampler=batches,
            collate_fn=self.parallelism.own_tokens(collator),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            multiprocessing_context=SignalIgnoringContext() if self.args.dataloader_num_workers else None,
        )


def drop_if_bad(trainer: TaskTrainer) -> None:
    """Leave a bad step out before the optimizer takes it. All ranks must call it, and wait for each other.

    Both `skip` and `rollback` drop its gradient. `rollback` also restores weights and optimizer states from the last
    checkpoint before it that the run saved by its own plan: a stop must not change the result. Rows and the schedule
    of the learning rate continue.

    Raises:
        NonFiniteLossError: there were more than `--max_nonfinite_steps`, or no checkpoint to roll back to.
        UserError: others may have written that checkpoint.
    """
    loss_here, flag = trainer.nonfinite.loss, trainer.nonfinite.take()
    if flag is None:
        return
    if not CollectiveFlags(flag.to(trainer.args.device), device=trainer.args.device).read()[0]:
        trainer.nonfinite.loss = loss_here  # `StepFlags` reports it where fp16 has found no scale
        return
    trainer.checkpoints.finish()  # it was begun before that step
    step, action, loss = trainer.state.global_step + 1, trainer.args.on_nonfinite, mean_over_ranks(loss_here)
    count, limit = trainer.bad_steps.count, trainer.args.max_nonfinite_steps
    if count >= limit:
        raise trainer.bad_steps.stop("too-many-nonfinite-steps", step, loss, count=count, limit=limit)
    trainer.model_wrapped.zero_grad()
    if action == "rollback":
        _roll_back(trainer, step, loss)
    rows = trainer.bad_steps.note(step, action, loss)
    what = "the loss or the gradient of step %d is NaN or infinite: %s; its loss was %.4g; its rows: %s"
    logger.warning(what, step, action, loss, rows)


def _roll_back(trainer: TaskTrainer, step: int, loss: float) -> None:
    output_dir = Path(str(trainer.args.output_dir))
    reader = AllRanksReader(trainer.args, trainer.trusts_checkpoint, trainer.disks_group)
    earlier = [path for path in reader.listed(planned_checkpoints(output_dir)) if store.step_of(path) < step]
    whole, damaged = newest_whole(earlier, reader)
    for path, problems in damaged.items():
        logger.warning("Passed over %s: %s", path.name, "; ".join(problems[:3]))
    if whole is None:
        raise trainer.bad_steps.stop("no-checkpoint-to-roll-back-to", step, loss)
    check_trusted(whole, output_dir, trainer.trusts_checkpoint, "--on_nonfinite rollback to")
    assert trainer.lr_scheduler is not None
    assert trainer.optimizer is not None
    schedule = trainer.lr_scheduler.state_dict()
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    trainer.checkpoints.state.model.restore(whole)
    trainer.lr_scheduler.load_state_dict(schedule)
    for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):  # some schedules only change it
        group["lr"] = rate


def write_model(trainer: TaskTrainer, folder: Path, save: Callable[[], None]) -> None:
    """Write a model with what `save`, the library's saving into the same folder, leaves out. All ranks must call it.

    Rank 0 alone writes. The Trainer (5.23) would also write on other disks, where no rank has whole weights: it fails
    with "KeyError", or writes empty tensors. `collectives.give_files` brings the model there. A checkpoint may get
    shards later, in place of whole weights.
    """
    args, is_checkpoint = trainer.args, folder.name.startswith(store.PREFIX)
    if args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
    with collectives.rank_0_alone_saves(args):
        model = sharding.unwrapped(trainer)
        if args.should_save:
            sharding.save_code(model, folder)
        trainer.parallelism.write_weights(trainer, folder, is_checkpoint, save)
        if not args.should_save:
            return
        save_adapter_extras(model, folder)
        save_whole_vocabulary(model, folder)
        if is_checkpoint:
            save_row_ids(model, folder)
            if not list(folder.glob("*.safetensors")):  # in shards, which do not say which model they belong to
                _save_description(model, folder)
                cast(PreTrainedTokenizerBase, trainer.processing_class).save_pretrained(folder)


def _save_description(model: nn.Module, folder: Path) -> None:
    """Save configuration and generation settings, or an adapter's; `save_adapter_extras` saves the rest of it."""
    if isinstance(model, PeftModel):
        adapter = copy.copy(model.peft_config[model.active_adapter])
        adapter.inference_mode = True
        adapter.save_pretrained(str(folder))
        return
    plain = cast(PreTrainedModel, model)
    plain.config.architectures = [sharding.architecture_of(model)]
    plain.config.save_pretrained(folder)
    if plain.can_generate():
        plain.generation_config.save_pretrained(folder)

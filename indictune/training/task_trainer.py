"""The state of a trainer and its questions to the task, without overrides of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from transformers import Trainer

from indictune.checkpoint import store
from indictune.checkpoint.digests import data_digest, validation_digest
from indictune.checkpoint.save import Checkpoints
from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import Launch
from indictune.data.batching import EvaluationBatches, TrainingBatches
from indictune.data.collation import IndexedRows, Row, lengths_of
from indictune.data.languages import scripts_of
from indictune.distributed import node_disks
from indictune.distributed.context_rows import own_tokens
from indictune.distributed.pipeline.engine import Pipeline
from indictune.evaluation.breakdown import Breakdown
from indictune.stop_signals import DeafWorkers, Stopped, StopRequest
from indictune.tasks.objective import Collator, Objective
from indictune.tasks.protocol import Origins, Samples
from indictune.training.bad_steps import BadSteps
from indictune.training.collective_flags import CollectiveFlags
from indictune.training.nonfinite import NonFinite


class TaskTrainer(Trainer):
    """A Trainer with the parts of a run, and the objective of its task."""

    args: IndicTrainingArguments
    train_dataset: Dataset | None
    eval_dataset: Dataset | None
    objective: Objective
    batches: TrainingBatches
    bad_steps: BadSteps
    nonfinite: NonFinite
    stop_request: StopRequest
    detailed_metrics: dict[str, dict[str, Any]]  # of each evaluation, by its prefix
    measured: list[np.ndarray] | None = None  # by the latest evaluation, if the objective keeps scores
    launch: Launch
    pipeline: Pipeline | None = None  # where the model is cut into stages
    mesh: DeviceMesh | None  # of its groups, where more than the batch is split
    context: ProcessGroup | None = None  # the ranks that share the tokens of a row
    checkpoints: Checkpoints  # made when the training is prepared
    asked_before: CollectiveFlags | None = None  # whether to stop, from the previous call of `look_for_stop`
    trusts_checkpoint = False  # `--trust_checkpoint`: read pickles of checkpoints
    has_begun = False  # the training
    validation_origins: Origins | None = None
    samples: Samples | None = None  # that the model answers
    written: Breakdown | None = None  # scores of its answers
    _best_before: tuple[Any, Any] | None = None  # best metric and step before a step without evaluation

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
        return node_disks.group_of_disks(self.args)

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
        """Stop if a rank was asked to in the previous call, unless that would lose the step. So no rank waits.

        Args:
            what: the rest of the message: what was done, and what a resumed run does.
            at_once: wait for the other ranks now, because a long step follows.

        Raises:
            Stopped: on all ranks.
        """
        last = store.path_of(Path(str(self.args.output_dir)), self.state.global_step)
        is_lost = not self.is_in_train and not last.is_dir()  # in training, the step will be saved
        now = CollectiveFlags(self.stop_request.asked, is_lost, device=self.args.device)
        before, self.asked_before = now if at_once else self.asked_before, now
        if before is not None and before.read() == [True, False]:
            raise Stopped(f"stopped while {what}.")

    def on_device(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Copy a batch's tensors to the device, without waiting if the loader pins its memory.

        The Trainer's own copy waits for each tensor (5.23, `_prepare_input`).
        """
        return {
            name: value.to(self.args.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }

    def evaluation_loader(self, dataset: Dataset) -> DataLoader[Row]:
        """Reads every row once over all ranks."""
        batches = EvaluationBatches(
            lengths_of(dataset),
            self.args.per_device_eval_batch_size,
            rank=self.launch.data_rank,
            world_size=self.launch.data_size,
        )
        return self._loader(dataset, batches, self.objective.collator(evaluating=True))

    def _loader(
        self, dataset: Dataset, batches: TrainingBatches | EvaluationBatches, collator: Collator
    ) -> DataLoader[Row]:
        return DataLoader(
            IndexedRows(dataset),
            batch_sampler=batches,
            collate_fn=own_tokens(collator, self.launch),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            multiprocessing_context=DeafWorkers() if self.args.dataloader_num_workers else None,
        )

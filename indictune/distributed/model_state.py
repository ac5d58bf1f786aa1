"""Weights and optimizer states in a checkpoint's folder, as each strategy writes and reads them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from peft import PeftModel, get_peft_model_state_dict
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from indictune.distributed import collectives, convert_state, sharding, strategy_limits, zero
from indictune.distributed.convert_state import STATE_SHARDS, WEIGHT_SHARDS
from indictune.progress import OWN_PROGRESS

if TYPE_CHECKING:
    from indictune.distributed.pipeline.engine import Pipeline

Shards = dict[str, dict[str, Any]]


def group_of_writers(args: TrainingArguments) -> ProcessGroup | None:
    """A group apart from the training's, whose collectives run at the same time; None for one process.

    All ranks must call it.
    """
    if args.world_size == 1:
        return None
    return collectives.new_cpu_group(args.ddp_timeout_delta)


def rank_shards(model: nn.Module, optimizer: Optimizer) -> Shards:
    """This rank's shards of weights and optimizer states, by folder name. All ranks must call it."""
    weights = (
        get_peft_model_state_dict(model, adapter_name=model.active_adapter)
        if isinstance(model, PeftModel)
        else get_model_state_dict(model)
    )
    return {
        WEIGHT_SHARDS: {"model": weights},
        STATE_SHARDS: {"optimizer": get_optimizer_state_dict(model, optimizer)},
    }


def copied(model: nn.Module, optimizer: Optimizer) -> Shards:
    """A copy of `shards_of` on the CPU. All ranks must call it."""
    plainly = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    staged: Any = DefaultStager(plainly).stage(rank_shards(model, optimizer))
    return dict(staged)


class ReportingWriter(FileSystemWriter):
    """Record for the watchdog that this rank has written its shards: `save` then waits for the other ranks."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        OWN_PROGRESS.passed("having written its shards")
        return written


def write_shards(shards: Shards, checkpoint: Path, group: ProcessGroup | None, writer: type[FileSystemWriter]) -> None:
    """Write shards from `shards_of` or `copied`. All ranks of the group must call it; None is the training's own.

    Raises:
        CheckpointException: a rank could not write; all ranks learn of it.
    """
    for name, state in shards.items():
        save(state, storage_writer=writer(checkpoint / name), process_group=group)


@dataclass(frozen=True)
class ModelState:
    """The weights and optimizer states of a training run. All ranks must call its methods.

    Attributes:
        model: unwrapped.
        wrapped: the model as the strategy wraps it; under DeepSpeed the engine.
        optimizer: as accelerate wraps it.
        decayed: names of the parameters that weight decay applies to.
        pipeline: of which the model has some stages; or None.
    """

    accelerator: Accelerator
    args: TrainingArguments
    model: nn.Module
    wrapped: nn.Module
    optimizer: AcceleratedOptimizer
    decayed: Collection[str]
    pipeline: Pipeline | None = None

    @classmethod
    def of(cls, trainer: Trainer, pipeline: Pipeline | None = None) -> ModelState:
        """The state of a trainer that is prepared to train."""
        optimizer = cast(AcceleratedOptimizer, trainer.optimizer)
        model = sharding.unwrapped(trainer)
        decayed = trainer.get_decay_parameter_names(model)
        return cls(trainer.accelerator, trainer.args, model, trainer.model_wrapped, optimizer, decayed, pipeline)

    @property
    def _is_deepspeed(self) -> bool:
        """Whether DeepSpeed's engine holds the state."""
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    def write(self, folder: Path, with_shards: bool) -> None:
        """Write the optimizer states, and weights that are in shards; whole weights are saved as a model.

        Without `with_shards`, FSDP2's shards are written later, from `async_shards.copied`.
        """
        if self._is_deepspeed:
            engine: Any = self.wrapped
            engine.save_checkpoint(str(folder), exclude_frozen_parameters=isinstance(self.model, PeftModel))
        elif sharding.is_split(self.model) or self.pipeline is not None:
            if with_shards:
                shards = rank_shards(self.model, self.optimizer)
                write_shards(shards, folder, None, ReportingWriter)
        elif self.args.should_save:
            torch.save(self.optimizer.state_dict(), folder / convert_state.WHOLE_STATES)

    def restore(self, checkpoint: Path) -> None:
        """Restore weights and optimizer states from a checkpoint of any strategy.

        Raises:
            RuntimeError, ValueError: the checkpoint lacks a weight, or holds no states.
        """
        if self._is_deepspeed:
            self._restore_engine(checkpoint)
            return
        optimizer = self.optimizer.optimizer
        convert_state.load_weights(self.model, checkpoint)
        own_part = None if self.pipeline is None else partial(self.pipeline.part_of_states, self.model, self.decayed)
        convert_state.load_states(self.model, optimizer, checkpoint, self.decayed, own_part)
        strategy_limits.forget_pages(optimizer)

    def restore_weights(self, checkpoint: Path) -> None:
        """Restore the weights. DeepSpeed's engine also reads the optimizer states."""
        if self._is_deepspeed:
            self._restore_engine(checkpoint)
        else:
            convert_state.load_weights(self.model, checkpoint)

    def _restore_engine(self, checkpoint: Path) -> None:
        is_whole = not isinstance(self.model, PeftModel)  # of an adapter only the trained weights are saved
        deepspeed_load_checkpoint(self.wrapped, str(checkpoint), load_module_strict=is_whole)  # type: ignore[no-untyped-call]
        zero.complete_states(self.wrapped)


def engine_keeps(scheduler: object) -> bool:
    """Whether DeepSpeed's engine saves and restores the schedule of the learning rate."""
    return isinstance(scheduler, DeepSpeedSchedulerWrapper)

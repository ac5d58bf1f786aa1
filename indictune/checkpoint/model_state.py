"""Weights and optimizer states in a checkpoint's folder, as each strategy writes them and any other one reads them."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from accelerate.utils.constants import OPTIMIZER_NAME
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from indictune.distributed import sharding, strategy, zero
from indictune.distributed.pipeline.engine import Pipeline
from indictune.distributed.sharding import WEIGHT_SHARDS, own_weights, split_like
from indictune.models.active_vocabulary import active_embedding
from indictune.models.trusted_files import weights_files
from indictune.run import OWN_PROGRESS

STATE_SHARDS = f"{OPTIMIZER_NAME}_0"
WHOLE_STATES = "optimizer.pt"

State = dict[str, Any]


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load a checkpoint's weights, whole or in shards, into an unwrapped model. All ranks must call it.

    Of an adapted model, only the adapter is loaded. A weight that is missing or has another shape is a `RuntimeError`.
    """
    weights = own_weights(model)
    if (checkpoint / WEIGHT_SHARDS).is_dir():
        _load_shards(checkpoint / WEIGHT_SHARDS, {"model": weights})
        return
    adapted = isinstance(model, PeftModel)
    files = [checkpoint / SAFETENSORS_WEIGHTS_NAME] if adapted else weights_files(checkpoint, str(checkpoint))
    stored = {name: weight for file in files for name, weight in load_file(file).items()}  # memory-mapped
    missing = sorted(weights.keys() - stored.keys())
    if missing:
        raise RuntimeError(f"{checkpoint}: the saved weights lack {', '.join(missing[:3])}.")
    active = active_embedding(model)
    for name, weight in weights.items():
        whole = stored[name]
        if active is not None and name == active[0]:
            whole = whole[active[1].row_ids]  # saved with all rows
        weight.copy_(split_like(weight, whole, name))


def load_states(
    model: nn.Module,
    optimizer: Optimizer,
    checkpoint: Path,
    decayed: Collection[str],
    own_part: Callable[[State], State] | None = None,
) -> None:
    """Load a checkpoint's optimizer states, whole or in shards. All ranks must call it.

    Args:
        model: unwrapped.
        optimizer: without accelerate's wrapper. Its groups may be those of the checkpoint, divided by device mesh: the
            Trainer (5.23) does so where some weights are split and others whole.
        decayed: names of the parameters that weight decay applies to; they come first in whole states.
        own_part: takes this rank's part of whole states; None if the rank has all parameters.
    """
    shards = checkpoint / STATE_SHARDS
    if shards.is_dir():
        states: State = get_optimizer_state_dict(model, optimizer)  # makes those of a new optimizer
        stored = {"state": states["state"], "param_groups": _groups_in(shards)}
        _load_shards(shards, {"optimizer": stored})
        names = [group["params"] for group in states["param_groups"]]
        groups = _divided(stored["param_groups"], names, decayed)
        set_optimizer_state_dict(model, optimizer, stored | {"param_groups": groups})
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    into_shards = any(isinstance(each, DTensor) for each in parameters)
    device = "cpu" if into_shards else parameters[0].device
    # Mapped, so that each rank reads only its part.
    whole = torch.load(checkpoint / WHOLE_STATES, map_location=device, mmap=into_shards, weights_only=True)
    if own_part is not None:
        whole = own_part(whole)
    if into_shards:
        _split_states(whole, model, optimizer, decayed)
    optimizer.load_state_dict(whole)


def _split_states(whole: State, model: nn.Module, optimizer: Optimizer, decayed: Collection[str]) -> None:
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    in_order = sorted(named, key=lambda name: name not in decayed)  # as one process numbers them
    name_of = {id(each): name for name, each in named.items()}
    names = [[name_of[id(each)] for each in group["params"]] for group in optimizer.param_groups]
    groups = _divided(whole["param_groups"], names, decayed)
    number_of = {name: number for number, name in enumerate(in_order)}
    whole["param_groups"] = [{**each, "params": [number_of[name] for name in each["params"]]} for each in groups]
    for number, state in whole["state"].items():
        like = named[in_order[number]]
        whole["state"][number] = {
            name: split_like(like, value, name) if value.dim() else value.clone() for name, value in state.items()
        }


def _groups_in(shards: Path) -> list[dict[str, Any]]:
    """The parameter groups in shards, with settings that are to be read."""
    groups: dict[int, dict[str, Any]] = {}
    for path in FileSystemReader(shards).read_metadata().planner_data.values():
        if len(path) > 3 and path[1] == "param_groups":
            groups.setdefault(path[2], {})[path[3]] = None
    return [groups[number] for number in sorted(groups)]


def _divided(stored: list[State], names: list[list[str]], decayed: Collection[str]) -> list[State]:
    """Groups of these parameters with the stored settings: the first group decays, the last does not."""
    return [{**stored[0 if own and own[0] in decayed else -1], "params": own} for own in names]


def _load_shards(folder: Path, into: dict[str, Any]) -> None:
    load(into, storage_reader=FileSystemReader(folder), no_dist=not torch.distributed.is_initialized())


_MODEL = "model."  # the first word of each name (accelerate 1.15, `save_fsdp_model`)
_DEEPSPEED = "latest"  # names the folder with ZeRO's parts


def is_in_parts(checkpoint: Path) -> bool:
    """Whether a checkpoint is in shards. Reading them can run code: they are pickles, or their index is one."""
    return (checkpoint / WEIGHT_SHARDS).is_dir() or (checkpoint / _DEEPSPEED).is_file()


def whole_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The weights by name, on the CPU, as they are trained: ZeRO's in fp32, of an active vocabulary the trained rows.

    The checkpoint is in shards, and trusted.
    """
    if (checkpoint / WEIGHT_SHARDS).is_dir():
        return _from_shards(checkpoint / WEIGHT_SHARDS)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # slow to import

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # it prints what it does
        weights: dict[str, Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    return weights


def _from_shards(folder: Path) -> dict[str, Tensor]:
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in stored.items()
        if isinstance(about, TensorStorageMetadata)
    }
    try:
        load(weights, storage_reader=reader, no_dist=True)
    except CheckpointException as error:  # torch's own (2.13), around anything, a request to stop among it
        raise next(iter(error.failures.values()))[0] from None
    return {name.removeprefix(_MODEL): weight for name, weight in weights.items()}


Shards = dict[str, dict[str, Any]]


def rank_shards(model: nn.Module, optimizer: Optimizer) -> Shards:
    """This rank's shards of weights and optimizer states, by folder name. All ranks must call it."""
    if isinstance(model, PeftModel):
        weights = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
    else:
        weights = get_model_state_dict(model)
    states = get_optimizer_state_dict(model, optimizer)
    return {WEIGHT_SHARDS: {"model": weights}, STATE_SHARDS: {"optimizer": states}}


def copy_shards(model: nn.Module, optimizer: Optimizer) -> Shards:
    """A copy of `rank_shards` on the CPU. All ranks must call it."""
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
    """Write shards. All ranks of the group must call it, and learn if one could not; None is the training's own."""
    for name, state in shards.items():
        save(state, storage_writer=writer(checkpoint / name), process_group=group)


@dataclass(frozen=True)
class ModelState:
    """The weights and optimizer states of a training run. All ranks must call its methods.

    Attributes:
        model: unwrapped.
        wrapped: the model as the strategy wraps it; under DeepSpeed the engine.
        optimizer: as accelerate wraps it.
        decayed: as of `load_states`.
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
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    def write(self, folder: Path, with_shards: bool) -> None:
        """Write the optimizer states, and weights that are in shards; whole weights are saved as a model.

        Without `with_shards`, FSDP2's shards are written later, from `copy_shards`.
        """
        if self._is_deepspeed:
            engine: Any = self.wrapped
            engine.save_checkpoint(str(folder), exclude_frozen_parameters=isinstance(self.model, PeftModel))
        elif sharding.is_split(self.model) or self.pipeline is not None:
            if with_shards:
                write_shards(rank_shards(self.model, self.optimizer), folder, None, ReportingWriter)
        elif self.args.should_save:
            torch.save(self.optimizer.state_dict(), folder / WHOLE_STATES)

    def restore(self, checkpoint: Path) -> None:
        """Restore weights and optimizer states from a checkpoint of any strategy; an error if it lacks one."""
        self.restore_weights(checkpoint)
        if not self._is_deepspeed:
            optimizer, pipeline = self.optimizer.optimizer, self.pipeline
            own_part = None if pipeline is None else partial(pipeline.part_of_states, self.model, self.decayed)
            load_states(self.model, optimizer, checkpoint, self.decayed, own_part)
            strategy.forget_pages(optimizer)

    def restore_weights(self, checkpoint: Path) -> None:
        """Restore the weights. DeepSpeed's engine also reads the optimizer states."""
        if not self._is_deepspeed:
            load_weights(self.model, checkpoint)
            return
        is_whole = not isinstance(self.model, PeftModel)  # of an adapter only the trained weights are saved
        deepspeed_load_checkpoint(self.wrapped, str(checkpoint), load_module_strict=is_whole)  # type: ignore[no-untyped-call]
        zero.complete_states(self.wrapped)


def engine_keeps(scheduler: object) -> bool:
    """Whether DeepSpeed's engine saves and restores the schedule of the learning rate."""
    return isinstance(scheduler, DeepSpeedSchedulerWrapper)

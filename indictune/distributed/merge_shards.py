"""Read the whole weights of a sharded checkpoint in one process."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from indictune.distributed.convert_state import WEIGHT_SHARDS

_MODEL = "model."  # the first word of each name (accelerate 1.15, `save_fsdp_model`)
_DEEPSPEED = "latest"  # names the folder with ZeRO's parts


def is_in_parts(checkpoint: Path) -> bool:
    """Whether a checkpoint is in shards. Reading them can run code: they are pickles, or their index is one."""
    return (checkpoint / WEIGHT_SHARDS).is_dir() or (checkpoint / _DEEPSPEED).is_file()


def whole_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The weights by name, on the CPU, as they are trained: ZeRO's in fp32, of an active vocabulary the trained rows.

    Args:
        checkpoint: in shards, and trusted.
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

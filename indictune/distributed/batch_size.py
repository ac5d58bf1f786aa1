"""How one global batch is split into processes, micro-batches and accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from indictune.data.batching import smallest_accumulation
from indictune.errors import UserError

_MAX_LISTED = 5


def accumulation_steps(global_batch_size: int, per_device_batch_size: int, world_size: int) -> int:
    """Micro-batches of `per_device_batch_size` rows that each process runs for one optimizer step.

    Raises:
        UserError: the global batch is no multiple of world size x per-device batch.
    """
    rows_at_once = world_size * per_device_batch_size
    if global_batch_size % rows_at_once:
        sizes: dict[str, Any] = {"world_size": world_size, "per_device": per_device_batch_size}
        details = sizes | {"rows_at_once": rows_at_once}
        raise UserError("batch-does-not-divide", "--global_batch_size", global_batch_size, **details)
    return global_batch_size // rows_at_once


def steps_of_run(rows: int, global_batch_size: int, max_steps: int, epochs: float) -> int:
    """Optimizer steps of a run on `rows` training rows, as transformers (5.23) counts them."""
    return max_steps if max_steps > 0 else math.ceil(epochs * math.ceil(rows / max(1, global_batch_size)))


def accumulation_for_tokens(
    lengths: torch.Tensor,
    row_location: Callable[[int], str],
    max_tokens: int,
    global_batch_size: int,
    world_size: int,
    seed: int,
    steps: int,
    padded: bool,
    parts: int = 1,
) -> int:
    """Fewest micro-batches of one optimizer step on each process so that none has more than `max_tokens` tokens.

    Args:
        lengths: tokens of each training row, int64 [rows].
        row_location: file and line of a training row.
        seed: of the shuffle.
        steps: optimizer steps of the run.
        padded: whether rows are padded to the longest of their micro-batch.
        parts: processes that share the tokens of each micro-batch.

    Raises:
        UserError: single rows are longer.
    """
    too_long = (lengths > max_tokens * parts).nonzero().flatten().tolist()
    if too_long:
        rows = ", ".join(map(row_location, too_long[:_MAX_LISTED])) + (", ..." if len(too_long) > _MAX_LISTED else "")
        longest = math.ceil(int(lengths.max()) / parts)
        details: dict[str, Any] = {"count": len(too_long), "longest": longest, "rows": rows}
        raise UserError("rows-longer-than-limit", "--max_tokens_per_device", max_tokens, **details)
    return smallest_accumulation(lengths, global_batch_size, world_size, max_tokens * parts, seed, steps, padded)

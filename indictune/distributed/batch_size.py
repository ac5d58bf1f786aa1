"""Split each global batch into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from indictune.config.plan import AnyPlan
from indictune.data.batching import smallest_accumulation
from indictune.errors import UserError

_MAX_LISTED = 5


def split_batch(
    plan: AnyPlan, lengths: Tensor | None = None, row_location: Callable[[int], str] = str, padded: bool = True
) -> dict[str, int]:
    """The training arguments that split each global batch, as far as they follow from the plan and its rows.

    Without `--max_tokens_per_device`, the given micro-batch decides how many of them make a step. With it, the rows
    decide both numbers, and nothing is known before they are.

    Args:
        plan: of a known launch.
        lengths: tokens of each training row, int64 [rows]; None before the rows are read.
        row_location: file and line of a training row.
        padded: whether rows are padded to the longest of their micro-batch.

    Raises:
        UserError: the global batch does not divide, a row is too long, or other accumulation steps were given.
    """
    training, ranks = plan.training, plan.launch.data_size
    rows, max_tokens = training.global_batch_size, training.max_tokens_per_device
    if max_tokens is None:
        steps = accumulation_steps(rows, training.per_device_train_batch_size, ranks)
        return {"gradient_accumulation_steps": _as_given(plan, steps, "--global_batch_size")}
    if lengths is None:
        return {}
    steps = _steps_for_tokens(plan, lengths, row_location, padded, max_tokens)
    return {
        "gradient_accumulation_steps": _as_given(plan, steps, "--max_tokens_per_device"),
        "per_device_train_batch_size": math.ceil(rows / (ranks * steps)),
    }


def _as_given(plan: AnyPlan, steps: int, source: str) -> int:
    given = plan.recipe.values.get("gradient_accumulation_steps", steps)
    if given != steps:
        raise UserError("accumulation-is-derived", "--gradient_accumulation_steps", given, source=source, steps=steps)
    return steps


def accumulation_steps(global_batch_size: int, per_device_batch_size: int, world_size: int) -> int:
    """Micro-batches of each data-parallel rank in one optimizer step.

    Raises:
        UserError: the global batch is no multiple of world size x per-device batch.
    """
    at_once = world_size * per_device_batch_size
    if global_batch_size % at_once:
        details: dict[str, Any] = {"world_size": world_size, "per_device": per_device_batch_size}
        details["rows_at_once"] = at_once
        raise UserError("batch-does-not-divide", "--global_batch_size", global_batch_size, **details)
    return global_batch_size // at_once


def steps_of_run(rows: int, global_batch_size: int, max_steps: int, epochs: float) -> int:
    """Optimizer steps of a run on `rows` training rows, as transformers (5.23) counts them."""
    return max_steps if max_steps > 0 else math.ceil(epochs * math.ceil(rows / max(1, global_batch_size)))


def _steps_for_tokens(
    plan: AnyPlan, lengths: Tensor, row_location: Callable[[int], str], padded: bool, max_tokens: int
) -> int:
    """Fewest micro-batches of one optimizer step on each process so that none has more than `max_tokens` tokens."""
    training, parts, ranks = plan.training, plan.launch.axes.context, plan.launch.data_size
    batch, seed = training.global_batch_size, training.seed if training.data_seed is None else training.data_seed
    steps = steps_of_run(len(lengths), batch, training.max_steps, training.num_train_epochs)
    too_long = (lengths > max_tokens * parts).nonzero().flatten().tolist()
    if too_long:
        rows = ", ".join(map(row_location, too_long[:_MAX_LISTED])) + (", ..." if len(too_long) > _MAX_LISTED else "")
        longest = math.ceil(int(lengths.max()) / parts)
        details: dict[str, Any] = {"count": len(too_long), "longest": longest, "rows": rows}
        raise UserError("rows-longer-than-limit", "--max_tokens_per_device", max_tokens, **details)
    return smallest_accumulation(lengths, batch, ranks, max_tokens * parts, seed, steps, padded)

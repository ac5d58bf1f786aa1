"""How one global batch is split into processes, micro-batches and accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from indictune.data.batching import smallest_accumulation
from indictune.errors import UserError

_MAX_LISTED = 5


def accumulation_steps(global_batch_size: int, per_device_batch_size: int, world_size: int) -> int:
    """Micro-batches that each process runs for one optimizer step.

    Args:
        global_batch_size: rows of one optimizer step over all processes.
        per_device_batch_size: rows of one micro-batch.
        world_size: number of processes.

    Raises:
        UserError: the global batch is no multiple of world size x per-device batch; the message says which sizes are.
    """
    sizes = {"global_batch_size": global_batch_size, "per_device_train_batch_size": per_device_batch_size}
    too_small = [f"--{name} {value}: expected at least 1 row." for name, value in sizes.items() if value < 1]
    if too_small:
        raise UserError(too_small)
    rows_at_once = world_size * per_device_batch_size
    if global_batch_size % rows_at_once == 0:
        return global_batch_size // rows_at_once
    lower = global_batch_size // rows_at_once * rows_at_once
    globals_that_fit = [str(size) for size in (lower, lower + rows_at_once) if size > 0]
    ways_out = [f"--global_batch_size {' or '.join(globals_that_fit)}"]
    if global_batch_size % world_size == 0:
        share = global_batch_size // world_size
        per_device_that_fit = [str(size) for size in range(1, share + 1) if share % size == 0]
        ways_out.append(f"--per_device_train_batch_size {', '.join(per_device_that_fit)}")
    raise UserError(
        f"--global_batch_size {global_batch_size} is no multiple of world size {world_size} x "
        f"--per_device_train_batch_size {per_device_batch_size} = {rows_at_once}. What fits: {'; or '.join(ways_out)}."
    )


def steps_of_run(rows: int, global_batch_size: int, max_steps: int, epochs: float) -> int:
    """Optimizer steps of a run, as transformers (5.23) counts them.

    Args:
        rows: that it trains on.
        global_batch_size: rows of one step.
        max_steps: `--max_steps`; below 1 the epochs count.
        epochs: `--num_train_epochs`.
    """
    return max_steps if max_steps > 0 else math.ceil(epochs * math.ceil(rows / max(1, global_batch_size)))


def accumulation_for_tokens(
    lengths: torch.Tensor,
    place: Callable[[int], str],
    max_tokens: int,
    global_batch_size: int,
    world_size: int,
    seed: int,
    steps: int,
    padded: bool,
) -> int:
    """Micro-batches that each process runs for one optimizer step, so that none has more than `max_tokens` tokens.

    Args:
        lengths: tokens of each training row, int64 [rows].
        place: tells where a training row stands, for the message.
        max_tokens: `--max_tokens_per_device`.
        global_batch_size: rows of one optimizer step over all processes.
        world_size: number of processes.
        seed: of the shuffle.
        steps: optimizer steps of the run.
        padded: whether rows are padded to the longest of their micro-batch.

    Raises:
        UserError: rows that are longer by themselves.
    """
    if global_batch_size < 1:
        raise UserError(f"--global_batch_size {global_batch_size}: expected at least 1 row.")
    too_long = (lengths > max_tokens).nonzero().flatten().tolist()
    if too_long:
        longest = int(lengths.max())
        places = ", ".join(map(place, too_long[:_MAX_LISTED]))
        more = f" and {len(too_long) - _MAX_LISTED} more" if len(too_long) > _MAX_LISTED else ""
        raise UserError(
            f"--max_tokens_per_device {max_tokens}: {len(too_long)} training rows are longer by themselves, up to "
            f"{longest} tokens: {places}{more}. Give --max_tokens_per_device {longest} or more, or a smaller "
            "--max_length."
        )
    return smallest_accumulation(lengths, global_batch_size, world_size, max_tokens, seed, steps, padded)

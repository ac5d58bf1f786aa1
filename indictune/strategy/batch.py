"""How one global batch is split into processes, micro-batches and accumulation."""

from __future__ import annotations

from indictune.errors import UserError


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

"""Check that the memory of this node has room for snapshots."""

from __future__ import annotations

import shutil

from indictune.checkpoint.snapshots import FLAG, MEMORY, folder_of
from indictune.config.plan import AnyPlan
from indictune.distributed.host_memory import free_and_capacity
from indictune.distributed.planning.written_bytes import checkpoint_of_node
from indictune.errors import Problem, problem
from indictune.models.parameter_counts import meta_model


def check_snapshots(plan: AnyPlan) -> list[Problem]:
    """Refuse `--snapshot_steps` beside `--async_save`, and without room for two snapshots of each node held here."""
    training, launch = plan.training, plan.launch
    if not training.snapshot_steps:
        return []
    found = []
    if training.async_save:
        found.append(problem("no-effect", "--async_save", "true", other=f"{FLAG} {training.snapshot_steps}"))
    assert plan.model_config is not None
    size = checkpoint_of_node(plan, meta_model(plan.model, plan.model_config, plan.head))
    needed = 2 * size * (1 if launch.is_one_node else 2)
    free = _free_bytes(plan)
    if needed > free:
        sizes = {"needed": f"{needed / 2**30:.1f}", "free": f"{free / 2**30:.1f}"}
        found.append(problem("no-room-for-snapshots", FLAG, training.snapshot_steps, folder=MEMORY, **sizes))
    return found


def _free_bytes(plan: AnyPlan) -> int:
    """What a run may use of the folder in memory: what is free, and what its own snapshots of before take."""
    if not MEMORY.is_dir():
        return 0
    free, _ = free_and_capacity()
    own = folder_of(plan.output_dir)
    taken = sum(each.stat().st_size for each in own.rglob("*") if each.is_file()) if own is not None else 0
    return min(shutil.disk_usage(MEMORY).free, free) + taken

"""Collectives, and the meetings that they record."""

from __future__ import annotations

from datetime import timedelta

from torch import distributed
from torch._C._distributed_c10d import HashStore

from indictune.distributed.collectives import barrier, gather_from_all, new_cpu_group
from indictune.distributed.elastic import join
from indictune.progress import HERE


def test_only_meetings_of_all_ranks_are_recorded() -> None:
    join({}, None, 1)
    assert HERE.place == "joining the other ranks"
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group, count = distributed.new_group(), HERE.count
        barrier(group)
        gather_from_all("mine", group)
        assert HERE.count == count
        barrier()
        gather_from_all("mine")
        assert (HERE.count, HERE.place) == (count + 2, "meeting the other ranks")
        new_cpu_group(timedelta(seconds=1))
        assert (HERE.count, HERE.place) == (count + 4, "meeting the other ranks")
    finally:
        distributed.destroy_process_group()

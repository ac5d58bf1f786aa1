"""Collectives, and the meetings that they record."""

from __future__ import annotations

from datetime import timedelta

from torch import distributed
from torch._C._distributed_c10d import HashStore

from indictune.distributed.collectives import barrier, gather_from_all, new_cpu_group
from indictune.distributed.process_group import join
from indictune.run import OWN_PROGRESS


def test_only_meetings_of_all_ranks_are_recorded() -> None:
    join({}, None, 1)
    assert OWN_PROGRESS.place == "joining the other ranks"
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group, count = distributed.new_group(), OWN_PROGRESS.count
        barrier(group)
        gather_from_all("mine", group)
        assert OWN_PROGRESS.count == count
        barrier()
        gather_from_all("mine")
        assert (OWN_PROGRESS.count, OWN_PROGRESS.place) == (count + 2, "meeting the other ranks")
        new_cpu_group(timedelta(seconds=1))
        assert (OWN_PROGRESS.count, OWN_PROGRESS.place) == (count + 4, "meeting the other ranks")
    finally:
        distributed.destroy_process_group()

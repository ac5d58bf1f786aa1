"""Which launch resumes another one's state."""

from __future__ import annotations

import pytest

from indictune.config.plan import Launch
from indictune.distributed.resume_rules import can_resume


@pytest.mark.parametrize("before", ["single", "ddp", "fsdp2", "hsdp", "tp"])
@pytest.mark.parametrize(
    "now", [Launch("single"), Launch("ddp", 3), Launch("fsdp2", 1), Launch("hsdp_offload", 4), Launch("tp", 2)]
)
def test_what_torch_keeps_goes_over_to_any_number_of_processes(before: str, now: Launch) -> None:
    assert can_resume(before, 2, now)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_zeros_states_stay_with_as_many_processes_of_the_same_stage(stage: str) -> None:
    assert can_resume(stage, 2, Launch(stage, 2))
    assert can_resume(stage, 2, Launch(f"{stage}_offload", 2))
    assert can_resume(f"{stage}_offload", 2, Launch(stage, 2))
    assert not can_resume(stage, 2, Launch(stage, 1))
    for other in ("single", "ddp", "fsdp2", "zero0"):
        assert not can_resume(stage, 2, Launch(other, 2))
        assert not can_resume(other, 2, Launch(stage, 2))


def test_zeros_states_of_split_matrices_are_not_those_of_whole_ones() -> None:
    assert can_resume("zero1_tp", 2, Launch("zero1_tp", 2))
    assert not can_resume("zero1", 2, Launch("zero1_tp", 2))
    assert not can_resume("zero1_tp", 2, Launch("zero1", 2))
    assert not can_resume("zero1_tp", 2, Launch("zero2_tp", 2))

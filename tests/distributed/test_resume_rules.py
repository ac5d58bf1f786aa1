"""Which launch resumes another one's state."""

from __future__ import annotations

import pytest

from indictune.config.plan import Axes, Launch
from indictune.distributed.strategy import can_resume, parts_of_matrices


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


def of_pairs(strategy: str, tensor: int = 2) -> Launch:
    """Four processes of which some share a matrix."""
    return Launch(strategy, 4, axes=Axes(tensor=tensor))


def test_zeros_states_of_split_matrices_need_the_same_parts() -> None:
    assert can_resume("zero1_tp", 4, of_pairs("zero1_tp"), parts=2)
    assert not can_resume("zero1_tp", 4, of_pairs("zero1_tp", tensor=4), parts=2)
    assert not can_resume("zero1", 4, of_pairs("zero1_tp"))
    assert not can_resume("zero1_tp", 4, Launch("zero1", 4), parts=2)
    assert not can_resume("zero1_tp", 4, of_pairs("zero2_tp"), parts=2)
    assert not can_resume("zero1_tp", 4, Launch("single"), parts=2)
    assert not can_resume("single", 1, of_pairs("zero1_tp"))


def test_the_parts_of_a_checkpoint_are_read_from_its_files() -> None:
    states = [f"global_step4/mp_rank_0{part}_model_states.pt" for part in range(4)]
    assert parts_of_matrices([*states, "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt"]) == 4
    assert parts_of_matrices(states[:1]) == 1
    assert parts_of_matrices(["model.safetensors", "optimizer.pt"]) == 1

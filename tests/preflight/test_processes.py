"""What a launch asks of the machine."""

from __future__ import annotations

import pytest

from indictune.config.plan import Launch
from indictune.preflight.checks import check_launcher_settings, check_number_type, check_processes
from tests.plans import codes_of, plan_of

GPU = 1


@pytest.mark.parametrize(("processes", "gpus"), [(1, 1), (2, 2), (2, 8), (2, 0), (1, 0)])
def test_as_many_processes_as_gpus_and_any_number_without_gpus(processes: int, gpus: int) -> None:
    assert check_processes(plan_of(launch=Launch("ddp", processes, processes), gpus=gpus)) == []


def test_only_the_processes_of_this_node_count() -> None:
    assert check_processes(plan_of(launch=Launch("ddp", 16, 8), gpus=8)) == []


def test_more_processes_than_gpus_are_refused() -> None:
    (found,) = check_processes(plan_of(launch=Launch("ddp", 8, 8), gpus=4))
    assert (found.code, found.flag, found.value) == ("more-processes-than-gpus", "--num_processes", 8)
    assert "--num_processes 4" in str(found)


def test_restarts_over_several_nodes_are_allowed() -> None:
    environ = {"TORCHELASTIC_MAX_RESTARTS": "3"}
    assert check_processes(plan_of(launch=Launch("ddp", 2, 1), environ=environ)) == []


def test_fp16_needs_a_gpu() -> None:
    assert check_number_type(plan_of({"fp16": True}, gpus=GPU)) == []
    assert codes_of(check_number_type, plan_of({"fp16": True})) == [("fp16-without-gpu", "--fp16")]


def test_fp8_which_no_flag_gives_is_refused() -> None:
    environ = {"ACCELERATE_MIXED_PRECISION": "fp8"}
    assert codes_of(check_launcher_settings, plan_of(environ=environ)) == [("launcher-sets", "--mixed_precision")]
    assert check_launcher_settings(plan_of(environ={"ACCELERATE_MIXED_PRECISION": "bf16"})) == []
    assert check_launcher_settings(plan_of()) == []

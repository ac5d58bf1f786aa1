"""What a launch asks of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from indictune.config.arguments import IndicTrainingArguments
from indictune.config.chat_arguments import LlamaTrainingArguments
from indictune.config.plan import Launch
from indictune.preflight.processes import check_launcher_settings, check_number_type, check_processes
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


def test_restarts_over_several_nodes_are_refused() -> None:
    environ = {"TORCHELASTIC_MAX_RESTARTS": "3"}
    assert check_processes(plan_of(launch=Launch("ddp", 2, 2), environ=environ)) == []
    found = codes_of(check_processes, plan_of(launch=Launch("ddp", 2, 1), environ=environ))
    assert found == [("restarts-over-nodes", "--max-restarts")]


def test_fp16_needs_a_gpu() -> None:
    assert check_number_type(plan_of({"fp16": True}, gpus=GPU)) == []
    assert codes_of(check_number_type, plan_of({"fp16": True})) == [("fp16-without-gpu", "--fp16")]


@pytest.mark.parametrize(
    ("asked", "own"), [("bf16", {}), ("fp16", {"bf16": True}), ("bf16", {"fp16": True}), ("fp8", {})]
)
def test_a_number_type_that_only_the_launcher_names_is_refused(asked: str, own: dict[str, bool]) -> None:
    """transformers (5.23) computes in it, and no file of the run records it."""
    plan = plan_of({"bf16": False, **own}, environ={"ACCELERATE_MIXED_PRECISION": asked}, gpus=GPU)
    assert codes_of(check_launcher_settings, plan) == [("launcher-sets", "--mixed_precision")]


@pytest.mark.parametrize(("asked", "own"), [("no", {}), ("no", {"bf16": True}), ("bf16", {"bf16": True}), (None, {})])
def test_a_number_type_that_both_name_or_the_recipe_alone_passes(asked: str | None, own: dict[str, bool]) -> None:
    environ = {} if asked is None else {"ACCELERATE_MIXED_PRECISION": asked}
    assert check_launcher_settings(plan_of({"bf16": False, **own}, environ=environ)) == []


def test_a_llama_computes_in_bf16_by_default() -> None:
    def found(asked: str) -> list[tuple[str, str]]:
        environ = {"ACCELERATE_MIXED_PRECISION": asked}
        return codes_of(check_launcher_settings, plan_of(arguments=LlamaTrainingArguments, environ=environ))

    assert found("bf16") == []
    assert found("fp16") == [("launcher-sets", "--mixed_precision")]


def test_transformers_takes_the_launchers_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, `check_launcher_settings` can go."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert IndicTrainingArguments(output_dir=str(tmp_path), use_cpu=True).mixed_precision == "bf16"


def test_a_compiler_that_only_the_launcher_names_is_refused() -> None:
    """transformers (5.23) gives accelerate (1.15) no backend, so accelerate takes the launcher's."""
    assert check_launcher_settings(plan_of(environ={"ACCELERATE_DYNAMO_BACKEND": "NO"})) == []
    (found,) = check_launcher_settings(plan_of(environ={"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}))
    assert (found.code, found.value) == ("launcher-sets", "inductor")

"""Whether what was asked for can come up, and whether it did."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from indictune.config.arguments import IndicTrainingArguments
from indictune.config.chat_arguments import LlamaTrainingArguments
from indictune.config.plan import Launch
from indictune.config.recipe import Recipe
from indictune.distributed import cpu_fallback
from indictune.distributed.launch_check import (
    came_up,
    check_came_up,
    check_fp16,
    check_mixed_precision,
    check_visible_gpus,
    use_one_gpu,
)
from indictune.errors import Problems, UserError


@pytest.mark.parametrize(("processes", "gpus"), [(1, 1), (2, 2), (2, 8), (2, 0), (1, 0)])
def test_as_many_processes_as_gpus_and_any_number_without_gpus(processes: int, gpus: int) -> None:
    check_visible_gpus(Launch("ddp", processes, processes), gpus)


def test_only_the_processes_of_this_node_count() -> None:
    check_visible_gpus(Launch("ddp", world_size=16, local_world_size=8), 8)


def test_more_processes_than_gpus_are_refused_with_the_ways_out() -> None:
    with pytest.raises(UserError) as raised:
        check_visible_gpus(Launch("ddp", 8, 8), 4)
    assert raised.value.problems == [
        "--num_processes: 8 processes on this node, but 4 visible GPU(s). Use --num_processes 4, or show more GPUs "
        "with CUDA_VISIBLE_DEVICES."
    ]


@pytest.mark.parametrize(("fp16", "has_gpu"), [(True, True), (False, True), (False, False)])
def test_fp16_is_taken_where_there_is_a_gpu(fp16: bool, has_gpu: bool) -> None:
    check_fp16(fp16, has_gpu)


@pytest.mark.parametrize(
    ("asked", "own", "way_out"),
    [
        ("bf16", {}, "--bf16"),
        ("fp16", {"bf16": True}, "--fp16"),
        ("bf16", {"fp16": True}, "--bf16"),
        ("fp8", {}, "--bf16"),
    ],
)
def test_a_type_that_the_launcher_alone_asks_for_is_refused(asked: str, own: dict[str, bool], way_out: str) -> None:
    """transformers (5.23) computes in it, and no file of the run says so."""
    with pytest.raises(UserError) as raised:
        check_mixed_precision({"bf16": False, **own}.get, {"ACCELERATE_MIXED_PRECISION": asked})
    given = next(iter(own), "no")
    assert raised.value.problems == [
        f"accelerate's --mixed_precision (mixed_precision in its file) is {asked}, and the run's own is {given}: "
        f"recipe.yaml would not have it. Leave it out, and give the script {way_out} true."
    ]


@pytest.mark.parametrize(("asked", "own"), [("no", {}), ("no", {"bf16": True}), ("bf16", {"bf16": True}), (None, {})])
def test_a_type_that_both_ask_for_or_the_recipe_alone_is_taken(asked: str | None, own: dict[str, bool]) -> None:
    check_mixed_precision({"bf16": False, **own}.get, {} if asked is None else {"ACCELERATE_MIXED_PRECISION": asked})


def test_a_llamas_run_computes_in_bf16_where_nothing_is_said() -> None:
    planned = partial(Recipe({}, Problems()).planned, LlamaTrainingArguments)
    check_mixed_precision(planned, {"ACCELERATE_MIXED_PRECISION": "bf16"})
    with pytest.raises(UserError, match="is fp16, and the run's own is bf16"):
        check_mixed_precision(planned, {"ACCELERATE_MIXED_PRECISION": "fp16"})


def test_transformers_takes_the_launchers_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it does no more, `check_mixed_precision` can go."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert IndicTrainingArguments(output_dir=str(tmp_path), use_cpu=True).mixed_precision == "bf16"


@pytest.fixture
def one_process(tmp_path: Path) -> IndicTrainingArguments:
    return IndicTrainingArguments(output_dir=str(tmp_path), use_cpu=True)


def test_one_process_that_was_asked_for_is_what_came_up(one_process: IndicTrainingArguments) -> None:
    assert came_up(one_process) == "single"
    check_came_up(Launch("single"), one_process)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2_offload", "zero1", "zero3_offload"])
def test_another_strategy_than_was_asked_for_is_refused(strategy: str, one_process: IndicTrainingArguments) -> None:
    with pytest.raises(UserError) as raised:
        check_came_up(Launch(strategy, 2, 2), one_process)
    (problem,) = raised.value.problems
    asked = strategy.removesuffix("_offload")
    assert problem.startswith(f"The launcher asked for {asked} and single came up.")


def test_another_number_of_processes_than_was_asked_for_is_refused(one_process: IndicTrainingArguments) -> None:
    with pytest.raises(UserError, match="asked for 2 processes and 1 came up"):
        check_came_up(Launch("single", 2, 2), one_process)


@pytest.mark.usefixtures("_threads_as_before")
def test_one_process_needs_no_group_from_the_stand_in() -> None:
    assert cpu_fallback.start(Launch("single"), timeout_s=60) == {"use_cpu": True}
    assert not torch.distributed.is_initialized()


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize(("processes", "threads"), [(1, 8), (2, 4), (3, 2), (16, 1)])
def test_the_stand_in_divides_the_cores_among_the_processes(
    processes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    cpu_fallback.start(Launch("single", local_world_size=processes), timeout_s=60)
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("_threads_as_before")
def test_the_stand_in_leaves_threads_that_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    cpu_fallback.start(Launch("single"), timeout_s=60)
    assert torch.get_num_threads() == 3


def test_the_stand_in_says_what_it_leaves_out() -> None:
    (limit,) = cpu_fallback.limits(Launch("fsdp2_offload", 2))
    assert "without its CPU offload" in limit
    assert [cpu_fallback.limits(Launch(name, 2)) for name in ("single", "ddp", "fsdp2", "zero2_offload")] == [
        [],
        [],
        [],
        [],
    ]


@pytest.mark.parametrize(
    ("device_map", "told"),
    [
        (None, ["One process uses one GPU; 3 more stay unused. accelerate_configs/ddp.yaml uses them all."]),
        ("auto", []),  # its layers are on all of them
    ],
)
def test_one_process_deals_its_batches_to_one_of_several_gpus_and_tells_of_those_that_stay_unused(
    one_process: IndicTrainingArguments, device_map: str | None, told: list[str]
) -> None:
    assert use_one_gpu(one_process, device_map) == []
    one_process._n_gpu = 4
    assert use_one_gpu(one_process, device_map) == told
    assert one_process.n_gpu == 1
    assert one_process.train_batch_size == one_process.per_device_train_batch_size

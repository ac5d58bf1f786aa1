"""Whether the strategy that was asked for came up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import Launch
from indictune.distributed import process_group
from indictune.distributed.sharding import check_strategy_started, started_strategy, use_one_gpu
from indictune.errors import UserError


@pytest.fixture
def one_process(tmp_path: Path) -> IndicTrainingArguments:
    return IndicTrainingArguments(output_dir=str(tmp_path), use_cpu=True)


def test_one_process_that_was_asked_for_is_what_came_up(one_process: IndicTrainingArguments) -> None:
    assert started_strategy(one_process) == "single"
    check_strategy_started(Launch("single"), one_process)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2_offload", "zero1", "zero3_offload"])
def test_another_strategy_than_was_asked_for_is_refused(strategy: str, one_process: IndicTrainingArguments) -> None:
    with pytest.raises(UserError) as raised:
        check_strategy_started(Launch(strategy, 2, 2), one_process)
    (found,) = raised.value.problems
    assert (found.code, found.value) == ("another-strategy-came-up", strategy.removesuffix("_offload"))


def test_another_number_of_processes_than_was_asked_for_is_refused(one_process: IndicTrainingArguments) -> None:
    with pytest.raises(UserError) as raised:
        check_strategy_started(Launch("single", 2, 2), one_process)
    assert (raised.value.code, raised.value.problems[0].value) == ("processes-do-not-meet", 2)


@pytest.mark.usefixtures("_threads_as_before")
def test_one_process_needs_no_group_from_the_fallback() -> None:
    assert process_group.start_on_gloo(Launch("single"), timeout_s=60) == {"use_cpu": True}
    assert not torch.distributed.is_initialized()


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize(("processes", "threads"), [(1, 8), (2, 4), (3, 2), (16, 1)])
def test_the_fallback_divides_the_cores_among_the_processes(
    processes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    process_group.start_on_gloo(Launch("single", local_world_size=processes), timeout_s=60)
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("_threads_as_before")
def test_the_fallback_leaves_threads_that_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)
    process_group.start_on_gloo(Launch("single"), timeout_s=60)
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("device_map", "notes"),
    [
        (None, ["One process uses one GPU; 3 more stay unused. accelerate_configs/ddp.yaml uses them all."]),
        ("auto", []),  # its layers are on all of them
    ],
)
def test_one_process_uses_one_gpu_and_reports_unused_ones(
    one_process: IndicTrainingArguments, device_map: str | None, notes: list[str]
) -> None:
    assert use_one_gpu(one_process, device_map) == []
    one_process._n_gpu = 4
    assert use_one_gpu(one_process, device_map) == notes
    assert one_process.n_gpu == 1
    assert one_process.train_batch_size == one_process.per_device_train_batch_size

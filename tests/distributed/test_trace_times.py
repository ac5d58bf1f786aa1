"""Compute, communication and gaps by literal traces of a CPU and of a GPU."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore
from torch.profiler import profile, record_function

from indictune.distributed.trace_times import PHASES, RankTimes, rank_times, slowest_rank


def event(cat: str, name: str, begin_ms: float, end_ms: float, tid: int = 1) -> dict[str, Any]:
    times = {"ts": 1000 * begin_ms, "dur": 1000 * (end_ms - begin_ms)}
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, **times}


def step(begin_ms: float) -> list[dict[str, Any]]:
    """A step of 100 ms: it reads for 20, learns for 60 and updates for 20."""
    times = [begin_ms, begin_ms + 20, begin_ms + 80, begin_ms + 100]
    return [event("user_annotation", *each) for each in zip(PHASES, times[:-1], times[1:], strict=True)]


def rounded(times: RankTimes | None) -> dict[str, Any]:
    assert times is not None
    ms = {name: round(1000 * getattr(times, f"{name}_s"), 6) for name in ("step", "compute", "communication")}
    ms |= {name: round(1000 * getattr(times, f"{name}_s"), 6) for name in ("overlapped", "exposed", "own")}
    return ms | {"gaps": [round(1000 * each, 6) for each in times.gaps_s.values()]}


ON_CPU = [
    event("cpu_op", "aten::linear", 20, 50),
    event("cpu_op", "aten::addmm", 25, 45),  # within the one above
    event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 50, 80),  # what it waits for is no compute
    event("cpu_op", "aten::mm", 50, 60),
    event("cpu_op", "AddmmBackward0", 50, 80),
    event("cpu_op", "c10d::allreduce_", 55, 56),
    event("user_annotation", "gloo:all_reduce", 57, 75, tid=2),
    event("cpu_op", "aten::copy_", 57, 70, tid=2),  # gloo's own
    event("user_annotation", "Optimizer.step#AdamW.step", 80, 100),
    event("cpu_op", "aten::_fused_adamw_", 85, 95),
]


def test_a_step_on_a_cpu_is_compute_exposed_communication_and_gaps() -> None:
    times = rounded(rank_times(0, [*step(0), *ON_CPU, {"ph": "M", "name": "process_name"}]))
    assert times == {
        "step": 100,
        "compute": 50,
        "communication": 19,
        "overlapped": 4,
        "exposed": 15,
        "own": 85,
        "gaps": [20, 5, 10],
    }


def test_a_message_between_stages_counts_while_the_rank_waits_for_it() -> None:
    """torch (2.13) records it on the thread that posts it, until that thread has waited for it."""
    events = [
        *step(0),
        event("user_annotation", "gloo:recv", 20, 55),
        event("user_annotation", "gloo:send", 40, 90),
        event("cpu_op", "aten::mm", 25, 40),
        event("cpu_op", "aten::mm", 60, 95),
    ]
    times = rounded(rank_times(0, events))
    assert (times["compute"], times["communication"], times["exposed"]) == (50, 15, 15)
    assert times["gaps"] == [20, 10, 5]


def test_a_device_computes_by_its_kernels_and_copies_on_all_streams() -> None:
    events = [
        *step(0),
        event("cpu_op", "aten::linear", 0, 100),  # the host's
        event("cuda_runtime", "cudaLaunchKernel", 0, 100),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 10, 20),
        event("kernel", "ampere_bf16_s16816gemm", 20, 70),
        event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 60, 85, tid=20),  # on another stream
        event("gpu_user_annotation", "nccl:all_reduce", 60, 85),
        event("user_annotation", "nccl:all_reduce", 21, 22),
        event("kernel", "multi_tensor_apply_kernel", 85, 90),
    ]
    times = rounded(rank_times(0, events))
    assert (times["compute"], times["communication"], times["overlapped"], times["exposed"]) == (65, 25, 10, 15)
    assert times["gaps"] == [10, 0, 10]


def test_the_mean_step_leaves_out_evaluations_and_saves() -> None:
    between = [event("user_annotation", PHASES[0], 100, 300), event("cpu_op", "aten::mm", 120, 280)]
    later = [{**each, "ts": each["ts"] + 300_000} for each in ON_CPU]
    whole = [*step(0), *ON_CPU, *between, *step(300), *later]
    unfinished = step(400)[:2]
    found = rank_times(0, [*whole, *unfinished])
    assert found is not None
    assert found.steps == 2
    assert rounded(found) == rounded(rank_times(0, [*step(0), *ON_CPU]))
    assert rank_times(0, unfinished) is None


def test_the_slowest_rank_is_the_one_that_waits_least() -> None:
    def times(rank: int, compute_s: float, exposed_s: float, reading_s: float) -> RankTimes:
        gaps = dict(zip(PHASES, (reading_s, 0.01, 0.0), strict=True))
        return RankTimes(rank, 1, 0.5, compute_s, exposed_s + 0.05, 0.05, gaps)

    found = slowest_rank([times(0, 0.1, 0.38, 0.01), times(1, 0.11, 0.03, 0.35), times(2, 0.1, 0.36, 0.03)])
    assert found is not None
    assert (found.rank, found.own_s, found.others_s) == pytest.approx((1, 0.47, 0.13))
    assert list(found.more_s) == ["gaps in reading rows", "compute"]
    assert list(found.more_s.values()) == pytest.approx([0.33, 0.01])
    assert slowest_rank([times(0, 0.1, 0.0, 0.1)]) is None


def test_gloo_names_its_messages_as_we_read_them(tmp_path: Path) -> None:
    """torch 2.13 on one rank, whose traces the literal ones above are like."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with profile() as profiler:
            for phase in PHASES:
                with record_function(phase):
                    distributed.all_reduce(torch.ones(1_000_000) @ torch.ones(1_000_000, 1))
    finally:
        distributed.destroy_process_group()
    profiler.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert {"c10d::allreduce_", "gloo:all_reduce", "aten::matmul"} <= {each["name"] for each in events}
    times = rank_times(0, events)
    assert times is not None
    assert times.steps == 1
    assert min(times.compute_s, times.communication_s) > 0

"""Formulas of what each axis sends, and of the time of a step."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import axes
from benchmarks.axes_jobs import MACHINES, SMALL, job_of
from benchmarks.axes_worth import tables
from indictune.config.plan import Axes, Launch
from indictune.distributed.pipeline.layout import bubble
from indictune.planning.memory import RankMemory
from indictune.planning.rank_bytes import data_shards
from indictune.planning.rank_weights import LayerWidths
from indictune.planning.step_time import (
    RowLengths,
    Step,
    bytes_gathered,
    bytes_summed,
    data_bytes,
    estimate_step,
    keys_passed,
    layer_sums,
    passed_on,
)
from tests.ranks.launching import ROOT

LLAMA_8B = LayerWidths(layers=32, hidden=4096, inner=14336, heads=32, key_values=1024, is_gated=True)
NODE, FOUR_NODES = MACHINES["NVLink"][1], MACHINES["4 nodes, InfiniBand"][1]


def test_a_ring_sends_all_parts_but_one() -> None:
    assert (bytes_gathered(100, 4), bytes_summed(100, 4), bytes_summed(100, 1)) == (75, 150, 0)


def test_a_tensor_layer_sends_what_megatron_says() -> None:
    """Narayanan et al. 2021, section 3.2: 8 b s h (t - 1) / t values for each layer and micro-batch."""
    sizes = Axes(tensor=8, pipeline=4)
    assert layer_sums(LLAMA_8B, sizes, tokens=2048, value_bytes=2) == 8 * 2048 * 4096 * 7 / 8 * 2 * (32 / 4)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks", "share"),
    [(1, 8, 1, 0), (4, 8, 1, 3 / 11), (4, 8, 2, 3 / 19), (2, 1, 1, 1 / 2)],
)
def test_the_bubble_of_a_pipeline(stages: int, micro_batches: int, chunks: int, share: float) -> None:
    assert bubble(stages, micro_batches, chunks) == share


def test_a_stage_passes_states_and_their_gradients() -> None:
    assert passed_on(LLAMA_8B, Axes(pipeline=4), tokens=10, value_bytes=2) == 2 * 10 * 4096 * 2
    assert passed_on(LLAMA_8B, Axes(), tokens=10, value_bytes=2) == 0


@pytest.mark.parametrize(("recomputes", "gpu", "times"), [(False, True, 2), (True, True, 3), (True, False, 4)])
def test_the_context_axis_passes_keys_and_values(recomputes: bool, gpu: bool, times: int) -> None:
    found = keys_passed(LLAMA_8B, Axes(context=4), tokens=10, value_bytes=2, recomputes=recomputes, gpu=gpu)
    assert found == times * 32 * (2 * 10 * 1024 * 2) * 3 / 4


def test_the_data_axis_by_what_it_splits() -> None:
    def sent(launch: Launch) -> tuple[float, float]:
        return data_bytes(400, 200, launch, micro_batches=3)

    assert sent(Launch("ddp", 4, 4)) == (bytes_summed(400, 4), 0)
    assert sent(Launch("zero1", 4, 4)) == (bytes_summed(400, 4) + bytes_gathered(200, 4), 0)
    assert sent(Launch("zero2", 4, 4)) == (3 * bytes_summed(400, 4) + bytes_gathered(200, 4), 0)
    assert sent(Launch("zero3", 4, 4)) == (6 * bytes_gathered(200, 4) + 3 * bytes_gathered(400, 4), 0)
    sharded = Launch("fsdp2", 4, 4, axes=Axes(is_sharded=True))
    assert sent(sharded) == (6 * bytes_gathered(200, 4) + bytes_gathered(400, 4), 0)
    in_nodes = Launch("hsdp", 4, 2, axes=Axes(replicas=2, is_sharded=True))
    assert sent(in_nodes) == (6 * bytes_gathered(200, 2) + bytes_gathered(400, 2), bytes_summed(200, 2))


def test_zero_3_sends_one_and_a_half_times_as_much_as_ddp() -> None:
    """Rajbhandari et al. 2020, section 7.2.2: in one type, with one micro-batch."""
    (zero3, _), (ddp, _) = (data_bytes(100, 100, Launch(name, 8, 8), micro_batches=1) for name in ("zero3", "ddp"))
    assert zero3 == 1.5 * ddp


def test_zero_3_scatters_gradients_after_each_micro_batch() -> None:
    """FSDP2 does so once a step. `benchmarks/communication.py` measures both."""
    fsdp2, zero3 = Launch("fsdp2", 8, 8, axes=Axes(is_sharded=True)), Launch("zero3", 8, 8)
    assert step_of(zero3).data_bytes == step_of(fsdp2).data_bytes
    more = step_of(zero3, 4).data_bytes - step_of(fsdp2, 4).data_bytes
    assert more == pytest.approx(3 * bytes_gathered(4 * 8_030_261_248, 8))


def test_rings_over_nodes_use_all_ports_of_a_node() -> None:
    assert NODE.link(8) == FOUR_NODES.link(2, stride=4) == 0.8 * 450e9
    assert FOUR_NODES.link(32) == 0.8 * 400e9
    assert FOUR_NODES.link(4, stride=8) == 0.8 * 50e9


def step_of(launch: Launch, micro_batches: int = 1) -> Step:
    job = job_of("job", SMALL, 64, 2048)
    memory, lengths = RankMemory(replace(job.plan, launch=launch), job.weights), RowLengths(2048, 2048, 2048)
    return estimate_step(memory, job.weights, NODE, lengths, micro_batches)


def test_the_compute_of_a_step_is_8_flop_a_parameter_and_token_with_checkpointing() -> None:
    flops = 8 * 8.03e9 * 64 * 2048
    assert step_of(Launch("ddp", 8, 8)).compute_s == pytest.approx(flops / 8 / (0.4 * 989e12), rel=0.05)


def test_a_step_waits_for_the_slower_of_work_and_data() -> None:
    step = Step(1.0, 5.0, 0.5, 0.0, 0.0, 2.0, bubble=0.25, data_bytes=0, model_bytes=0)
    assert step.seconds == 5.0 + 2.0
    assert replace(step, data_s=1.0).seconds == 1.5 / 0.75 + 2.0


def test_only_what_the_strategy_splits_is_sent() -> None:
    ddp, tensor = step_of(Launch("ddp", 8, 8)), step_of(Launch("tp", 8, 8, axes=Axes(tensor=8)))
    assert ddp.data_bytes == bytes_summed(4 * 8_030_261_248, 8)
    assert (ddp.model_bytes, tensor.data_bytes) == (0, 0)
    assert tensor.model_bytes == layer_sums(LLAMA_8B, Axes(tensor=8), 64 * 2048, 2, sums=7 + 2)


def test_offloaded_weights_cost_time_for_each_micro_batch() -> None:
    once, twice = (step_of(Launch("zero3_offload", 8, 8), count).offload_s for count in (1, 2))
    assert twice - once == pytest.approx(2 * 2 * 8.03e9 / 8 / (0.8 * 32e9), rel=0.001)
    assert step_of(Launch("zero3", 8, 8)).offload_s == 0


def test_a_stage_with_parts_of_matrices_shares_the_rest_of_the_processes() -> None:
    assert data_shards(Launch("hsdp", 16, 8, axes=Axes(replicas=2, is_sharded=True))) == 8
    assert data_shards(Launch("3d", 16, 8, axes=Axes(pipeline=2, tensor=2))) == 4


def test_the_document_has_the_tables_that_the_program_prints() -> None:
    document = (ROOT / "docs/axes.md").read_text(encoding="utf-8")
    assert len(found := tables()) == 5
    assert [table for table in found if table not in document] == []


def test_ranks_kept_what_the_formulas_say() -> None:
    """The committed measurements of real runs of every strategy, by `benchmarks/axes.py`."""
    measured = {
        each["strategy"]: list(each["kept_bytes"].values())
        for path in (ROOT / "benchmarks/results").glob("*-axes*.json")
        for each in json.loads(path.read_text(encoding="utf-8"))["strategies"]
    }
    assert len(axes.CASES) >= 13
    for case in axes.CASES:
        kept = case.kept_bytes()
        found = [kept.parameters, kept.gradients, kept.optimizer_states]
        assert found == pytest.approx(measured[case.strategy], rel=0.001), case.strategy


@pytest.mark.slow
@pytest.mark.parametrize("case", axes.CASES, ids=lambda case: case.strategy)
def test_a_rank_sends_and_keeps_what_the_formulas_say(case: axes.Case) -> None:
    found = axes.measure(case)
    assert found["bytes_a_step"] == pytest.approx(found["formula_bytes"], rel=0.02)
    assert found["kept_bytes"] == pytest.approx(found["formula_kept_bytes"], rel=0.02)

"""Formulas of what each axis costs, and the tables that the documents have of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import axes, axes_formulas
from benchmarks.axes_estimates import FOUR_NODES, NODE, estimate, jobs
from benchmarks.axes_formulas import Shape, Sizes, bubble, data_bytes, gathered, kept_bytes, layer_sums, summed
from benchmarks.axes_worth import tables

LLAMA_8B = Shape(layers=32, hidden=4096, key_values=1024, in_layers=7_000, outside=1_000, table=500)


def test_a_ring_sends_all_parts_but_one() -> None:
    assert (gathered(100, 4), summed(100, 4), summed(100, 1)) == (75, 150, 0)


def test_a_tensor_layer_sends_what_megatron_says() -> None:
    """Narayanan et al. 2021, section 3.2: 8 b s h (t - 1) / t values for each layer and micro-batch."""
    sizes = Sizes(tensor=8, pipeline=4)
    assert layer_sums(LLAMA_8B, sizes, tokens=2048, value_bytes=2) == 8 * 2048 * 4096 * 7 / 8 * 2 * (32 / 4)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks", "share"),
    [(1, 8, 1, 0), (4, 8, 1, 3 / 11), (4, 8, 2, 3 / 19), (2, 1, 1, 1 / 2)],
)
def test_the_bubble_of_a_pipeline(stages: int, micro_batches: int, chunks: int, share: float) -> None:
    assert bubble(stages, micro_batches, chunks) == share


def test_the_data_axis_by_what_it_splits() -> None:
    plain = Sizes(data=4)
    assert data_bytes(100, plain, 4, 2, micro_batches=3) == summed(400, 4)
    assert data_bytes(100, replace(plain, split="states"), 4, 2, 3) == summed(400, 4) + gathered(200, 4)
    assert data_bytes(100, replace(plain, split="gradients"), 4, 2, 3) == 3 * summed(400, 4) + gathered(200, 4)
    assert data_bytes(100, replace(plain, split="weights"), 4, 2, 3) == 6 * gathered(200, 4) + gathered(400, 4)
    in_nodes = replace(plain, split="weights", replicas=2)
    assert data_bytes(100, in_nodes, 4, 2, 3) == 6 * gathered(200, 2) + gathered(400, 2) + summed(200, 2)


def test_memory_by_what_is_split() -> None:
    kept = {split: kept_bytes(100, Sizes(data=4, split=split)).total for split in ("nothing", "states", "gradients")}
    assert kept == {"nothing": 1600, "states": 1000, "gradients": 700}
    assert kept_bytes(100, Sizes(data=4, split="weights")).total == 400
    assert kept_bytes(100, Sizes(data=4, split="weights", replicas=2)).total == 800
    assert kept_bytes(100, Sizes(data=4, split="states"), master_copies=True).parameters == 500


def test_a_table_can_be_the_heaviest_stage() -> None:
    assert axes_formulas.parameters_of_rank(LLAMA_8B, Sizes(pipeline=4, tensor=2)) == 1000
    assert axes_formulas.parameters_of_rank(LLAMA_8B, Sizes(pipeline=32)) == 500


def test_rings_over_nodes_use_all_ports_of_a_node() -> None:
    assert NODE.link(8) == FOUR_NODES.link(2, stride=4) == 0.8 * 450e9
    assert FOUR_NODES.link(32) == 0.8 * 400e9
    assert FOUR_NODES.link(4, stride=8) == 0.8 * 50e9


def test_estimates_are_of_the_models_that_they_name() -> None:
    encoder, small, _, large = jobs()
    millions = [(each.shape.in_layers + each.shape.outside) // 1_000_000 for each in (encoder, small, large)]
    assert millions == [278, 8030, 70553]
    assert estimate(small, Sizes(data=8), NODE).memory_gb == pytest.approx(16 * 8.03, rel=0.05)
    flops = 8 * 8.03e9 * 64 * 2048
    assert estimate(small, Sizes(data=8), NODE).compute_s == pytest.approx(flops / 8 / (0.4 * 989e12), rel=0.05)


def test_the_document_has_the_tables_that_the_program_prints() -> None:
    document = (Path(__file__).parents[1] / "docs/strategies.md").read_text(encoding="utf-8")
    assert len(tables()) == 5
    assert [table for table in tables() if table not in document] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", axes.CASES, ids=lambda case: case.strategy)
def test_a_rank_sends_and_keeps_what_the_formulas_say(case: axes.Case) -> None:
    found = axes.measure(case)
    assert found["bytes_a_step"] == pytest.approx(found["formula_bytes"], rel=0.02)
    assert found["kept_bytes"] == pytest.approx(found["formula_kept_bytes"], rel=0.02)

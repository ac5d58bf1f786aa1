"""What ranks really keep of parameters, gradients and optimizer states is what `indictune plan` predicts, to 2%."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.axes import Case, measure
from benchmarks.plan import cases, compare_peak, error_of, tiny
from indictune.planning.memory import calibration
from indictune.versions import strategies

ALL = [(ranks, case) for ranks in (1, 2, 4, 8) for case in cases(ranks)]


@pytest.mark.parametrize("strategy", [pytest.param("fsdp2", marks=pytest.mark.more), "zero2"])
def test_two_ranks_keep_what_is_predicted(strategy: str) -> None:
    (case,) = (each for each in cases(2) if each.strategy == strategy)
    assert error_of(measure(case, anew=False)) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("case", [each for _, each in ALL], ids=[f"{each.strategy}-{ranks}" for ranks, each in ALL])
def test_ranks_keep_what_is_predicted(case: Case) -> None:
    assert error_of(measure(case, anew=False)) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "method", "rows", "keeps_inputs"),
    [
        ("sentiment", "full", 4, False),
        ("sentiment", "full", 16, False),
        ("sentiment", "full", 16, True),
        ("sentiment", "lora", 16, False),
        ("sentiment", "lora", 16, True),
        ("llama", "full", 4, False),
        ("llama", "lora", 4, False),
        ("llama", "lora", 4, True),
        ("llama", "qlora", 4, False),
    ],
)
def test_the_peak_is_near_the_prediction(task: str, method: str, rows: int, keeps_inputs: bool) -> None:
    """Of torch's CPU allocator. The terms do not all peak at once: the embedding, over half of this BERT, gets its
    gradient last, when no activations are left. So the sum may be up to 20% too high."""
    found = compare_peak(task, method, rows, keeps_inputs, tiny(task), anew=False)
    assert -0.1 < found["predicted"] / found["measured"] - 1 < 0.2


def test_every_strategy_file_is_measured() -> None:
    assert {case.strategy for _, case in ALL} == set(strategies())


def test_the_calibration_names_its_largest_error(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    assert calibration(path) == "not calibrated on a GPU"
    settings = [{"predicted": 95, "measured": 100}, {"predicted": 108, "measured": 100}]
    environment = {"gpus": ["H100"], "date": "2026-11-26"}
    path.write_text(json.dumps({"environment": environment, "settings": settings}), encoding="utf-8")
    assert calibration(path) == "within 8% of the peaks of 2 settings on H100, 2026-11-26"

"""Two runs' folders are compared, and the cause of a difference follows from their traces."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from indictune.parity_traces import TRACE, RunDifference, Traced, compare_traces, of_metrics, of_steps, of_weights

START = {"step": 0, "weights": {"a": 1, "b": 2}, "types": {"compute": "float32", "weights": "x"}, "max_norm": 1.0}
STEP = {"rows": 7, "clipped": 1.0, "draws": False, "generator": 3, "seeds": [1, 1]}


def run(folder: Path, losses: list[float], norms: list[float], steps: list[dict[str, Any]], **start: Any) -> Traced:
    """A folder as a run leaves it. `steps` and `start` are what differs from a run of no interest."""
    folder.mkdir()
    log = [{"loss": loss, "grad_norm": norm} for loss, norm in zip(losses, norms, strict=True)]
    lines = [START | start, *({**STEP, "step": number, **each} for number, each in enumerate(steps, 1))]
    (folder / "train_log.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in log), encoding="utf-8")
    (folder / TRACE).write_text("".join(f"{json.dumps(each)}\n" for each in lines), encoding="utf-8")
    metrics = {"world_size": 2, "eval": {"num_examples": 3, "accuracy": 0.5, "per_label": {}}}
    (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    return Traced(folder.name, folder)


LOSSES, NORMS = [2.0, 1.0], [4.0, 4.0]
CAUSES: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"steps": [{}, {"rows": 8}]}, "data order: step 2 has other rows"),
    "weights": ({"weights": {"a": 5, "b": 6}}, "initial weights: a and 1 more"),
    "types": ({"types": {"compute": "bf16", "weights": "x"}}, "precision: compute bf16 instead of float32"),
    "clipped": ({"steps": [{"clipped": 4.0}, {}]}, "clipping: step 1 leaves a norm of 4 instead of 1"),
    "by the engine": ({"max_norm": 0.0, "steps": [{"clipped": None}, {}]}, "clipping: step 1 leaves a norm of 4"),
    "seeds": ({"steps": [{"draws": True, "seeds": [1, 2]}, {}]}, "dropout: rank 1 has another seed at step 1"),
    "draws": ({"steps": [{"draws": True}, {}]}, "dropout: only other draws masks at step 1"),
    "scale": ({"norms": [8.0, 4.0]}, "loss scaling: at step 1 the loss is 1.01 times and the gradient 2 times"),
    "grows": ({"losses": [2.0001, 1.01]}, "precision: rounding in float32, which grows"),
}


@pytest.mark.parametrize("kind", sorted(CAUSES))
def test_the_cause_is_named(tmp_path: Path, kind: str) -> None:
    changes, expected = CAUSES[kind]
    one = run(tmp_path / "one", LOSSES, NORMS, [{}, {}])
    given = {"losses": [2.02, 1.01], "norms": NORMS, "steps": [{}, {}], **changes}
    found = compare_traces(one, run(tmp_path / "other", **given), 1e-3)
    assert not found.agrees
    assert len(found.causes) == 1
    assert found.causes[0].startswith(expected)


def test_equal_runs_need_no_cause(tmp_path: Path) -> None:
    one = run(tmp_path / "one", LOSSES, NORMS, [{}, {}])
    found = compare_traces(one, run(tmp_path / "other", LOSSES, NORMS, [{}, {}]), 0.0)
    assert (found.agrees, found.causes, found.processes) == (True, (), 2)
    assert {name: each.largest for name, each in found.parts.items()} == dict.fromkeys(
        ("loss", "grad_norm", "weights", "evaluation"), 0.0
    )


def test_the_first_step_beyond_the_tolerance_is_named() -> None:
    assert of_steps([1.0, 2.0, 4.0], [1.0, 2.2, 5.0], 0.05) == RunDifference(0.25, 2)
    assert of_steps([1.0], [float("nan")], 0.05).first == 1
    assert of_steps([1.0, 2.0], [1.0], 0.05) == RunDifference(math.inf, 2)


def test_the_furthest_weight_is_named() -> None:
    one = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    assert of_weights(one, {"a": torch.tensor([3.0]), "b": torch.tensor([4.5])}, 0.01) == RunDifference(0.1, "b")
    assert of_weights(one, {"a": one["a"]}, 1.0) == RunDifference(math.inf, "b")


def test_the_first_metric_that_differs_is_named() -> None:
    assert of_metrics({"accuracy": 0.5, "loss": 2.0}, {"accuracy": 0.5, "loss": 3.0}, 0.1) == RunDifference(
        0.5, "loss"
    )
    assert of_metrics({"accuracy": 0.5}, {}, 0.1).first == "accuracy"

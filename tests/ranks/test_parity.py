"""The same recipe gives the same run under every split of one global batch, over more than two epochs.

Each run goes through its shipped file and its real launcher. Losses and gradient norms are compared at every step,
weights by how far they moved apart as a share of how far they moved at all. `test_method_matrix.py` compares every
strategy file.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tests.ranks.launching import Run, distance
from tests.ranks.spread import EXACT, last_losses

ONE_MICRO_BATCH = ("--per_device_train_batch_size", "24")  # the whole global batch at once: nothing is split
# What the Trainer would do by itself: padded, and the whole embedding is trained.
PLAIN = (*ONE_MICRO_BATCH, "--padding_free", "off", "--active_vocabulary", "off")
SGD = ("--optim", "sgd", "--learning_rate", "0.05")

RELATIVE = 1e-4
OF_THE_CHANGE = 1e-3
OF_METRICS = 1e-6

Start = Callable[..., Run]


def differences(one: Run, other: Run, of_metrics: float = OF_METRICS) -> list[str]:
    """What differs between two runs by more than rounding explains, in words."""
    found = []
    for name in ("loss", "grad_norm"):
        for step, (a, b) in enumerate(zip(one.series(name), other.series(name), strict=True), 1):
            if abs(a - b) > RELATIVE * abs(a):
                found.append(f"{name} of step {step}: {a} and {b}")
    if any(not torch.equal(tensor, other.weights_at(1)[name]) for name, tensor in one.weights_at(1).items()):
        found.append("initial weights")
    moved_apart = distance(one.weights, other.weights) / distance(one.weights, one.weights_at(1))
    if not moved_apart <= OF_THE_CHANGE:
        found.append(f"weights, by {moved_apart} of their change")
    for name, value in one.metrics["eval"].items():
        if isinstance(value, float) and abs(value - other.metrics["eval"][name]) > of_metrics:
            found.append(f"eval {name}: {value} and {other.metrics['eval'][name]}")
    return found


def test_two_ranks_train_the_model_of_one_process(run_under: Start) -> None:
    one, two = run_under("single", 1, *PLAIN), run_under("fsdp2", 2)
    assert len(one.log) == 12
    assert (two.metrics["strategy"], two.metrics["world_size"]) == ("fsdp2", 2)
    assert differences(one, two) == []
    assert two.metrics["eval"]["per_language"] == one.metrics["eval"]["per_language"]


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("zero3", marks=pytest.mark.more),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp2", "pipeline", "zero1", "zero2")),
    ],
)
def test_plain_sgd_too(run_under: Start, strategy: str) -> None:
    """AdamW hides a gradient that is too large by a factor; SGD does not. (DeepSpeed offloads only its own Adam.)"""
    one, two = run_under("single", 1, *PLAIN, *SGD), run_under(strategy, 2, *SGD)
    assert differences(one, two) == []


@pytest.mark.parametrize(
    "rows", [pytest.param("12", marks=pytest.mark.slow), "4", pytest.param("1", marks=pytest.mark.more)]
)
def test_accumulation_does_not_change_the_run(run_under: Start, rows: str) -> None:
    """24 = 1 x 24 = 1 x 12 x 2 = ...; the last global batch of an epoch has 5 rows, fewer than its micro-batches."""
    one = run_under("single", 1, *PLAIN)
    assert differences(one, run_under("single", 1, "--per_device_train_batch_size", rows)) == []


@pytest.mark.slow
def test_no_accumulation_on_two_ranks(run_under: Start) -> None:
    two = run_under("ddp", 2, "--per_device_train_batch_size", "12")
    assert differences(run_under("single", 1, *PLAIN), two) == []


@pytest.mark.slow
def test_a_limit_of_tokens_does_not_change_a_padded_run(run_under: Start) -> None:
    """The limit is a little more than the longest row; a global batch of 24 rows has a few hundred tokens."""
    two = run_under("ddp", 2, "--max_tokens_per_device", "60", "--padding_free", "off")
    log = (two.folder / "logs/rank-0.log").read_text(encoding="utf-8")
    found = re.search(r" x (\d+) times$", log, re.MULTILINE)
    assert found is not None
    assert int(found[1]) > 5
    assert differences(run_under("single", 1, *PLAIN), two) == []


@pytest.mark.slow
def test_weighted_smoothed_loss_is_exact_too(run_under: Start) -> None:
    flags = ("--class_weights", "balanced", "--label_smoothing_factor", "0.1")
    one, two = run_under("single", 1, *PLAIN, *flags), run_under("ddp", 2, *flags)
    assert differences(one, two) == []
    assert differences(one, run_under("single", 1, *PLAIN)) != []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2", "zero3"])
def test_bf16_stays_within_the_spread_of_seeds(run_under: Start, strategy: str) -> None:
    """Of the mean loss of the last steps in fp32, over five seeds of order and dropout."""
    fp32, bf16 = last_losses(run_under, *EXACT), last_losses(run_under, strategy, 2, "--bf16", "true")
    assert abs(fp32.mean() - bf16.mean()) <= fp32.std()
    assert not fp32.equal(bf16)

"""One global batch split into processes, micro-batches and accumulation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from indictune.commands.train import Asked, TrainFlags, fit_data_ranks
from indictune.config.plan import Launch
from indictune.distributed.batch_size import accumulation_steps, split_batch, steps_of_run
from indictune.distributed.choose_launcher import choose_launcher
from indictune.errors import UserError
from tests.refusals import refused


@pytest.mark.parametrize(
    ("global_batch", "per_device", "world", "expected"),
    [(64, 64, 1, 1), (64, 8, 1, 8), (64, 8, 8, 1), (64, 8, 4, 2), (6, 1, 3, 2), (1, 1, 1, 1)],
)
def test_accumulation_fills_the_global_batch(global_batch: int, per_device: int, world: int, expected: int) -> None:
    assert accumulation_steps(global_batch, per_device, world) == expected


def test_the_refusal_names_the_sizes() -> None:
    with refused("batch-does-not-divide", "48", "2", "16", "32", flag="--global_batch_size"):
        accumulation_steps(48, 16, 2)


@given(st.integers(1, 300), st.integers(1, 80), st.integers(1, 16))
def test_a_micro_batch_is_never_more_than_a_share(global_batch: int, per_device: int, ranks: int) -> None:
    sizes = {"global_batch_size": global_batch, "per_device_train_batch_size": per_device}
    asked = Asked("classification", None, sizes, {}, TrainFlags())
    flags = fit_data_ranks(asked, choose_launcher("ddp", ranks)).flags
    fitting = int(flags.get("per_device_train_batch_size", [str(per_device)])[0])
    assert fitting == per_device or fitting * ranks == global_batch
    assert global_batch % ranks or fitting * ranks <= global_batch


@given(st.integers(1, 300), st.integers(1, 80), st.integers(1, 16))
def test_every_split_is_exact_or_refused(global_batch: int, per_device: int, world: int) -> None:
    try:
        assert accumulation_steps(global_batch, per_device, world) * per_device * world == global_batch
    except UserError:
        assert global_batch % (per_device * world)


@pytest.mark.parametrize(
    ("rows", "batch", "max_steps", "epochs", "expected"),
    [(101, 24, 12, 3.0, 12), (101, 24, -1, 3.0, 15), (101, 24, -1, 2.3, 12), (96, 24, -1, 1.0, 4), (5, 0, -1, 1.0, 5)],
)
def test_the_steps_of_a_run(rows: int, batch: int, max_steps: int, epochs: float, expected: int) -> None:
    assert steps_of_run(rows, batch, max_steps, epochs) == expected


class TestALimitOfTokens:
    @staticmethod
    def steps(lengths: list[int], max_tokens: int, run: int = 1, padded: bool = False, batch: int = 4) -> int:
        given = {"max_tokens_per_device": max_tokens, "global_batch_size": batch, "max_steps": run, "seed": 0}
        training = SimpleNamespace(**given, data_seed=None, num_train_epochs=1)
        plan: Any = SimpleNamespace(training=training, launch=Launch("ddp", 2, 2), recipe=SimpleNamespace(values={}))
        found = split_batch(plan, torch.tensor(lengths), lambda row: f"t.csv:{row + 2}", padded)
        return found["gradient_accumulation_steps"]

    def test_the_fewest_steps_that_keep_to_it(self) -> None:
        assert self.steps([10] * 4, 20) == 1
        assert self.steps([10] * 4, 19) == 2
        assert self.steps([10] * 4, 10) == 2

    def test_padding_counts(self) -> None:
        assert self.steps([20, 10, 10, 10], 30, padded=False) == 1
        assert self.steps([20, 18, 9, 5], 30, padded=False) == 1
        assert self.steps([20, 18, 9, 5], 30, padded=True) == 2

    def test_every_step_of_every_epoch_counts(self) -> None:
        # Which two rows of the eight come together depends on the epoch.
        lengths = [10, 10, 10, 10, 1, 1, 1, 1]
        assert [self.steps(lengths, 10, run, batch=2) for run in (4, 200)] == [1, 1]
        assert [self.steps([9, 9, 9, 9, 1, 1, 1, 1], 10, run) for run in (2, 100)] == [1, 2]

    def test_steps_after_the_end_do_not_count(self) -> None:
        # In the first epoch all long rows come in its second step.
        assert [self.steps([1, 9, 9, 1, 1, 9, 1, 1], 10, run) for run in (1, 2)] == [1, 2]

    def test_single_rows_over_the_limit_are_named(self) -> None:
        limit = "--max_tokens_per_device"
        with refused("rows-longer-than-limit", "2 training rows", "40 tokens", "t.csv:3, t.csv:5.", flag=limit):
            self.steps([9, 31, 4, 40], 30)
        with refused("rows-longer-than-limit", "7 training rows", "t.csv:2, t.csv:3", "t.csv:6, ...", flag=limit):
            self.steps([50] * 7, 30)

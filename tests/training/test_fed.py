"""What the model itself is fed in a run: rows end to end without padding, and no more tokens at once than it may."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from indictune.data.batching import TrainingBatches, deal_epoch
from tests.ranks import conftest, test_llama
from tests.ranks.launching import SCRIPT, python, train
from tests.training import fed

PROGRAM = fed.__file__
GLOBAL_BATCH_SIZE, STEPS = 24, 12  # of the classifier's job


def dealt_and_fed(job: Path, folder: Path, *flags: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """How a run deals its rows, and its forward passes in training."""
    flags = (*flags, "--config", str(job), "--save_strategy", "no")
    train(python(), folder / "out", *flags, script=PROGRAM, FED=str(folder / "fed.jsonl"))
    dealt, *passes = map(json.loads, (folder / "fed.jsonl").read_text(encoding="utf-8").splitlines())
    return dealt, passes


@pytest.mark.parametrize(
    ("script", "write_job", "rows"),
    [
        (SCRIPT, conftest.write_job, GLOBAL_BATCH_SIZE),
        pytest.param(test_llama.SCRIPT, test_llama.write_job, 12, marks=pytest.mark.more),
    ],
)
def test_each_micro_batch_runs_as_one_sequence_without_padding(
    tmp_path: Path, script: str, write_job: Callable[[Path], Path], rows: int
) -> None:
    dealt, passes = dealt_and_fed(write_job(tmp_path), tmp_path, script, "--max_steps", "2")
    lengths, accumulation_steps = torch.tensor(dealt["lengths"]), dealt["accumulation_steps"]
    batches = TrainingBatches(lengths, rows, accumulation_steps, 0, 1, dealt["seed"], padded=False)
    micro_batches = [each for step in range(2) for each in batches.micro_batches(0, step)]
    assert accumulation_steps == 4
    assert len(passes) == len(micro_batches) == 8
    for one, micro_batch in zip(passes, micro_batches, strict=True):
        ends = [0, *lengths[micro_batch].cumsum(0).tolist()]
        assert (one["shape"], one["ends"]) == ([1, ends[-1]], ends)


@pytest.mark.more
def test_no_forward_pass_has_more_tokens_than_it_may_and_one_step_fewer_would_not_do(tmp_path: Path) -> None:
    """All through the run, padding and the rows of its last epoch included, of which it ends in the middle."""
    limit, seed = 121, 6
    flags = ("--max_tokens_per_device", str(limit), "--seed", "0", "--data_seed", str(seed), "--padding_free", "off")
    dealt, passes = dealt_and_fed(conftest.write_job(tmp_path), tmp_path, SCRIPT, *flags)

    def most(parts: int, seed: int = seed, steps: int = STEPS, padded: bool = True) -> int:
        """Tokens of a micro-batch in so many steps; five are an epoch."""
        deals = [
            deal_epoch(torch.tensor(dealt["lengths"]), GLOBAL_BATCH_SIZE, parts, seed, epoch, padded)
            for epoch in range(3)
        ]
        return int(torch.cat([deal.costs for deal in deals])[: steps * parts].max())

    parts = dealt["accumulation_steps"]
    assert dealt["seed"] == seed
    assert most(parts) <= limit < most(parts - 1)
    for other in ({"seed": 0}, {"steps": 5}, {"padded": False}):  # from which another number would follow
        assert most(parts - 1, **other) <= limit
    assert len(passes) == STEPS * parts
    assert {one["step"] for one in passes} == set(range(STEPS))
    assert max(rows * longest for rows, longest in (one["shape"] for one in passes)) <= limit

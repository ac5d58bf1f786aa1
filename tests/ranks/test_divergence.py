"""`--divergence_check_steps` in whole runs sees a flipped bit, and under no strategy one that is not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import mutants
from tests.ranks.launching import Run, accelerate, start

CHECKED = ("--divergence_check_steps", "1", "--dropout", "0.1", "--max_steps", "4")
RANKS = {"hsdp": 4, "ddp_tp": 4, "fsdp2_tp": 4, "zero2_tp": 2, "zero3": 2, "zero1": 2}
RANKS |= {"ddp": 2, "fsdp2": 2, "tp": 2, "pipeline": 2}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", sorted(RANKS))
def test_sound_copies_are_alike(run_under: Callable[..., Run], strategy: str) -> None:
    run = run_under(strategy, RANKS[strategy], *CHECKED)
    assert len(run.log) == 4


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param("ddp", 2, marks=pytest.mark.more),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("ddp", 3), ("tp", 2))),
    ],
)
def test_a_flipped_bit_stops_the_run_before_it_is_saved(job: Path, tmp_path: Path, strategy: str, ranks: int) -> None:
    flags = ["--config", str(job), *CHECKED, "--per_device_train_batch_size", "4", "--output_dir", str(tmp_path)]
    result = start([*accelerate(strategy, ranks), mutants.__file__, *flags], {"MUTANT": mutants.flipped_bit.__name__})
    assert result.returncode == 1
    status = json.loads((tmp_path / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == "failed"
    assert "[ranks-diverged]" in status["message"]
    assert f"After step 3, rank {ranks - 1} on" in status["message"]
    assert "LayerNorm" in status["message"]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]

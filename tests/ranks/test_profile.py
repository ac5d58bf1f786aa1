"""`--profile_steps` measures every strategy, changes none, and names the rank that the others wait for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import mutants
from tests.ranks.launching import Run, torchrun, train

FLAGS = ("--profile_steps", "3")


def profile_of(run: Run) -> dict[str, Any]:
    """What was measured; compute, exposed communication and gaps of each rank make up its steps."""
    profile = dict(json.loads((run.folder / "profile" / "profile.json").read_text(encoding="utf-8")))
    for rank in profile["ranks"]:
        assert rank["compute_s"] + rank["exposed_s"] + sum(rank["gaps_s"].values()) == pytest.approx(rank["step_s"])
        assert 0 <= rank["overlapped_s"] <= rank["communication_s"]
    return profile


@pytest.mark.slow
def test_the_rank_that_reads_slowly_is_named(job: Path, tmp_path: Path) -> None:
    flags = ("--max_steps", "6", "--save_strategy", "no", *FLAGS)
    run = train(torchrun(2), tmp_path, "--config", str(job), *flags, script=mutants.__file__, MUTANT="slow_reading")
    profile = profile_of(run)
    fast, slow = profile["ranks"]
    assert profile["slowest"]["rank"] == 1
    assert next(iter(profile["slowest"]["more_s"])) == "gaps in reading rows"
    assert slow["gaps_s"]["reading rows"] > 0.1 > fast["gaps_s"]["reading rows"]
    assert fast["exposed_s"] > 0.1  # it waits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("single", 1), ("ddp", 2), ("fsdp2", 2), ("zero1", 2), ("zero2", 2), ("zero3", 2), ("pipeline", 2), ("tp", 2)],
)
def test_a_profiled_run_is_the_same_run(run_under: Callable[..., Run], strategy: str, ranks: int) -> None:
    plain, profiled = run_under(strategy, ranks), run_under(strategy, ranks, *FLAGS)
    assert profiled.series("loss") == plain.series("loss")
    assert profiled.series("grad_norm") == plain.series("grad_norm")
    profile = profile_of(profiled)
    assert (profile["first_step"], profile["last_step"], len(profile["ranks"])) == (4, 6, ranks)
    for number, rank in enumerate(profile["ranks"]):
        assert (rank["rank"], rank["steps"]) == (number, 3)
        assert rank["compute_s"] > 0
        assert (rank["communication_s"] > 0) == (ranks > 1)
        assert (profiled.folder / "profile" / f"rank-{number}.json.gz").exists()

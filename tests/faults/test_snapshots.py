"""A run that is killed between two checkpoints of the disk resumes from its snapshot in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from indictune.checkpoint import store
from indictune.checkpoint.snapshots import folder_of
from tests.conftest import FinishedRun
from tests.faults.runs import STEP, Job
from tests.ranks.launching import Run, accelerate, python

FLAGS = ("--snapshot_steps", "1", "--save_total_limit", "9")
_OTHERS = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "tp", "pipeline")
COPY = "indictune.checkpoint.save:copy_snapshot"


def names(found: list[Path]) -> list[str]:
    assert [each for each in found if store.read_manifest(each) is None] == []
    return [each.name for each in found]


@pytest.mark.more
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("single", 1),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in _OTHERS),
    ],
)
def test_the_newest_snapshot_wins(finished_run: FinishedRun, tmp_path: Path, strategy: str, ranks: int) -> None:
    """The fifth copy to the disk is slow, and the run is killed at the end of step 6."""
    launcher = tuple(python() if strategy == "single" else accelerate(strategy, ranks))
    unbroken = Job(finished_run.recipe, tmp_path / "unbroken", launcher, ("--save_total_limit", "9"))
    assert unbroken.start().returncode == 0
    job = Job(finished_run.recipe, tmp_path / "out", launcher, FLAGS)

    # Each step is copied, if the copy before it is done; steps 2, 4, 6 and 8 wait for that.
    killed = job.start(f"SLOW@{COPY}:5+SIGKILL@{STEP}:6")
    assert killed.returncode != 0
    memory = folder_of(job.folder)
    assert memory is not None
    assert names(store.checkpoints_in(memory))[0] == "checkpoint-5"
    assert not (job.folder / "checkpoint-5").exists()

    resumed = job.start()
    assert resumed.returncode == 0, resumed.stderr
    assert f"Resuming from {job.folder / 'checkpoint-5'}" in resumed.stderr
    assert job.outcome() == unbroken.outcome()
    on_disk = names(store.checkpoints_in(job.folder))
    assert on_disk[:2] == ["checkpoint-8", "checkpoint-6"]
    assert on_disk[-1] == "checkpoint-2"  # 4 is there too, if its copy was done when step 5 ended
    assert not memory.exists()
    share = Run(job.folder).metrics["train"]["snapshots"]["share_of_runtime"]
    assert 0 < share < 1

"""Disks that are full, closed, or not shared."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from indictune.training import checkpoints
from tests.conftest import FinishedRun
from tests.distributed.launching import BIN, ROOT, SCRIPT, Run, accelerate, free_port
from tests.faults.runs import FAULTY, STEP, Job, environment


def on_two_nodes(strategy: str, recipe: Path, folders: list[Path], event: str | None = None) -> list[str]:
    """Start a run as on two nodes of one process, each with a disk of its own; what each said."""
    port = str(free_port())
    nodes = []
    for node, folder in enumerate(folders):
        command = [
            *(str(BIN / "accelerate"), "launch", "--config_file", f"accelerate_configs/{strategy}.yaml"),
            *("--num_machines", "2", "--num_processes", "2", "--machine_rank", str(node)),
            *("--main_process_ip", "127.0.0.1", "--main_process_port", port),
            *([FAULTY, event] if event else []),
            *(SCRIPT, "--config", str(recipe), "--output_dir", str(folder), "--resume_from_checkpoint", "auto"),
            *("--eval_strategy", "steps", "--eval_steps", "2", "--save_strategy", "steps", "--save_steps", "2"),
        ]
        nodes.append(subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True))
    return [node.communicate(timeout=300)[1] for node in nodes]


@pytest.mark.slow
def test_nodes_without_a_shared_disk_are_refused_where_each_saves_a_part(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    said = on_two_nodes("fsdp2", finished_run.recipe, [tmp_path / "first", tmp_path / "second"])
    assert "is another folder on each node, and fsdp2 keeps parts of a checkpoint on each" in said[0]


@pytest.mark.slow
def test_nodes_without_a_shared_disk_go_on_from_their_own(finished_run: FinishedRun, tmp_path: Path) -> None:
    strategy = "ddp"
    folders = [tmp_path / "first", tmp_path / "second"]
    said = on_two_nodes(strategy, finished_run.recipe, folders, f"SIGTERM@{STEP}:3@1")
    for folder in folders:
        assert checkpoints.damage(folder / "checkpoint-4") == [], said
    # The second has a damaged one: both go on from the one before.
    (folders[1] / "checkpoint-4" / "trainer_state.json").write_text("{}", encoding="utf-8")
    said = on_two_nodes(strategy, finished_run.recipe, folders)
    assert f"Going on from {folders[0] / 'checkpoint-2'}" in said[0]
    whole = Job(finished_run.recipe, tmp_path / "whole", tuple(accelerate(strategy, 2)))
    assert whole.start().returncode == 0
    expected = Run(whole.folder).weights
    for name, found in Run(folders[0]).weights.items():
        assert found.equal(expected[name]), name


def test_a_full_disk_is_told_and_the_last_checkpoint_stays(finished_run: FinishedRun, tmp_path: Path) -> None:
    """The shell's limit on the size of files stands for the disk's end."""
    job = Job(finished_run.recipe, tmp_path / "out")
    flags = ["--config", str(finished_run.recipe), "--output_dir", str(job.folder), "--save_strategy", "steps"]
    flags += ["--save_steps", "2", "--eval_strategy", "no", "--load_best_model_at_end", "false"]
    limited = f"ulimit -f 1000; exec {BIN / 'python'} {SCRIPT} {' '.join(flags)}"  # of 1 KiB
    result = subprocess.run(["bash", "-c", limited], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert result.returncode == 1
    message = job.status["message"]
    assert message.startswith(f"checkpoint-2 could not be written to {job.folder}: "), result.stderr
    assert "There is no earlier one" in message
    assert not [path.name for path in job.folder.iterdir() if "checkpoint" in path.name]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that holds a checkpoint, and not two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(disk)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="module")
def unbroken(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes out where nothing happens."""
    whole = Job(finished_run.recipe, tmp_path_factory.mktemp("unbroken") / "out")
    assert whole.start().returncode == 0
    return whole.outcome()


def test_a_disk_that_fills_up_is_told_and_the_run_goes_on_when_there_is_room(
    finished_run: FinishedRun, small_disk: Path, unbroken: dict[str, Any]
) -> None:
    job = Job(finished_run.recipe, small_disk / "out")
    result = job.start()
    assert result.returncode == 1
    message = job.status["message"]
    assert message.startswith(f"checkpoint-4 could not be written to {job.folder}: "), result.stderr
    assert "No space left on device. It needs " in message
    assert "checkpoint-2 is whole" in message
    assert [path.name for path in job.folder.iterdir() if "checkpoint" in path.name] == ["checkpoint-2"]
    assert checkpoints.damage(job.folder / "checkpoint-2") == []
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    assert job.start().returncode == 0
    assert job.outcome() == unbroken


PLACES = ["os:fsync:1", "os:fsync:9", "pathlib:Path.rename:2", "torch:save:2"]
FAST = [("EROFS", "os:fsync:9"), ("EACCES", "pathlib:Path.rename:2")]


@pytest.mark.parametrize(
    ("error", "place"),
    [
        pytest.param(error, place, marks=[] if (error, place) in FAST else pytest.mark.slow)
        for error in ("EROFS", "EACCES")
        for place in PLACES
    ],
)
def test_a_disk_that_takes_no_more_from_some_call_on_is_told(
    finished_run: FinishedRun, unbroken: dict[str, Any], tmp_path: Path, error: str, place: str
) -> None:
    job = Job(finished_run.recipe, tmp_path / "out")
    result = job.start(f"{error}@{place}")
    assert result.returncode == 1
    assert f" could not be written to {job.folder}: {os.strerror(getattr(errno, error))}" in job.status["message"]
    found = [path for path in job.folder.iterdir() if "checkpoint" in path.name]
    assert found == checkpoints.listed(job.folder)
    assert [checkpoints.damage(path) for path in found] == [[] for _ in found]
    assert job.start().returncode == 0
    assert job.outcome() == unbroken


def test_a_folder_that_is_closed_is_told_and_the_last_checkpoint_stays(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write everywhere")
    job = Job(finished_run.recipe, tmp_path / "out")
    assert job.start(f"SIGTERM@{STEP}:3").returncode == 75
    job.folder.chmod(0o555)
    result = job.start()
    job.folder.chmod(0o755)
    assert result.returncode == 2
    assert checkpoints.damage(job.folder / "checkpoint-4") == []

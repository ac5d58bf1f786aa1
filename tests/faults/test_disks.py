"""Disks that are full, closed, or not shared."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indictune.checkpoint import store
from indictune.cli import main
from indictune.hub.publish import published
from indictune.models.trusted_files import ADAPTER
from indictune.supervise.run_folder import RUN_LOCK
from tests.checkpoint.test_store import write
from tests.conftest import FinishedRun
from tests.faults.runs import AS_A_USER, EVALUATION, FAULTY, STEP, Job, best_step, environment
from tests.ranks.launching import BIN, ROOT, SCRIPT, Run, accelerate, free_port, python, start, torchrun

slow = pytest.mark.slow
STORE = "indictune.checkpoint.store"


def on_two_nodes(
    strategy: str,
    recipe: Path,
    folders: list[Path],
    event: str | None = None,
    flags: Sequence[str] = (),
    named: str | None = None,
) -> list[str]:
    """Start a run as on two nodes of one process, each with a disk of its own, to go on from the checkpoint of a name
    or the newest; what each said."""
    port = str(free_port())
    commands = []
    for node, folder in enumerate(folders):
        launcher = [
            *(str(BIN / "accelerate"), "launch", "--config_file", f"accelerate_configs/{strategy}.yaml"),
            *("--num_machines", "2", "--num_processes", "2", "--machine_rank", str(node)),
            *("--main_process_ip", "127.0.0.1", "--main_process_port", port),
        ]
        command = [
            *(*launcher, *([FAULTY, event] if event else [])),
            *(SCRIPT, "--config", str(recipe), "--output_dir", str(folder)),
            *("--resume_from_checkpoint", str(folder / named) if named else "auto"),
            *("--eval_strategy", "steps", "--eval_steps", "2", "--save_strategy", "steps", "--save_steps", "2"),
            *("--ddp_timeout", "120", *flags),
        ]
        commands.append(command)
    with ThreadPoolExecutor(2) as nodes:
        return [done.stderr for done in nodes.map(start, commands)]


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=slow) for name in ("fsdp2", "ddp", "zero1", "zero3")],
)
def test_nodes_without_a_shared_disk_go_on_from_what_the_other_has(
    strategy: str, finished_run: FinishedRun, tmp_path: Path
) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    said = on_two_nodes(strategy, finished_run.recipe, folders, f"SIGTERM@{STEP}:3@1")
    for folder in folders:
        assert store.damage(folder / "checkpoint-4") == [], said
        assert (folder / RUN_LOCK).read_text(encoding="utf-8").startswith("process ")
    assert store.files_in(folders[0] / "checkpoint-4") == store.files_in(folders[1] / "checkpoint-4")
    # The first has a damaged one, and the second is a new disk: both go on from the one before.
    (folders[0] / "checkpoint-4" / "trainer_state.json").write_text("{}", encoding="utf-8")
    shutil.rmtree(folders[1])
    said = on_two_nodes(strategy, finished_run.recipe, folders)
    assert f"Resuming from {folders[0] / 'checkpoint-2'}" in said[0]
    whole = Job(finished_run.recipe, tmp_path / "whole", tuple(accelerate(strategy, 2)))
    assert whole.start().returncode == 0
    expected = Run(whole.folder).weights
    for name, found in Run(folders[0]).weights.items():
        assert found.equal(expected[name]), name
    assert model_in(folders[0]) == model_in(folders[1])
    for folder in folders:
        assert main(["checkpoint", str(folder / "checkpoint-8"), "--convert_to", str(folder / "converted")]) == 0
    assert model_in(folders[0] / "converted") == model_in(folders[1] / "converted") != {}


@pytest.mark.slow
def test_ranks_with_other_rows_or_flags_do_not_train(finished_run: FinishedRun, tmp_path: Path) -> None:
    out, weights = tmp_path / "out", tmp_path / "weights.json"
    weights.write_text(json.dumps({"negative": 1, "neutral": 2, "positive": 3}), encoding="utf-8")
    of_second = f"--learning_rate 0.01 --max_length 8 --class_weights {weights}"
    flags = ["--config", str(finished_run.recipe), "--output_dir", str(out)]
    said = start([*torchrun(2), "tests/faults/of_rank_1.py", of_second, SCRIPT, *flags]).stderr
    for name in ("training rows", "validation rows", "tokens that are trained", "test rows", "class weights"):
        assert f"{name} of rank 1: " in said
    assert "--learning_rate of rank 1: 0.01. Rank 0 on " in said
    assert json.loads((out / "status.json").read_text(encoding="utf-8"))["state"] == "user_error"
    assert not (out / "train_log.jsonl").exists()


@slow
def test_no_disk_replaces_a_step_that_another_does_not_take(finished_run: FinishedRun, tmp_path: Path) -> None:
    """A stop in an evaluation has saved the step, which is saved again when it is evaluated. Of two saves of a step,
    one a disk, neither would be gone on from."""
    folders = [tmp_path / "first", tmp_path / "second"]
    on_two_nodes("ddp", finished_run.recipe, folders, f"SIGTERM@{EVALUATION}:1")
    before = [(folder / "checkpoint-2" / store.MANIFEST).read_text(encoding="utf-8") for folder in folders]
    flags = ("--ddp_timeout", "20")
    said = on_two_nodes("ddp", finished_run.recipe, folders, f"EROFS@{STORE}:seal:1@1", flags)
    assert "Read-only file system" in said[1]
    assert [(folder / "checkpoint-2" / store.MANIFEST).read_text(encoding="utf-8") for folder in folders] == before
    said = on_two_nodes("ddp", finished_run.recipe, folders)
    assert f"Resuming from {folders[0] / 'checkpoint-2'}" in said[0]
    assert model_in(folders[0]) == model_in(folders[1]) != {}


@pytest.mark.slow
def test_no_disk_names_a_checkpoint_that_another_has_not_in_full(finished_run: FinishedRun, tmp_path: Path) -> None:
    """The second is killed before its manifest is written."""
    folders = [tmp_path / "first", tmp_path / "second"]
    said = on_two_nodes("ddp", finished_run.recipe, folders, f"SIGKILL@{STORE}:seal:2@1")
    kept = [store.checkpoints_in(folder) for folder in folders]
    assert kept == [[folder / "checkpoint-2"] for folder in folders], said
    assert [store.damage(folder / "checkpoint-2") for folder in folders] == [[], []]


@slow
def test_nodes_go_on_from_a_named_checkpoint_that_one_of_them_has(finished_run: FinishedRun, tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    on_two_nodes("ddp", finished_run.recipe, folders, f"SIGTERM@{STEP}:3@1")
    shutil.rmtree(folders[0])  # a new disk, on which rank 0 runs
    said = on_two_nodes("ddp", finished_run.recipe, folders, named="checkpoint-4")
    assert f"Resuming from {folders[0] / 'checkpoint-4'}" in said[0]
    assert model_in(folders[0]) == model_in(folders[1]) != {}


@pytest.mark.more
class TestANamedCheckpoint:
    """Of nodes with a disk each, when they have met."""

    NAME = "checkpoint-4"

    @pytest.fixture
    def folders(self, tmp_path: Path) -> list[Path]:
        for name in ("first", "second"):
            (tmp_path / name).mkdir(mode=0o755)
        return [tmp_path / "first", tmp_path / "second"]

    def outcome(self, folders: list[Path]) -> list[str]:
        done = start([*torchrun(2), "tests/faults/choosing.py", self.NAME, *map(str, folders)])
        assert done.returncode == 0, done.stderr
        return [(folder / "outcome").read_text() for folder in folders]

    def test_of_one_disk_is_given_to_the_other(self, folders: list[Path]) -> None:
        write(folders[1], 4)
        assert self.outcome(folders) == [f"takes {folder / self.NAME}" for folder in folders]
        assert [store.damage(folder / self.NAME) for folder in folders] == [[], []]

    def test_of_no_disk_is_refused(self, folders: list[Path]) -> None:
        for folder, outcome in zip(folders, self.outcome(folders), strict=True):
            assert outcome.startswith(f"--resume_from_checkpoint {folder / self.NAME}: ")
            assert outcome.endswith("[resume-damaged]")

    def test_of_two_saves_is_refused(self, folders: list[Path]) -> None:
        for folder in folders:
            manifest = store.read_manifest(write(folder, 4))
            assert manifest is not None
            of_its_own = replace(manifest, save=folder.name).to_json()
            (folder / self.NAME / store.MANIFEST).write_text(of_its_own, encoding="utf-8")
        for folder, outcome in zip(folders, self.outcome(folders), strict=True):
            assert f"{folder / self.NAME} is of another save on another node's disk" in outcome
            assert outcome.endswith("[resume-damaged]")


def model_in(folder: Path) -> dict[str, bytes]:
    """The files of a model, or of a checkpoint's, without numbers: only the first node has those of each row."""
    names = published(folder, [path.name for path in folder.iterdir()])
    numbers = {"metrics.json", "evaluation.json", "README.md"}
    return {name: (folder / name).read_bytes() for name in names if name not in numbers}


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("fsdp2", marks=pytest.mark.more),
        *(pytest.param(name, marks=slow) for name in ("ddp", "zero2", "zero3")),
    ],
)
def test_nodes_without_a_shared_disk_end_with_the_same_adapter(
    strategy: str, finished_run: FinishedRun, tmp_path: Path
) -> None:
    """The run itself reads the first node's again, and compares it with the trained one."""
    folders = [tmp_path / "first", tmp_path / "second"]
    said = on_two_nodes(strategy, finished_run.recipe, folders, flags=["--method", "lora"])
    assert ADAPTER in model_in(folders[0]), said
    assert model_in(folders[0]) == model_in(folders[1])
    assert all((folder / "metrics.json").is_file() for folder in folders)
    assert model_in(folders[0] / "checkpoint-8") == model_in(folders[1] / "checkpoint-8")
    (folders[1] / "metrics.json").unlink()  # it was killed just before
    said = on_two_nodes(strategy, finished_run.recipe, folders, flags=["--method", "lora"])
    assert all((folder / "metrics.json").is_file() for folder in folders), said
    assert model_in(folders[0]) == model_in(folders[1])


@slow
def test_a_run_that_is_finished_on_all_nodes_trains_nothing(finished_run: FinishedRun, tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    on_two_nodes("ddp", finished_run.recipe, folders)
    before = [(folder / "metrics.json").read_bytes() for folder in folders]
    said = on_two_nodes("ddp", finished_run.recipe, folders)
    assert [(folder / "metrics.json").read_bytes() for folder in folders] == before, said
    status = json.loads((folders[0] / "status.json").read_text(encoding="utf-8"))
    assert status == {"state": "ok", "message": ""}


@slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_nodes_agree_on_the_best_after_a_disk_was_replaced(
    strategy: str, finished_run: FinishedRun, tmp_path: Path
) -> None:
    """The best is step 2, with the lowest evaluation loss. It is not the checkpoint that the run resumes."""
    folders = [tmp_path / "first", tmp_path / "second"]
    flags = ["--load_best_model_at_end", "false", "--metric_for_best_model", "loss"]
    on_two_nodes(strategy, finished_run.recipe, folders, f"SIGTERM@{STEP}:3@1", flags)
    shutil.rmtree(folders[1])
    said = on_two_nodes(strategy, finished_run.recipe, folders, flags=flags)
    best = [best_step(folder / "checkpoint-8") for folder in folders]
    assert best == [2, 2], said


@pytest.mark.more
def test_a_full_disk_is_reported_and_the_last_checkpoint_stays(finished_run: FinishedRun, tmp_path: Path) -> None:
    """The shell's limit on the size of files stands for the disk's end."""
    job = Job(finished_run.recipe, tmp_path / "out")
    flags = ["--config", str(finished_run.recipe), "--output_dir", str(job.folder), "--save_strategy", "steps"]
    flags += ["--save_steps", "2", "--eval_strategy", "no", "--load_best_model_at_end", "false"]
    limited = f"ulimit -f 1000; exec {BIN / 'python'} {SCRIPT} {' '.join(flags)}"  # of 1 KiB
    result = subprocess.run(["bash", "-c", limited], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert result.returncode == 1
    message = job.status["message"]
    assert message.startswith(f"checkpoint-2 could not be written to {job.folder}: "), result.stderr
    assert "There is no earlier checkpoint" in message
    assert not [path.name for path in job.folder.iterdir() if "checkpoint" in path.name]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that holds a checkpoint, and not two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(disk)]
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


def test_a_disk_that_fills_up_is_reported_and_the_run_resumes_when_there_is_room(
    finished_run: FinishedRun, small_disk: Path, unbroken: dict[str, Any]
) -> None:
    job = Job(finished_run.recipe, small_disk / "out")
    result = job.start()
    assert result.returncode == 1
    message = job.status["message"]
    assert message.startswith(f"checkpoint-4 could not be written to {job.folder}: "), result.stderr
    assert re.search(r" It needs about [\d,]+ bytes, and [\d,]+ are free\. ", message)
    assert "checkpoint-2 is whole" in message
    assert [path.name for path in job.folder.iterdir() if "checkpoint" in path.name] == ["checkpoint-2"]
    assert store.damage(job.folder / "checkpoint-2") == []
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    assert job.start().returncode == 0
    assert job.outcome() == unbroken


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [f"{STEP}:4", pytest.param("pathlib:Path.rename:2", marks=slow)], ids=["before", "amid"]
)
def test_a_disk_that_becomes_read_only_is_reported_and_the_run_resumes_when_it_can_be_written(
    finished_run: FinishedRun, small_disk: Path, unbroken: dict[str, Any], place: str
) -> None:
    """The system refuses, not a stand-in of ours."""
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    job = Job(finished_run.recipe, small_disk / "out")
    result = job.start(f"READ_ONLY@{place}")
    subprocess.run(["umount", str(job.folder)], check=True)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    message = f"indictune: checkpoint-4 could not be written to {job.folder}: {job.folder / store.UNFINISHED}"
    assert message in result.stderr
    assert "Read-only file system. " in result.stderr
    assert "checkpoint-2 is whole. When it can be written, --resume_from_checkpoint auto continues" in result.stderr
    assert [store.damage(path) for path in store.checkpoints_in(job.folder)] == [[]]
    assert job.start().returncode == 0
    assert job.outcome() == unbroken


PLACES = ["os:fsync:2", "os:fsync:9", "pathlib:Path.rename:2", "torch:save:2"]  # the first call is for the lock: below
MARKS = {("EROFS", "os:fsync:9"): [], ("EACCES", "pathlib:Path.rename:2"): [pytest.mark.more]}


@pytest.mark.parametrize(
    ("error", "place"),
    [
        pytest.param(error, place, marks=MARKS.get((error, place), slow))
        for error in ("EROFS", "EACCES")
        for place in PLACES
    ],
)
def test_a_disk_that_fails_from_some_call_on_is_reported(
    finished_run: FinishedRun, unbroken: dict[str, Any], tmp_path: Path, error: str, place: str
) -> None:
    job = Job(finished_run.recipe, tmp_path / "out")
    result = job.start(f"{error}@{place}")
    assert result.returncode == 1
    message = job.status["message"]
    assert f" could not be written to {job.folder}: " in message
    assert os.strerror(getattr(errno, error)) in message
    assert "hen it can be written, --resume_from_checkpoint auto continues the run." in message
    assert "fsync" not in place or str(job.folder) in message.partition(": ")[2]  # the file too
    found = [path for path in job.folder.iterdir() if "checkpoint" in path.name]
    assert found == store.checkpoints_in(job.folder)
    assert [store.damage(path) for path in found] == [[] for _ in found]
    assert job.start().returncode == 0
    assert job.outcome() == unbroken


@pytest.mark.more
@pytest.mark.parametrize("launcher", ["python", pytest.param("fsdp2", marks=slow)])
def test_a_model_that_the_disk_does_not_take_is_reported_and_the_last_checkpoint_stays(
    finished_run: FinishedRun, unbroken: dict[str, Any], tmp_path: Path, launcher: str
) -> None:
    command = tuple(python() if launcher == "python" else accelerate(launcher, 2))
    job = Job(finished_run.recipe, tmp_path / "out", command)
    result = job.start("FULL@indictune.training.finish:save_model:1")
    assert result.returncode == 1
    message = job.status["message"]
    assert message.startswith(f"the model could not be written to {job.folder}: "), message
    assert "File too large" in message
    assert "checkpoint-8 is whole. When it can be written, --resume_from_checkpoint auto continues the run." in message
    assert not list(job.folder.glob("*.safetensors"))
    assert job.start().returncode == 0
    assert launcher != "python" or job.outcome() == unbroken


@pytest.mark.slow
def test_a_log_that_the_disk_does_not_take_ends_no_run_and_is_whole_after_going_on(
    finished_run: FinishedRun, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    job = Job(finished_run.recipe, tmp_path / "out")
    result = job.start(f"ENOSPC@indictune.files:json_line:1+SIGTERM@{STEP}:5")
    assert result.returncode == 75, result.stderr
    warning = (
        f"warning: {job.folder / 'train_log.jsonl'} cannot be written: No space left on device. The run continues."
    )
    assert result.stderr.count(warning) == 1
    assert (job.folder / "train_log.jsonl").read_text(encoding="utf-8") == ""
    assert job.start().returncode == 0
    assert job.outcome() == unbroken


@pytest.mark.more
@pytest.mark.parametrize("error", ["ENOSPC", "EACCES"])
def test_a_recipe_that_the_disk_does_not_take_is_reported(
    finished_run: FinishedRun, tmp_path: Path, error: str
) -> None:
    job = Job(finished_run.recipe, tmp_path / "out")
    result = job.start(f"{error}@pathlib:Path.replace:1")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    why = os.strerror(getattr(errno, error))
    assert f"indictune: {job.folder / 'recipe.yaml'} could not be written: {why}. It needs " in result.stderr
    assert ". There is no earlier checkpoint. When it can be written, " in result.stderr


@slow
def test_a_folder_that_is_closed_is_reported_and_the_last_checkpoint_stays(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    job = Job(finished_run.recipe, tmp_path / "out")
    assert job.start(f"SIGTERM@{STEP}:3").returncode == 75
    (job.folder / "status.json").unlink()  # all that a run writes first is there, and open for writing
    job.folder.chmod(0o555)
    result = replace(job, launcher=AS_A_USER).start()
    job.folder.chmod(0o755)
    assert result.returncode == 2, result.stderr
    message = result.stderr.partition(": ")[2].partition("\n")[0]
    problems = [{"code": "folder-not-writable", "flag": "--output_dir", "text": message}]
    status = json.dumps({"state": "user_error", "message": message, "problems": problems}, indent=2) + "\n"
    assert result.stderr.splitlines() == [
        f"indictune: --output_dir {job.folder}: it cannot be written to (Permission denied). "
        "Use another folder. [folder-not-writable]",
        "indictune: status.json could not be written: [Errno 13] Permission denied. It needs "
        f"{len(status):,} bytes: '{job.folder / 'status.json'}'",
    ]
    assert store.damage(job.folder / "checkpoint-4") == []


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_entered_is_passed_over(
    finished_run: FinishedRun, unbroken: dict[str, Any], tmp_path: Path
) -> None:
    job = Job(finished_run.recipe, tmp_path / "out")
    assert job.start(f"SIGTERM@{STEP}:3").returncode == 75
    closed = job.folder / "checkpoint-4"
    closed.chmod(0o000)
    result = replace(job, launcher=AS_A_USER).start()
    assert result.returncode == 0, result.stderr
    assert f"Resuming from {job.folder / 'checkpoint-2'}" in (job.folder / "logs/rank-0.log").read_text()
    assert job.outcome() == unbroken


@pytest.mark.more
def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(finished_run: FinishedRun, tmp_path: Path) -> None:
    job = Job(finished_run.recipe, tmp_path / "out", flags=("--save_total_limit", "1"))
    job.folder.mkdir()
    for step in (2, 4, 6):
        (job.folder / f"{store.UNFINISHED}-checkpoint-{step}").touch()  # which stands where it would go
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert "is saved, and an older checkpoint cannot be removed: [Errno 20] Not a directory" in result.stderr
    assert [path.name for path in store.checkpoints_in(job.folder)] == [f"checkpoint-{step}" for step in (8, 6, 4, 2)]

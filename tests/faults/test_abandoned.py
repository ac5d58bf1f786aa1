"""A run that goes on from an earlier step keeps what it leaves behind, and never returns to it by itself."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indictune.checkpoint import abandoned, resume, store
from indictune.checkpoint.best import best_of
from indictune.cli import main
from indictune.errors import UserError
from tests.checkpoint.test_store import flip_a_bit, write
from tests.conftest import FinishedRun
from tests.faults.runs import EXIT_RESUMABLE, STEP, Job
from tests.ranks.launching import Run, accelerate

FLAGS = ("--save_total_limit", "20", "--logging_steps", "1")


@pytest.fixture(scope="module")
def finished(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """With checkpoints of steps 2, 4, 6 and 8."""
    job = Job(finished_run.recipe, tmp_path_factory.mktemp("finished") / "out", flags=FLAGS)
    assert job.start().returncode == 0
    return job


def steps(folder: Path) -> list[int]:
    return [store.step_of(path) for path in store.listed(folder)]


def losses(run: Run) -> dict[float, Any]:
    return {entry["step"]: entry["loss"] for entry in run.log}


def test_auto_goes_on_with_the_steps_after_the_named_one_and_not_with_those_that_were_left(
    finished: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = replace(finished, folder=shutil.copytree(finished.folder, tmp_path / "out"))
    left = job.folder / "abandoned-1"
    was = {step: store.read_manifest(job.folder / f"checkpoint-{step}") for step in (4, 6, 8)}
    other = (*FLAGS, "--max_grad_norm", "0.001")
    named = ("--resume_from_checkpoint", str(job.folder / "checkpoint-4"))

    result = replace(job, flags=(*other, *named)).start(f"SIGTERM@{STEP}:2")
    assert result.returncode == EXIT_RESUMABLE, result.stderr
    assert (
        f"warning: Moved to {left}, because this run does not go on from it: metrics.json, config.json, "
        f"model.safetensors, tokenizer.json, tokenizer_config.json, checkpoint-8, checkpoint-6. "
        f"--resume_from_checkpoint {left / 'checkpoint-8'} goes on from it."
    ) in result.stderr
    assert not (job.folder / "model.safetensors").exists()
    for name in ("metrics.json", "model.safetensors", "config.json", "tokenizer.json", "train_log.jsonl"):
        assert (left / name).read_bytes() == (finished.folder / name).read_bytes()
    assert (steps(job.folder), steps(left)) == ([6, 4, 2], [8, 6])

    result = replace(job, flags=other).start()
    assert result.returncode == 0, result.stderr
    assert f"Resuming from {job.folder / 'checkpoint-6'}" in (job.folder / "logs/rank-0.log").read_text()
    assert list(losses(Run(job.folder))) == list(range(1, 9))
    assert losses(Run(job.folder))[8] != losses(Run(finished.folder))[8]
    for step in (6, 8):
        assert store.damage(left / f"checkpoint-{step}") == []
        assert store.read_manifest(left / f"checkpoint-{step}") == was[step]
    assert not abandoned.folders(job.folder)[1:]

    assert main(["checkpoint", str(job.folder)]) == 0
    assert f"{left} holds what was left behind there: auto takes none of it." in capsys.readouterr().out
    assert main(["checkpoint", str(left)]) == 0
    shown = capsys.readouterr().out
    assert "auto none" in shown
    assert "auto goes on" not in shown
    assert "finished" not in shown

    named = ("--resume_from_checkpoint", str(left / "checkpoint-6"))
    result = replace(job, flags=(*FLAGS, *named)).start(f"SIGTERM@{STEP}:1")
    assert result.returncode == EXIT_RESUMABLE, result.stderr
    assert steps(job.folder) == [8, 6, 2]  # which was gone on from, and the best of both
    assert steps(job.folder / "abandoned-2") == [8, 6, 4]
    assert job.start().returncode == 0
    assert job.outcome() == finished.outcome()


def test_a_checkpoint_comes_along_from_another_folder_with_its_best(finished: Job, tmp_path: Path) -> None:
    """So that a run which is killed there goes on from it, and ends with the same model as one that is not."""
    job = replace(finished, folder=tmp_path / "out")
    named = ("--resume_from_checkpoint", str(finished.folder / "checkpoint-4"), "--trust_checkpoint", "true")
    result = replace(job, flags=(*FLAGS, *named)).start(f"SIGKILL@{STEP}:1")
    assert result.returncode == -9, result.stderr
    best = store.best_step(finished.folder / "checkpoint-4")
    assert best == 2
    assert steps(job.folder) == [4, best]
    assert [store.damage(path) for path in store.listed(job.folder)] == [[], []]
    assert job.start().returncode == 0
    assert f"Resuming from {job.folder / 'checkpoint-4'}" in (job.folder / "logs/rank-0.log").read_text()
    assert {**job.outcome(), "log": None} == {**finished.outcome(), "log": None}  # of the steps that were done there


def test_a_run_none_of_whose_checkpoints_is_whole_starts_afresh(finished: Job, tmp_path: Path) -> None:
    of_later = shutil.ignore_patterns("metrics.json", "model.safetensors", "checkpoint-[68]")  # killed after step 4
    job = replace(finished, folder=shutil.copytree(finished.folder, tmp_path / "out", ignore=of_later))
    damaged = [path / "optimizer.pt" for path in store.listed(job.folder)]
    for path in damaged:
        flip_a_bit(path)
    result = job.start()
    assert result.returncode == 0, result.stderr
    for path in damaged:
        assert f"{path.parent.name} cannot be gone on from: {path} is not as it was written" in result.stderr
    assert f"{job.folder} holds no whole checkpoint: starting afresh" in result.stderr
    left = job.folder / "abandoned-1"
    assert f"Moved to {left}, because this run does not go on from it: checkpoint-4, checkpoint-2.\n" in result.stderr
    assert steps(left) == [4, 2]
    assert job.outcome() == finished.outcome()


def test_a_disk_without_room_for_them_leaves_all_as_it_was(finished: Job, tmp_path: Path) -> None:
    job = replace(finished, folder=shutil.copytree(finished.folder, tmp_path / "out"))
    named = ("--resume_from_checkpoint", str(finished.folder / "checkpoint-4"), "--trust_checkpoint", "true")
    result = replace(job, flags=(*FLAGS, *named)).start("FULL@indictune.checkpoint.copying:copy:1")
    assert result.returncode == 1
    assert f"checkpoint-4 could not be written to {job.folder}: " in job.status["message"]
    assert job.status["message"].endswith("checkpoint-8 is whole; when there is room, the same command goes on.")
    assert (steps(job.folder), abandoned.folders(job.folder)) == ([8, 6, 4, 2], [])
    assert (job.folder / "model.safetensors").is_file()
    assert not (job.folder / store.UNFINISHED).exists()


def test_a_rank_is_asked_to_stop_before_its_first_step_and_all_is_as_it_was(finished: Job, tmp_path: Path) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "out")
    named = ("--resume_from_checkpoint", str(finished.folder / "checkpoint-4"), "--trust_checkpoint", "true")
    job = replace(finished, folder=folder, flags=(*FLAGS, *named), launcher=tuple(accelerate("ddp", 2)))
    result = job.start("SIGTERM@indictune.train.callbacks.resume:LeaveBehind._left_behind:1@1")
    assert result.returncode != 0
    told = "stopped before its first step. The same command begins again."
    assert job.status == {"state": "resumable", "message": told}, result.stderr
    assert (steps(folder), abandoned.folders(folder)) == ([8, 6, 4, 2], [])
    assert (folder / "train_log.jsonl").read_bytes() == (finished.folder / "train_log.jsonl").read_bytes()
    assert not (folder / store.UNFINISHED).exists()


@pytest.mark.slow
def test_a_rank_that_copies_for_long_is_waited_for(finished: Job, tmp_path: Path) -> None:
    """Longer than a collective waits."""
    named = ("--resume_from_checkpoint", str(finished.folder / "checkpoint-4"), "--trust_checkpoint", "true")
    flags = (*FLAGS, *named, "--max_steps", "5", "--ddp_timeout", "8")
    job = Job(finished.recipe, tmp_path / "out", tuple(accelerate("ddp", 2)), flags)
    slow = "SLOW@indictune.checkpoint.copying:copy:1@0"
    result = job.start("+".join(2 * [slow]))
    assert result.returncode == 0, result.stderr


def test_a_best_that_is_damaged_in_the_other_folder_is_forgotten_at_once(finished: Job, tmp_path: Path) -> None:
    """Else the next checkpoint would name it, and a run that is killed then would forget it later than one that is
    not."""
    other = shutil.copytree(finished.folder, tmp_path / "other")
    flip_a_bit(other / "checkpoint-2" / "model.safetensors")
    named = ("--resume_from_checkpoint", str(other / "checkpoint-4"), "--trust_checkpoint", "true")
    unread = ("--load_best_model_at_end", "false", "--metric_for_best_model", "macro_f1")
    job = replace(finished, folder=tmp_path / "out", flags=(*FLAGS, *named, *unread))
    result = job.start(f"SIGKILL@{STEP}:3")
    assert result.returncode == -9, result.stderr
    assert "checkpoint-2, the best, is not copied, and is forgotten: " in result.stderr
    assert steps(job.folder) == [6, 4]
    assert store.best_step(job.folder / "checkpoint-6") == 6


class TestTheBest:
    """Of a state that was written in the run's folder, wherever both are now."""

    def saved(self, folder: Path, step: int, score: float) -> Path:
        named = {"best_model_checkpoint": "out/checkpoint-2", "best_global_step": 2, "best_metric": score}
        return write(folder, step, state=named)

    def test_stands_beside_it_first(self, tmp_path: Path) -> None:
        self.saved(tmp_path, 2, 0.9)
        beside = self.saved(tmp_path / "abandoned-1", 2, 0.9)
        assert best_of(self.saved(tmp_path / "abandoned-1", 4, 0.9)) == beside

    def test_may_stand_where_the_run_went_on(self, tmp_path: Path) -> None:
        best = self.saved(tmp_path, 2, 0.9)
        assert best_of(self.saved(tmp_path / "abandoned-1", 4, 0.9)) == best

    def test_may_be_left_behind(self, tmp_path: Path) -> None:
        self.saved(tmp_path / "abandoned-2", 2, 0.5)
        best = self.saved(tmp_path / "abandoned-1", 2, 0.9)
        assert best_of(self.saved(tmp_path, 4, 0.9)) == best
        assert best_of(self.saved(tmp_path / "abandoned-3", 4, 0.9)) == best

    def test_has_the_score_that_is_named(self, tmp_path: Path) -> None:
        self.saved(tmp_path / "abandoned-1", 2, 0.5)
        lost = best_of(self.saved(tmp_path, 4, 0.9))
        assert lost == tmp_path / "checkpoint-2"
        assert not lost.exists()


class TestNotGoneOnFrom:
    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        """A finished run."""
        for step in (2, 4, 10):
            write(tmp_path / "out", step)
        for name in ("metrics.json", "train_log.jsonl", "nonfinite.jsonl", "model.safetensors"):
            (tmp_path / "out" / name).touch()
        return tmp_path / "out"

    def left(self, out: Path, checkpoint: Path | None) -> list[str]:
        return [path.name for path in abandoned.not_gone_on_from(out, checkpoint)]

    def test_of_the_newest_that_is_the_mark_of_the_end(self, out: Path) -> None:
        assert self.left(out, out / "checkpoint-10") == ["metrics.json", "model.safetensors"]

    def test_of_an_earlier_one_that_is_what_came_later(self, out: Path) -> None:
        assert self.left(out, out / "checkpoint-4") == ["metrics.json", "model.safetensors", "checkpoint-10"]
        assert self.left(out, None) == [
            *("metrics.json", "model.safetensors", "checkpoint-10", "checkpoint-4", "checkpoint-2")
        ]

    def test_of_one_from_elsewhere_that_is_every_step(self, out: Path, tmp_path: Path) -> None:
        elsewhere = write(tmp_path / "elsewhere", 4)
        every = ["metrics.json", "model.safetensors", "train_log.jsonl", "nonfinite.jsonl"]
        every += ["checkpoint-10", "checkpoint-4", "checkpoint-2"]
        assert self.left(out, elsewhere) == every
        assert self.left(tmp_path / "new", elsewhere) == []

    def test_files_of_a_run_that_has_not_ended_stay(self, out: Path) -> None:
        (out / "metrics.json").unlink()
        assert self.left(out, out / "checkpoint-4") == ["checkpoint-10"]

    def test_a_link_to_one_of_the_run_is_its_own(self, out: Path, tmp_path: Path) -> None:
        (tmp_path / "linked").symlink_to(out)
        assert self.left(out, tmp_path / "linked" / "checkpoint-4") == [
            "metrics.json",
            "model.safetensors",
            "checkpoint-10",
        ]

    def test_what_is_left_where_the_moving_is_cut_is_one_runs(
        self, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(out, 8)
        (out / "model.safetensors").rename(out / "model-00001-of-00002.safetensors")
        (out / "model-00002-of-00002.safetensors").touch()
        for number in range(1, 7):
            left = abandoned.not_gone_on_from(out, out / "checkpoint-2")
            abandoned.copy_records(out)
            abandoned.move(left[:1], out / f"abandoned-{number}")
            assert steps(out) == [2, 4, 8, 10][: min(7 - number, 4)][::-1]
        assert abandoned.not_gone_on_from(out, out / "checkpoint-2") == []
        assert not [*out.glob("*.safetensors")]
        assert [path.name for path in abandoned.folders(out)] == [f"abandoned-{n}" for n in (6, 5, 4, 3, 2, 1)]

    def test_a_model_that_the_run_writes_anew_stays(self, out: Path) -> None:
        abandoned.copy_records(out)
        abandoned.move(abandoned.not_gone_on_from(out, out / "checkpoint-4"), out / "abandoned-1")
        (out / "model.safetensors").touch()  # and it was killed before its mark
        assert self.left(out, out / "checkpoint-4") == []


@pytest.mark.parametrize("is_moved", [False, True])
def test_records_are_there_with_all_steps(tmp_path: Path, is_moved: bool) -> None:
    """The run drops those that it does again from its own, and moves them where it goes on from elsewhere."""
    names, folder = ("train_log.jsonl", "nonfinite.jsonl"), tmp_path / "abandoned-1"
    for name in names:
        (tmp_path / name).write_text('{"step": 1}\n{"step": 2}\n')
    abandoned.copy_records(tmp_path)
    abandoned.move([tmp_path / name for name in names] if is_moved else [write(tmp_path, 2)], folder)
    for name in names:
        assert (folder / name).read_text() == '{"step": 1}\n{"step": 2}\n'
        assert (tmp_path / name).exists() is not is_moved


def test_the_way_back_is_to_one_that_is_whole(tmp_path: Path) -> None:
    folder, names = tmp_path / "abandoned-1", ["metrics.json", "checkpoint-8", "checkpoint-4"]
    for step in (4, 8):
        write(folder, step)
    told = f"Moved to {folder}, because this run does not go on from it: metrics.json, checkpoint-8, checkpoint-4."
    assert abandoned.told(names, folder) == f"{told} --resume_from_checkpoint {folder / names[1]} goes on from it."
    flip_a_bit(folder / "checkpoint-8" / "model.safetensors")
    assert abandoned.told(names, folder) == f"{told} --resume_from_checkpoint {folder / names[2]} goes on from it."
    (folder / "checkpoint-4" / store.MANIFEST).unlink()
    assert abandoned.told(names, folder) == told


def test_what_was_left_behind_is_trusted_as_the_rest_of_the_run(tmp_path: Path) -> None:
    left = write(tmp_path / "abandoned-1", 4)
    resume.check_trusted(left, tmp_path, trust_checkpoint=False)
    left.parent.chmod(0o777)
    with pytest.raises(UserError, match=r"abandoned-1 can be written by other users"):
        resume.check_trusted(left, tmp_path, trust_checkpoint=False)
    with pytest.raises(UserError, match="is not in this run's --output_dir"):
        resume.check_trusted(write(tmp_path / "other", 4), tmp_path, trust_checkpoint=False)


def test_a_folder_with_nothing_else_says_where_its_checkpoints_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "abandoned-1", 4)
    assert main(["checkpoint", str(tmp_path)]) == 2
    assert (
        f"{tmp_path / 'abandoned-1'} holds what was left behind there: auto takes none of it."
        in capsys.readouterr().err
    )

"""How a run ends: message, status and exit code, on rank 0 and on the others."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from indictune.config.arguments import DataArguments, ModelArguments, SentimentTrainingArguments
from indictune.config.recipe import read_recipe
from indictune.run import Run
from indictune.stop_signals import Stopped, StoppedBeforeFirstStep
from indictune.supervise import execute as execute_module
from indictune.supervise.execute import SupervisedRun, execute
from indictune.supervise.run_folder import write_status
from indictune.supervise.watchdog import Ranks, Watchdog
from indictune.training.bad_steps import NonFiniteLossError
from tests.supervise.test_watchdog import having_passed
from tests.test_file_locks import holding

RUN = (ModelArguments, DataArguments, SentimentTrainingArguments)
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "HF_TOKEN")


@pytest.fixture(autouse=True)
def _plain_python_without_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.chdir(tmp_path)


def refused(*argv: str) -> Any:
    """A recipe with a problem, so that the run leaves the console and the folder of logs alone."""
    recipe = read_recipe([*argv, "--sed", "1"], RUN)
    assert [(each.code, each.flag) for each in recipe.problems] == [("unknown-name", "--sed")]
    return recipe


def refuse(run: Run) -> None:
    run.recipe.problems.raise_any()


def status(folder: str = "out") -> dict[str, Any]:
    return dict(json.loads(Path(folder, "status.json").read_text(encoding="utf-8")))


def test_a_problem_of_the_user_is_reported_once_and_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(refuse, refused("--output_dir", "out")) == 2
    message = "--sed: there is no such flag. Did you mean `--seed`? [unknown-name]"
    assert capsys.readouterr() == ("", f"indictune: {message}\n")
    problems = [{"code": "unknown-name", "flag": "--sed", "text": message}]
    assert status() == {"state": "user_error", "message": message, "problems": problems}
    assert [path.name for path in Path("out").iterdir()] == ["status.json"]


def test_the_status_of_a_finished_run_outlives_a_command_that_is_refused() -> None:
    Path("out").mkdir()
    Path("out/metrics.json").write_text("{}")
    write_status(Path("out"), "ok", "")
    assert execute(refuse, refused("--output_dir", "out")) == 2
    assert status() == {"state": "ok", "message": ""}
    write_status(Path("out"), "failed", "the push failed")
    assert execute(refuse, refused("--output_dir", "out")) == 2
    assert status()["state"] == "user_error"


@pytest.mark.parametrize("there", [[], ["README.md"]])
def test_without_an_output_dir_nothing_is_looked_at_or_written(
    capsys: pytest.CaptureFixture[str], there: list[str]
) -> None:
    for name in there:
        Path(name).touch()
    assert execute(refuse, read_recipe([], RUN)) == 2
    assert capsys.readouterr().err.endswith("[output-dir-missing]\n")
    assert [path.name for path in Path().iterdir()] == there


@pytest.mark.parametrize("content", [None, "a: [\n", "- a\n"])
def test_what_a_recipe_that_cannot_be_read_does_not_say_is_not_missing(
    capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    if content is not None:
        Path("r.yaml").write_text(content)
    for flags in ([], ["--output_dir", "out"]):
        assert execute(refuse, read_recipe(["--config", "r.yaml", "--sed", "1", *flags], RUN)) == 2
        first, second, third, *more = capsys.readouterr().err.splitlines()
        assert first == "indictune: 2 problems:"
        assert second.startswith("  1. --config r.yaml")
        assert third.endswith("[unknown-name]")
        assert more == []


def test_a_failure_of_ours_ends_with_1_and_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(run: Run) -> None:
        raise ZeroDivisionError("ours")

    assert execute(fail, refused("--output_dir", "out")) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.endswith("indictune: ZeroDivisionError: ours\n")
    assert status() == {"state": "failed", "message": "ZeroDivisionError: ours"}


def test_a_loss_that_went_wrong_ends_with_1_and_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(run: Run) -> None:
        raise NonFiniteLossError("The loss of step 3 is NaN")

    assert execute(fail, refused("--output_dir", "out")) == 1
    assert capsys.readouterr().err == "indictune: The loss of step 3 is NaN\n"
    assert status() == {"state": "failed", "message": "The loss of step 3 is NaN"}


def test_what_was_asked_for_ends_with_0_and_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(lambda run: None, refused("--output_dir", "out")) == 0
    assert capsys.readouterr() == ("", "")
    assert status() == {"state": "ok", "message": ""}


@pytest.mark.parametrize(
    ("stopped", "way_on"),
    [
        (Stopped, "--resume_from_checkpoint auto resumes it."),
        (StoppedBeforeFirstStep, "The same command begins again."),
    ],
)
def test_a_run_that_was_stopped_says_how_to_resume_it(stopped: type[Stopped], way_on: str) -> None:
    def stop(run: Run) -> None:
        raise stopped("stopped by SIGTERM.")

    assert execute(stop, refused("--output_dir", "out")) == 75
    assert status() == {"state": "resumable", "message": f"stopped by SIGTERM. {way_on}"}


def test_a_folder_that_cannot_be_written_still_gets_the_message_out(capsys: pytest.CaptureFixture[str]) -> None:
    Path("out").write_text("a file")
    assert execute(refuse, refused("--output_dir", "out")) == 2
    said = capsys.readouterr().err
    assert "2. --output_dir out" in said
    assert "status.json could not be written" in said


def test_a_link_in_the_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    (tmp_path / "out" / "logs").mkdir(parents=True)
    (tmp_path / "out" / "logs" / "rank-0.log").symlink_to(outside)
    assert execute(refuse, read_recipe(["--output_dir", "out", "--resume_from_checkpoint", "auto"], RUN)) == 2
    assert status()["message"].startswith("--output_dir out: logs/rank-0.log is a link")
    assert outside.read_text() == "mine"


class TestOtherRanks:
    def test_they_leave_message_and_status_to_rank_0(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("RANK", "1")
        rank_0 = threading.Timer(0.3, write_status, (Path("out"), "user_error", "of rank 0"))
        rank_0.start()
        began = time.monotonic()
        assert execute(refuse, refused("--output_dir", "out")) == 2
        assert 0.2 < time.monotonic() - began < execute_module.RANK_0_WAIT_S["user_error"]
        assert capsys.readouterr() == ("", "")
        assert status()["message"] == "of rank 0"

    def test_they_speak_up_where_rank_0_has_no_problem(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setitem(execute_module.RANK_0_WAIT_S, "user_error", 0.2)
        write_status(Path("out"), "ok", "of the run before")
        time.sleep(0.05)
        assert execute(refuse, refused("--output_dir", "out")) == 2
        assert capsys.readouterr().err.startswith("indictune: [rank 1] --sed: ")
        assert status()["message"].startswith("[rank 1] --sed")

    @pytest.mark.more
    @pytest.mark.parametrize(
        "what",
        [
            "is gone: it was killed, or died without a word",
            pytest.param("holds up the others: since step 0 it got no further than the start", marks=pytest.mark.more),
        ],
    )
    def test_they_do_not_wait_for_the_word_of_a_rank_0_that_is_dead_or_late(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        rank_0 = Ranks.of_launch(Path("out/logs"), os.environ)
        if what.startswith("is gone"):
            with subprocess.Popen(["true"]) as process:
                rank_0.mine.pid = process.pid
        Path("out/logs").mkdir(parents=True)
        rank_0.begin()
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setitem(execute_module.RANK_0_WAIT_S, "failed", 99.0)

        def lose(run: Run) -> None:
            assert isinstance(run, SupervisedRun)
            run.watchdog = Watchdog(run.ranks, 9.0, Path("out/logs/rank-1.log"), pytest.fail, pytest.fail)
            run.watchdog.progress = having_passed(1)
            run.watchdog.progress._last -= 10
            run.ranks.report_progress(run.watchdog.progress)
            raise ConnectionResetError("by peer")

        assert execute(lose, refused("--output_dir", "out")) == 1
        name = f"rank 0 (process {rank_0.mine.pid} on {socket.gethostname()})"
        message = f"[rank 1] {name} {what}; ConnectionResetError: by peer"
        assert status()["message"] == message
        assert capsys.readouterr().err.count(f"indictune: {message}") == 1

    @pytest.mark.parametrize("has_console", [True, False])
    def test_they_hear_of_an_end_by_the_watchdog(self, monkeypatch: pytest.MonkeyPatch, has_console: bool) -> None:
        """Also where nobody else does; those of another launcher would wait for it for ever."""
        monkeypatch.setenv("WORLD_SIZE", "2")
        Path("out/logs").mkdir(parents=True)
        run = SupervisedRun(refused("--output_dir", "out"), rank=0)
        run.ranks.begin()
        if not has_console:
            with Path("console").open("w") as closed:
                monkeypatch.setattr("sys.stderr", closed)
        ending = get_context("fork").Process(target=execute_module._end_process, args=(run, "rank 1 hangs"))
        ending.start()
        ending.join()
        assert ending.exitcode == 1
        assert Path("out/status.json").exists() == has_console
        monkeypatch.setenv("RANK", "1")
        assert Ranks.of_launch(Path("out/logs"), os.environ).first_end() == (0, "failed", "rank 1 hangs")

    def test_they_know_their_launch_though_a_library_changes_the_environment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recipe = refused("--output_dir", "out")
        ours, another = SupervisedRun(recipe, rank=1), SupervisedRun(recipe, rank=1)
        another._launch_name = "another"
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        (tmp_path / "out").mkdir()
        with holding(tmp_path / "out", ours._launch_name):
            assert (ours.owns_folder, another.owns_folder) == (True, False)

    def test_one_that_did_what_was_asked_waits_for_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "1")
        began = time.monotonic()
        assert execute(lambda run: None, refused("--output_dir", "out")) == 0
        assert time.monotonic() - began < 1
        assert not Path("out").exists()

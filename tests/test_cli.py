"""The `indictune` command."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from indictune.cli import USAGE, main
from tests.conftest import FinishedRun
from tests.faults.runs import AS_A_USER
from tests.ranks.launching import BIN, ROOT, python, start


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_the_verbs_and_ends_with_0(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    shown = capsys.readouterr().out
    assert shown == USAGE
    assert "\n  evaluate " in shown


def test_no_verb_shows_the_help_and_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().out == USAGE


def test_an_unknown_verb_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evalute"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert {"prepare", "evaluate", "predict", "chat", "merge"} <= set(shown.err.replace(",", "").split())
    assert shown.err.endswith("[no-such-name]\n")


def test_evaluate_tells_all_that_is_missing_at_once_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "--tset_file", "x.csv"]) == 2
    assert capsys.readouterr().err.endswith("[unknown-name]\n")
    assert main(["evaluate", "--max_length", "8"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    codes = [line.rpartition("[")[2] for line in shown.err.splitlines()[1:]]
    assert codes == ["argument-missing]", "argument-missing]"]
    assert list(tmp_path.iterdir()) == []
    assert main(["prepare", "--config", "no.yaml"]) == 2
    assert capsys.readouterr().err.endswith("[no-such-file]\n")


def test_evaluate_tells_of_model_and_file_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, test_file = tmp_path / "out", tmp_path / "no.csv"
    flags = ["--model", str(tmp_path), "--test_file", str(test_file), "--output_dir", str(out)]
    assert main(["evaluate", *flags]) == 2
    shown = capsys.readouterr()
    message = shown.err.removeprefix("indictune: ").rstrip("\n")
    assert shown.out == ""
    first, second = message.splitlines()[1:]
    assert first.endswith("[no-model]")
    assert str(test_file) in second
    assert not out.exists()  # as after a typing error


def test_evaluate_leaves_the_problems_that_it_finds_late_in_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, test_file = tmp_path / "out", tmp_path / "t.csv"
    (tmp_path / "config.json").write_text("{}")
    test_file.write_text("text,label\nok,1\n")
    flags = ["--model", str(tmp_path), "--test_file", str(test_file), "--output_dir", str(out), "--fp16", "maybe"]
    assert main(["evaluate", *flags]) == 2
    status = json.loads((out / "status.json").read_text())
    assert status["state"] == "user_error"
    assert f"indictune: {status['message']}\n" == capsys.readouterr().err
    assert ("wrong-type", "--fp16") in [(each["code"], each["flag"]) for each in status["problems"]]


@pytest.mark.more
def test_evaluate_tells_of_a_model_that_cannot_be_read() -> None:
    # Without a problem of the flags the console is redirected, so this one has a process of its own.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text("{}")
        (Path(folder) / "t.csv").write_text("text,label\nok,1\n")
        test_file = str(Path(folder) / "t.csv")
        command = [*python(), "indictune/__main__.py", "evaluate", "--model", folder, "--test_file", test_file]
        result = start(command)
        assert result.returncode == 2
        assert result.stderr.startswith(f"indictune: --model {folder}: ")
        assert "Traceback" not in result.stderr
        status = json.loads((Path(folder) / "evaluation" / "t" / "status.json").read_text())
        assert status["state"] == "user_error"


def test_both_commands_are_installed() -> None:
    for command in ([str(BIN / "indictune")], [sys.executable, "-m", "indictune"]):
        result = start([*command, "--help"])
        assert (result.returncode, result.stdout) == (0, USAGE)


def test_doctor_gets_its_strategy_from_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "recipes/sentiment/demo.yaml", "--strategy", "zero3"]) == 2
    message = capsys.readouterr().err
    assert "accelerate launch" in message
    assert message.endswith("[doctor-under-launcher]\n")


def test_the_exit_code_of_a_verb_reaches_the_shell() -> None:
    result = start([*python(), "indictune/__main__.py", "checkpoint"])
    assert result.returncode == 2, result.stderr
    assert result.stderr.endswith("[argument-missing]\n")


def test_prepare_makes_ready_what_a_run_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "cache"))
    rows = [{"text": "अच्छा ok", "label": "1"}, {"text": "bad", "label": "0"}, {"text": " ", "label": "0"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    flags = ["--train_file", str(tmp_path / "t.jsonl"), "--max_length", "3", "--output_dir", str(tmp_path / "out")]
    assert main(["prepare", *flags]) == 0
    shown = capsys.readouterr()
    path = tmp_path / "t.jsonl"
    assert f"warning: --train_file {path}: 1 rows without text were dropped: {path}:3." in shown.err
    header, _, line, seconds = shown.out.splitlines()[-4:]
    assert header.split()[:3] == ["split", "rows", "tokens"]
    assert line.split() == ["train", "2", "6", "3.0", "3", "3", "100.0%"]
    assert seconds.endswith(f"kept in {tmp_path}/cache/prepared")
    assert not (tmp_path / "out").exists()
    kept = [path.name for path in (tmp_path / "cache" / "prepared").iterdir() if not path.name.startswith(".")]
    assert sorted(name.partition("-")[0] for name in kept) == ["health", "rows", "tokens"]


@pytest.mark.more
def test_prepare_knows_a_language_model_by_its_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(ROOT / "recipes/llama/demo.yaml")
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path))
    assert main(["prepare", "--config", recipe]) == 0
    shown = capsys.readouterr().out
    assert "tokens/word" in shown
    assert [line.split()[0] for line in shown.splitlines()[-4:-1]] == ["train", "validation", "test"]


def test_prepare_reads_the_rows_of_the_task_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.conll").write_text("Sita B-PER\nआई O\n\nRavi B-PER\n", encoding="utf-8")
    flags = ["--task", "tokens", "--train_file", str(tmp_path / "t.conll"), "--output_dir", str(tmp_path / "out")]
    assert main(["prepare", *flags]) == 0
    header, _, line, _ = capsys.readouterr().out.splitlines()[-4:]
    assert header.split()[:2] == ["split", "rows"]
    assert line.split()[:2] == ["train", "2"]


def test_prepare_tells_all_problems_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("text,emotion\na,b\nc,d\n")
    flags = ["--train_file", str(rows), "--max_length", "1000"]
    assert main(["prepare", *flags, "--max_lenth", "3"]) == 2
    assert "`--max_length`" in capsys.readouterr().err
    assert main(["prepare", *flags]) == 2
    lines = capsys.readouterr().err.splitlines()[-3:]
    assert lines[0] == "indictune: 2 problems:"
    assert "--max_length 1000" in lines[1]
    assert str(rows) in lines[2]


@pytest.mark.slow
def test_an_unreadable_file_is_reported_without_a_traceback(finished_run: FinishedRun, tmp_path: Path) -> None:
    """With code 2; to `indictune checkpoint` 1 is a damaged checkpoint."""
    run = Path(shutil.copytree(finished_run.folder, tmp_path / "run"))
    test_file = ["--test_file", str(finished_run.recipe.parent / "test.jsonl"), "--output_dir", str(tmp_path / "eval")]
    commands: list[tuple[Path, list[str], str]] = [
        (run, ["evaluate", "--model", str(run), *test_file], "base_config.json"),
        (run, ["merge", str(run), "--output_dir", str(tmp_path / "merged")], "adapter_config.json"),
        (run, ["checkpoint", str(run)], "."),
        (run, ["checkpoint", str(run / "checkpoint-8")], "checkpoint-8"),
        (run / "config.json", ["evaluate", "--model", str(run), *test_file], "config.json"),
    ]
    for closed, words, file in commands:
        mode = closed.stat().st_mode
        closed.chmod(0o000)
        result = start([*AS_A_USER, "-m", "indictune", *words])
        closed.chmod(mode)
        assert result.returncode == 2, result.stderr
        assert "Permission denied" in result.stderr
        assert Path(file).name in result.stderr
        assert "Traceback" not in result.stderr
    assert not (tmp_path / "merged").exists()

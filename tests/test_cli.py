"""The `indictune` command."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from indictune.cli import USAGE, main
from tests.distributed.launching import BIN, start


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_the_verbs_and_ends_with_0(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    shown = capsys.readouterr().out
    assert shown == USAGE
    assert "\n  evaluate " in shown


def test_no_verb_shows_the_help_and_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().out == USAGE


def test_an_unknown_verb_is_told_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evalute"]) == 2
    assert capsys.readouterr() == ("", "indictune: there is no verb `evalute`; there is evaluate, merge.\n")


def test_evaluate_tells_all_that_is_missing_at_once_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "--tset_file", "x.csv"]) == 2
    assert capsys.readouterr() == (
        "",
        "indictune: 3 problems:\n"
        "  1. --tset_file: there is no such flag. Did you mean `--test_file`?\n"
        "  2. --model is missing.\n"
        "  3. --test_file is missing.\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_evaluate_tells_of_model_and_file_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, test_file = tmp_path / "out", tmp_path / "no.csv"
    flags = ["--model", str(tmp_path), "--test_file", str(test_file), "--output_dir", str(out)]
    assert main(["evaluate", *flags]) == 2
    message = (
        "2 problems:\n"
        f"  1. --model {tmp_path}: holds no model (no config.json). Name the --output_dir of a finished run.\n"
        f"  2. --test_file {test_file}: no such file."
    )
    assert capsys.readouterr() == ("", f"indictune: {message}\n")
    assert json.loads((out / "status.json").read_text()) == {"state": "user_error", "message": message}


def test_evaluate_tells_of_a_model_that_cannot_be_read() -> None:
    # Without a problem of the flags the console is redirected, so this one has a process of its own.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text("{}")
        (Path(folder) / "t.csv").write_text("text,label\nok,1\n")
        test_file = str(Path(folder) / "t.csv")
        result = start([str(BIN / "indictune"), "evaluate", "--model", folder, "--test_file", test_file])
        assert result.returncode == 2
        assert result.stderr.startswith(f"indictune: --model {folder}: ")
        assert "Traceback" not in result.stderr
        status = json.loads((Path(folder) / "evaluation" / "t" / "status.json").read_text())
        assert status["state"] == "user_error"


def test_both_commands_are_installed() -> None:
    for command in ([str(BIN / "indictune")], [sys.executable, "-m", "indictune"]):
        result = start([*command, "--help"])
        assert (result.returncode, result.stdout) == (0, USAGE)


def test_the_exit_code_of_a_verb_reaches_the_shell() -> None:
    result = start([sys.executable, "-m", "indictune", "evaluate"])
    message = "indictune: 2 problems:\n  1. --model is missing.\n  2. --test_file is missing.\n"
    assert (result.returncode, result.stderr) == (2, message)

"""The list of verbs, and the file of each."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from indictune.cli import USAGE, main
from indictune.commands import VERBS
from indictune.config.command_line import STATUS_FILE
from tests.ranks.launching import ROOT, start


def test_the_file_of_a_verb_holds_its_flags_and_its_run() -> None:
    assert len(VERBS) == 21
    for verb in VERBS:
        tree = ast.parse((ROOT / f"indictune/commands/{verb}.py").read_text(encoding="utf-8"))
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert f"run_{verb}" in names
        assert f"{verb.capitalize()}Flags" in names or verb == "prepare"  # whose flags are those of the run


def test_the_help_of_a_verb_is_its_lines_of_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS.values():
        assert main([verb.name, "--help"]) == 0
        usage, does, *_ = capsys.readouterr().out.split("\n\n")
        assert usage.split() == ["usage:", "indictune", verb.name, *" ".join(verb.usage).split()]
        assert does == verb.does
        assert re.search(rf"^  {verb.name} +{re.escape(does)}$", USAGE, re.MULTILINE)


def test_the_help_of_verbs_imports_nothing_slow() -> None:
    heavy = ("torch", "transformers", "accelerate", "datasets", "numpy")
    calls = f"[main([verb, '--help']) for verb in {list(VERBS)}]"
    check = f"print('heavy:', [name for name in {heavy} if name in sys.modules])"
    result = start([sys.executable, "-c", f"import sys; from indictune.cli import main; {calls}; {check}"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("heavy: []\n")


def test_a_caller_from_python_gets_the_problems_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATUS_FILE, str(tmp_path / "status.json"))
    assert main(["train", "sentiment", "--lr", "1", "--bs", "2"]) == 2
    status = json.loads((tmp_path / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == "user_error"
    assert [(each["code"], each["flag"]) for each in status["problems"]] == [
        ("unknown-name", "--lr"),
        ("unknown-name", "--bs"),
    ]

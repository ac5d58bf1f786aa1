"""A finished model is named in one way by all verbs: a bare first word, or --model."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from indictune import cli
from indictune.commands import VERBS
from indictune.config.command_line import flags_of

ENOUGH = {
    "merge": ["--output_dir", "out"],
    "evaluate": ["--test_file", "t.csv"],
    "distil": ["--train_file", "t.csv", "--output_dir", "out"],
}
# Verbs of a finished model, or of a run that made one.
OF_MODELS = (
    "predict",
    "evaluate",
    "serve",
    "export",
    "push",
    "merge",
    "report",
    "chat",
    "demo",
    "checkpoint",
    "distil",
)


def answers(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a verb says of a model that is missing."""
    assert cli.main(words) in (1, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize("verb", [each for each in OF_MODELS if each != "report"])
def test_the_flag_of_a_model_is_model(verb: str) -> None:
    assert "model" in flags_of(f"indictune {verb}")
    assert " DIR" not in (usage := " ".join(VERBS[verb].usage))
    assert usage.startswith(("FOLDER", "RUN"))


@pytest.mark.parametrize("verb", ["evaluate", "push", "merge", "report", "checkpoint", "export", "chat"])
def test_a_bare_word_and_the_flag_say_the_same(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    repository = ["me/name"] if verb == "push" else []
    bare = answers(capsys, verb, "no-such", *repository, *ENOUGH.get(verb, []))
    assert answers(capsys, verb, *repository, "--model", "no-such", *ENOUGH.get(verb, [])) == bare
    assert "no-such" in bare
    assert "unknown-name" not in bare
    assert "bare-word" not in bare


@pytest.mark.parametrize(("verb", "old"), [("merge", "adapter"), ("push", "folder"), ("checkpoint", "folder")])
def test_the_spellings_before_still_work(
    verb: str, old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    more = ["--repo_id", "me/name"] if verb == "push" else ENOUGH.get(verb, [])
    new = answers(capsys, verb, "--model", "no-such", *more)
    assert answers(capsys, verb, f"--{old}", "no-such", *more) == new
    assert "no-such" in new


@pytest.mark.parametrize("verb", ["inspect", "plan"])
def test_the_model_of_a_run_is_model_too(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[dict[str, list[str]]] = []

    def run(flags: dict[str, list[str]]) -> int:
        taken.append(flags)
        return 0

    monkeypatch.setattr(importlib.import_module(f"indictune.commands.{verb}"), f"run_{verb}", run)
    assert cli.main([verb, "--model", "m"]) == 0
    assert taken[0]["model_name_or_path"] == ["m"]


def test_a_second_bare_word_of_evaluate_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Use --test_file t.csv." in answers(capsys, "evaluate", "m", "t.csv")


def test_vocabulary_takes_the_model_behind_its_action(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--train_file", "t.txt", "--output_dir", "out"]
    assert "no-such" in (bare := answers(capsys, "vocabulary", "extend", "no-such", *words))
    assert answers(capsys, "vocabulary", "extend", "--model", "no-such", *words) == bare

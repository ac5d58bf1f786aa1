"""The recipes of published scores: each passes the checks of a run, and reads files in their published layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs.published import FIELDS, RECIPES, header_of, published_page
from indictune.commands.recipes import run_recipes
from indictune.config.recipe import read_recipe
from indictune.preflight.checks import preflight, read_rows
from indictune.preflight.derive import make_plan
from indictune.tasks.classification import Classification
from indictune.tasks.protocol import Task
from indictune.tasks.tokens import TokenClassification
from indictune.versions import recipes
from tests.test_recipes import task_of

TASKS: dict[str, Task[Any, Any, Any]] = {"classification": Classification(), "tokens": TokenClassification()}
WORDS = ("आज", "पाऊस", "आला", "सगळे", "लोक", "आनंदी", "आहेत", "शहर", "खूप", "सुंदर", "दिसते", "उद्या")


def csv_files(*names: str, header: str, row: Callable[[int], str], end: str) -> None:
    """Twelve rows in each file."""
    for file, name in enumerate(names):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        lines = [header, *(row(12 * file + number) for number in range(12))]
        Path(name).write_text("".join(f"{line}{end}" for line in lines), encoding="utf-8", newline="")


def text_of(number: int) -> str:
    return " ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(1, 7)) + f" {number}"


def mahasent() -> None:
    """As published: CRLF, and practically all tweets have line feeds and begin with blanks."""
    names = (f"MarathiNLP/L3CubeMahaSent Dataset/tweets-{split}.csv" for split in ("train", "valid", "test"))
    csv_files(*names, header="tweet,label", row=lambda at: f'"  {text_of(at)}\n\n{WORDS[0]}",{at % 3 - 1}', end="\r\n")


def mahasent_md() -> None:
    folder = "MarathiNLP/L3Cube-MahaSent-MD/MahaSent_All"
    names = (f"{folder}/MahaSent_All_{split}.csv" for split in ("Train", "Val", "Test"))
    csv_files(*names, header="Unnamed: 0,text,label", row=lambda at: f"{at},{text_of(at)},{at % 3 - 1}", end="\n")


def mahaparaphrase() -> None:
    names = (f"MarathiNLP/L3Cube-MahaParaphrase/{split}.csv" for split in ("train", "val", "test"))
    row: Callable[[int], str] = lambda at: f"{text_of(at)},{text_of(at + 1)},{'NP' if at % 2 else 'P'}"  # noqa: E731
    csv_files(*names, header="Sentence1,Sentence2,Label", row=row, end="\n")


FILES: dict[str, tuple[Callable[[], None], list[str], int]] = {
    "mahasent": (mahasent, ["negative", "neutral", "positive"], 12),
    "mahasent_2_classes": (mahasent, ["negative", "positive"], 8),
    "mahasent_md": (mahasent_md, ["negative", "neutral", "positive"], 12),
    "mahaparaphrase": (mahaparaphrase, ["other", "paraphrase"], 12),
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_passes_the_checks_and_reads_published_files(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, labels, rows = FILES.get(path.stem, (lambda: None, [], 0))
    make()
    task = TASKS[task_of(path)]
    flags = ["--config", str(path), "--model_name_or_path", "builtin:tiny-indic-bert", "--max_unknown_share", "1"]
    plan, problems = make_plan(read_recipe(flags, task.arguments), {}, task)
    assert [*problems, *preflight(plan, task)] == []
    if not labels:  # a data set of the Hub
        return
    read = read_rows(plan, task, [])
    splits = read.splits.rows
    assert read.labels == labels
    assert {split: len(each) for split, each in splits.items()} == dict.fromkeys(("train", "validation", "test"), rows)


def test_every_recipe_is_on_the_page_with_its_facts_and_its_command() -> None:
    page = published_page()
    assert len(RECIPES) >= 6
    for path in RECIPES:
        _, commands, fields = header_of(path)
        assert all(fields[name] for name in FIELDS)
        assert f"--config recipes/published/{path.name}" in commands[-1]
        assert all(fact in page for fact in (*commands, *fields.values()))


def test_they_install_with_the_package_and_are_listed_and_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {f"recipes/published/{path.name}" for path in RECIPES} <= set(recipes())
    assert run_recipes({}) == 0
    listed = capsys.readouterr().out
    assert [path.name for path in RECIPES if f"published/{path.name}" not in listed] == []
    assert run_recipes({"names": ["published/mahasent.yaml", "naamapadam"], "to": [str(tmp_path)]}) == 0
    copied = {path.name: path.read_bytes() for path in (tmp_path / "recipes/published").iterdir()}
    assert copied == {path.name: path.read_bytes() for path in RECIPES if path.name in copied}
    assert set(copied) == {"mahasent.yaml", "naamapadam.yaml"}

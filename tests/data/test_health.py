"""The health of the rows of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from indictune.cli import main
from indictune.commands.dry_run import dry_run
from indictune.data.cache import StoredRows
from indictune.data.health.findings import Finding
from indictune.data.health.row_health import RowHealth, check_health, measure
from tests.conftest import FinishedRun
from tests.data.test_unknown_tokens import tokenizer_of
from tests.ranks.launching import ROOT
from tests.refusals import refused

REAL = ROOT / "../shared/data/sentiment"
TWEET = "sab log yeh film dekhne jao aaj hi"


def split(source: str, *rows: tuple[str, str, str]) -> StoredRows:
    texts, labels, languages = zip(*rows, strict=True)
    table = pa.table({"text": texts, "label": labels, "language": languages, "line": range(1, len(rows) + 1)})
    return StoredRows(table, source, f"--{source}")


def test_the_health_of_rows_is_the_same_after_json() -> None:
    train = split("train", (TWEET, "no", "hi"), ("ok", "yes", "te"), ("ok ok", "none", "hi"))
    held_out = split("validation", (TWEET.upper(), "yes", "hi"), ("ok", "no", "te"))
    health = measure({"train": train, "validation": held_out}, tokenizer_of("ok"), 9, [])
    assert health.rows == {"train": 3, "validation": 2}
    assert [(each.language, each.rows) for each in health.languages] == [("hi", 2), ("te", 1)]
    found = {each.name: each for each in health.findings}
    assert found.keys() == {"unknown_tokens", "near_duplicates", "labels_of_no_class"}
    near = found["near_duplicates"]
    assert (near.count, near.of, near.examples) == (1, 2, ["validation row 1 and train row 1"])
    assert "1 of them with another label" in near.note
    assert RowHealth.from_json(json.loads(json.dumps(health.as_json()))) == health
    assert health.as_json()["findings"][0].keys() >= {"name", "language", "share", "count", "of", "examples", "note"}


@pytest.mark.parametrize(
    ("flag", "code", "share"),
    [
        ("max_near_duplicate_share", "near-duplicates", 0.5),
        ("max_conflict_share", "conflicting-labels", 0.25),
        ("max_collision_share", "token-collisions", 1 / 3),
    ],
)
def test_a_limit_stops_the_run_where_a_share_is_above(flag: str, code: str, share: float) -> None:
    found = [Finding(name, 1, of, "note") for name, of in (("near_duplicates", 2), ("conflicting_labels", 4))]
    health = RowHealth({}, [], [], [*found, *(Finding("token_collisions", 1, of, "note", str(of)) for of in (3, 9))])
    with refused(code, flag=f"--{flag}"):
        check_health(health, {flag: share - 0.01})
    check_health(health, {flag: share})
    check_health(health, {flag: None})
    check_health(None, {flag: 0})


def test_a_limit_stops_a_run_and_inspect_which_prints_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"text,label\n{TWEET},yes\n{TWEET},no\nother,no\n", encoding="utf-8")
    flags = ["--validation_split", "0", "--max_conflict_share", "0.1", "--max_unknown_share", "1"]
    assert main(["inspect", str(path), *flags]) == 2
    shown = capsys.readouterr()
    assert "tokens/word" in shown.out
    assert shown.err.count("[conflicting-labels]") == 1
    with refused("conflicting-labels"):
        dry_run("classification", ["--train_file", str(path), "--output_dir", str(tmp_path / "out"), *flags], {})


def test_rows_without_classes_are_measured_too() -> None:
    train, held_out = split("train", (TWEET, "1.5", "hi"), ("ok", "2", "hi")), split("test", (f"{TWEET}!", "1", "hi"))
    splits = {"train": train, "test": held_out}
    without = {name: replace(each, table=each.table.drop("label")) for name, each in splits.items()}
    for given, problem_type in ((splits, "regression"), (without, None)):
        health = measure(given, tokenizer_of("ok"), 9, [], problem_type)
        assert health.labels == []
        assert [each.name for each in health.findings] == ["unknown_tokens", "near_duplicates"]
        assert "another label" not in health.findings[1].note


def test_many_rows_are_sampled_and_each_language_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indictune.data.health.row_health._MAX_TRAIN", 50)
    monkeypatch.setattr("indictune.data.health.row_health.MEASURED_ROWS", 5)
    rows = [(f"{TWEET} {number} {number} {number} {number}", "a", "hi") for number in range(300)]
    rows[7] = ("ok", "a", "te")
    held_out = split("validation", *((f"{text}!", label, language) for text, label, language in rows[10:60]))
    health = measure({"train": split("train", *rows), "validation": held_out}, tokenizer_of("ok"), 9, [])
    assert [(each.language, each.rows, each.measured_rows) for each in health.languages] == [
        ("hi", 299, 5),
        ("te", 1, 1),
    ]
    near = next(each for each in health.findings if each.name == "near_duplicates")
    assert "50 of 300 training rows" in near.note
    assert 0 < near.count < 50


def rows_of(kind: str, text: str) -> str:
    """A row with the text, and two short ones."""
    if kind == "conll":
        return "".join(
            "\n".join(f"{word} {'B' if word == 'bad' else 'O'}" for word in each.split()) + "\n\n"
            for each in (text, "ok", "bad")
        )
    if kind == "chats":
        rows = [{"prompt": each, "completion": "ok"} for each in (text, "ok", "bad")]
    else:
        rows = [{"text": each, "label": label} for each, label in ((text, "a"), ("ok", "b"), ("bad", "b"))]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


@pytest.mark.parametrize(("kind", "name"), [("texts", "jsonl"), ("chats", "jsonl"), ("conll", "conll")])
def test_the_rows_of_every_task_are_measured(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--output_dir", str(tmp_path / "out"), "--max_length", "64"]
    for split, text in (("train", TWEET), ("validation", f"{TWEET} !")):
        (tmp_path / f"{split}.{name}").write_text(rows_of(kind, text), encoding="utf-8")
        flags += [f"--{split}_file", str(tmp_path / f"{split}.{name}")]
    assert main(["prepare", *flags]) == 0
    assert capsys.readouterr().err.count("1 of 3 validation rows (33.3%) nearly repeat") == 1
    with refused("near-duplicates"):
        check_health(RowHealth.from_json(inspected(capsys, *flags)), {"max_near_duplicate_share": 0.3})


@pytest.mark.more
def test_a_run_writes_what_inspect_prints(finished_run: FinishedRun, capsys: pytest.CaptureFixture[str]) -> None:
    written = json.loads((finished_run.folder / "health.json").read_text(encoding="utf-8"))
    assert written["rows"] == {"train": 31, "validation": 13, "test": 11}
    (leak,) = (each for each in written["findings"] if each["name"] == "leaked_rows")
    assert (leak["count"], leak["share"]) == (1, 1 / 31)
    assert leak["note"] in finished_run.stderr
    recipe = str(finished_run.recipe)
    assert inspected(capsys, "--config", recipe, "--output_dir", "unused") == written


def inspected(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["inspect", *words, "--json", "true"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


@pytest.mark.skipif(not REAL.exists(), reason="no real tweets in ../shared/data/sentiment")
@pytest.mark.slow
def test_the_known_defects_of_real_rows_are_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of the Tamil rows 42 texts have several labels and 0.8% repeat others; of the Marathi rows 2% do."""

    def of(name: str, path: Path) -> dict[str, list[Finding]]:
        flags = ("--validation_file", str(REAL / f"{name}.validation.jsonl"), "--vocabulary_from_train", "8000")
        health = RowHealth.from_json(inspected(capsys, str(path), *flags))
        assert health.languages[0].collision_share < 0.001
        return {name: list(each) for name, each in groupby(health.findings, lambda each: each.name)}

    tamil = of("tamil_codemix", REAL / "tamil_codemix.train.jsonl")
    assert 40 <= tamil["conflicting_labels"][0].count <= 50
    assert tamil["duplicate_rows"][0].share == pytest.approx(0.008, abs=0.001)
    assert [each.examples for each in tamil["labels_of_no_class"]] == [["not-Tamil"], ["unknown_state"]]
    assert tamil["labels_of_no_class"][1].share == pytest.approx(0.157, abs=0.001)
    marathi = of("marathi_tweets", REAL / "marathi_tweets.train.jsonl")
    assert marathi["duplicate_rows"][0].share == pytest.approx(0.02, abs=0.002)
    assert "labels_of_no_class" not in marathi

    hinglish = of("hinglish_tweets", REAL / "hinglish_tweets.train.jsonl")
    assert "another label" in hinglish["near_duplicates"][0].note
    assert not any(each.warns for each in hinglish["label_sources"])
    rows = [json.loads(line) for line in (REAL / "hinglish_tweets.train.jsonl").read_text("utf-8").splitlines()]
    for row in rows[: len(rows) * 4 // 5]:  # most neutral rows as retweets
        row["text"] = "RT " * (row["label"] == "neutral") + row["text"].removeprefix("RT ")
    (tmp_path / "planted.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    first = of("hinglish_tweets", tmp_path / "planted.jsonl")["label_sources"][0]
    assert (first.examples, first.warns) == (['first word "rt" -> neutral'], True)

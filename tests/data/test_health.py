"""The health of the rows of a run."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from indictune.cli import main
from indictune.data.health import Health, Split, measure
from indictune.data.rows import StoredRows
from tests.conftest import FinishedRun
from tests.data.test_unknown_tokens import tokenizer_of
from tests.ranks.launching import ROOT

REAL = ROOT / "../shared/data/sentiment"
TWEET = "sab log yeh film dekhne jao aaj hi"


def split(source: str, *rows: tuple[str, str, str]) -> Split:
    texts, labels, languages = zip(*rows, strict=True)
    table = pa.table({"text": texts, "label": labels, "language": languages, "line": range(1, len(rows) + 1)})
    return Split(StoredRows(table, source, f"--{source}"), list(texts))


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
    assert Health.from_json(json.loads(json.dumps(health.as_json()))) == health
    assert health.as_json()["findings"][0].keys() >= {"name", "language", "share", "count", "of", "examples", "note"}


def test_rows_without_classes_are_measured_too() -> None:
    train, held_out = split("train", (TWEET, "1.5", "hi"), ("ok", "2", "hi")), split("test", (f"{TWEET}!", "1", "hi"))
    for settings in ({"problem_type": "regression"}, {"has_labels": False}):
        health = measure({"train": train, "test": held_out}, tokenizer_of("ok"), 9, [], **settings)
        assert health.labels == []
        assert [each.name for each in health.findings] == ["unknown_tokens", "near_duplicates"]
        assert "another label" not in health.findings[1].note


def test_many_rows_are_sampled_and_each_language_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indictune.data.health._MAX_TRAIN", 50)
    monkeypatch.setattr("indictune.data.health.MEASURED_ROWS", 5)
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


@pytest.mark.skipif(not REAL.exists(), reason="needs real tweets in ../shared/data/sentiment")
@pytest.mark.slow
def test_the_known_defects_of_real_rows_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Its README counts 42 texts with conflicting labels and 0.8% duplicates in the Tamil rows, 2% in the Marathi."""

    def findings(name: str) -> dict[str, dict[str, Any]]:
        files = [str(REAL / f"{name}.{split}.jsonl") for split in ("train", "validation")]
        health = inspected(capsys, files[0], "--validation_file", files[1], "--vocabulary_from_train", "8000")
        return {each["name"]: each for each in health["findings"]}

    tamil = findings("tamil_codemix")
    assert tamil["conflicting_labels"]["count"] >= 42
    assert 0.005 < tamil["duplicate_rows"]["share"] < 0.02
    assert {"unknown_state"} <= {example for each in tamil.values() for example in each["examples"]}

"""Labels that look alike are one, and said; labels of a row that stand together are several, or said."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indictune.config.arguments import DataArguments
from indictune.config.recipe import read_recipe
from indictune.config.shared_arguments import EvaluationArguments
from indictune.data.cache import StoredRows
from indictune.data.columns import label_key, normalise_label
from indictune.data.load_rows import load_splits, load_test_rows
from indictune.data.row_choice import Splits
from indictune.errors import UserError
from indictune.preflight.derive import plan_of_rows
from indictune.tasks.classification import Classification
from tests.plans import codes
from tests.problems import problems_raised
from tests.ranks.launching import ROOT
from tests.refusals import refused

INPUTS = ROOT / "tests/inputs"
MULTI: Any = "multi_label_classification"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, labels: Sequence[Any]) -> str:
    rows = ({"text": f"{name} {number}", "label": label} for number, label in enumerate(labels))
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return name


def load(name: str, **arguments: Any) -> Splits[StoredRows]:
    return load_splits(DataArguments(train_file=str(INPUTS / name) if (INPUTS / name).exists() else name, **arguments))


def counts(splits: Splits[StoredRows], split: str = "train") -> dict[str, int]:
    return dict(Counter(splits.rows[split].table["label"].to_pylist()))


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        (["bad", "bad\u200b", "\ufeffbad", "bad\u00ad", "\u2060bad\u200e"], "bad"),
        (["very good", "very\u00a0good", "very\u202f good", "very\u3000good\u200b"], "very good"),
        (["❤", "❤\ufe0f", "❤\ufe0e"], "❤"),
        (["1", "१", "௧", "１", "१.0"], "1"),
        (["-1.5", "-१.५"], "-1.5"),
        (["\u200b", " \u00a0", ""], None),
    ],
)
def test_what_nobody_sees_makes_no_other_label(labels: list[str], name: str | None) -> None:
    assert {normalise_label(label) for label in labels} == {name}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("labels_invisible.csv", {"bad": 120, "very good": 120}),
        ("labels_emoji_variant.csv", {"😠": 120, "❤": 120}),
    ],
)
def test_rows_of_labels_that_look_the_same_have_one(name: str, expected: dict[str, int]) -> None:
    assert counts(load(name)) == expected
    assert counts(load(name, keep_label_spellings=True)) == expected


@pytest.mark.parametrize(
    ("labels", "keys"),
    [
        (["Mixed feelings", "mixed_feelings", "MIXED-FEELINGS", "mixed - feelings", "MixedFeelings"], 1),
        (["अच्छी बात", "अच्छी_बात"], 1),
        (["क्\u200dष", "क्ष", "ＡB", "ab", "भाग १", "भाग_1"], 3),
        (["-1", "1", "0", "-0.5", "0.5"], 5),
        (["A", "A-", "A+", "A--"], 4),
        (["1-2", "1 2", "12"], 2),
    ],
)
def test_labels_that_differ_in_case_separators_or_coding_have_one_key(labels: list[str], keys: int) -> None:
    assert len({*map(label_key, labels)}) == keys


@pytest.mark.parametrize(
    ("name", "joined", "apart"),
    [
        ("labels_case.csv", {"Negative": 120, "Positive": 120}, "positive"),
        ("labels_space_underscore.csv", {"negative": 120, "mixed feelings": 120}, "mixed_feelings"),
    ],
)
def test_spellings_are_joined_and_said_unless_they_are_kept(name: str, joined: dict[str, int], apart: str) -> None:
    splits = load(name)
    assert counts(splits) == joined
    assert splits.labels == sorted(joined)
    (note,) = splits.notes
    assert [word in note for word in (f"{apart} (60 rows)", "--keep_label_spellings")] == [True, True]
    kept = load(name, keep_label_spellings=True)
    assert len(kept.labels) == 3
    assert apart in kept.labels
    assert kept.notes == []


def test_the_most_frequent_spelling_of_the_training_rows_is_the_name_in_all_splits() -> None:
    train = write("t.jsonl", ["yes", "YES", "YES", "no", "क्\u200dष", "क्ष", "क्ष"] * 30)
    held_out = write("v.jsonl", ["Yes", "NO", "yes"])
    splits = load(train, validation_file=held_out)
    assert counts(splits) == {"YES": 90, "no": 30, "क्ष": 90}
    assert counts(splits, "validation") == {"YES": 2, "no": 1}
    assert "U+200D (30 rows)" in " ".join(splits.notes)
    kept = {"validation_file": held_out, "keep_label_spellings": True}
    assert problems_raised(lambda: load(train, **kept)) == ["--validation_file v.jsonl label-unknown"] * 2


def test_a_model_knows_its_names(tmp_path: Path) -> None:
    path = write("new.jsonl", ["POSITIVE", "very good", "1", "pos", "Mixed"])
    known = ["Positive", "very\u00a0good", "१", "Mixed", "mixed"]
    splits = load_test_rows(path, EvaluationArguments(label_map=["pos=positive", "unused=x"]), known)
    assert splits.rows["test"].table["label"].to_pylist() == ["Positive", "very\u00a0good", "१", "Positive", "Mixed"]
    kept = EvaluationArguments(keep_label_spellings=True, label_map=["pos=Positive"])
    with refused("label-unknown", "POSITIVE"):
        load_test_rows(path, kept, known)
    with refused("label-unknown", "MIXED"):  # which of the two is it?
        load_test_rows(write("new.jsonl", ["MIXED"]), EvaluationArguments(), known)


STUDENT = {
    "Positive": 30,
    "positive": 20,
    "POSITIVE": 10,
    "pos": 25,
    "Negative": 30,
    "negative": 40,
    "neg": 22,
    "Neutral": 30,
    "neutral ": 25,
    "neutral": 1,
    "N/A": 21,
}


def test_the_warning_of_labels_in_short_has_the_flag_that_joins_and_drops_them() -> None:
    train = write("t.jsonl", [label for label, count in STUDENT.items() for _ in range(count)])
    splits = load(train)
    (note,) = (note for note in splits.notes if "--label_map" in note)
    words = note.partition("--label_map ")[2].split()
    assert sorted(words) == ["N/A=", "neg=negative", "pos=Positive"]
    again = load(train, label_map=words)
    assert counts(again) == {"Positive": 85, "negative": 92, "Neutral": 56}
    assert any("N/A (21 rows)" in note for note in again.notes)
    assert not any("short" in note for note in again.notes)


@pytest.mark.parametrize(
    ("labels", "is_said"),
    [
        (["n", "neg", "negative", "positive"], True),
        (["sad", "sadness"], True),
        (["hi", "hi-en", "en"], False),  # codes of languages
        (["not", "not offensive"], False),
        (["Niger", "Nigeria"], False),
        (["p", "positive", "previous"], False),  # which of the two is it?
        (["none", "joy"], False),
    ],
)
def test_labels_in_short_are_those_that_begin_one_other_word(labels: list[str], is_said: bool) -> None:
    notes = load(write("t.jsonl", labels * 20)).notes
    assert any("--label_map" in note for note in notes) == is_said


def test_several_labels_of_a_row_are_no_longer_name_of_one() -> None:
    train = write("t.jsonl", ["joy", "joy|surprise", "surprise"] * 20)
    assert not any("--label_map" in note for note in load(train, problem_type="single_label_classification").notes)


def test_a_map_names_the_label_as_it_spells_it_and_counts_in_every_split() -> None:
    train = write("t.jsonl", ["Pos", "pos", "POSITIVE", "POSITIVE", "neg", "n/a"])
    held_out = write("v.jsonl", ["POS", "negative", "N/A"])
    splits = load(train, validation_file=held_out, label_map=["pos=positive", "neg=negative", "N/A="])
    assert counts(splits) == {"positive": 4, "negative": 1}
    assert counts(splits, "validation") == {"positive": 1, "negative": 1}
    swapped = load(train, label_map=["Pos=a", "pos=b"], keep_label_spellings=True)
    assert swapped.labels == ["POSITIVE", "a", "b", "n/a", "neg"]


def test_a_map_is_for_several_labels_and_numbers_too() -> None:
    train = write("t.jsonl", ["joy|Fear", "fear|N/A", "jy", "JOY|joy"])
    splits = load(train, problem_type=MULTI, label_map=["jy=joy", "N/A="])
    assert counts(splits) == {"joy|Fear": 1, "joy": 2}
    splits = load(write("t.jsonl", [1.5, "two", "N/A"]), problem_type="regression", label_map=["two=2", "N/A="])
    assert counts(splits) == {"1.5": 1, "2": 1}


def test_a_map_that_says_nothing_or_two_things_is_refused() -> None:
    for words in (["pos"], ["=positive"], ["a=b=c"], ["pos=a", "pos=b"]):
        with refused("label-map-form", flag="--label_map"):
            DataArguments(train_file="t.jsonl", label_map=words)
    train = write("t.jsonl", ["a", "b"])
    assert problems_raised(lambda: load(train, label_map=["a=c", "x=y", "z="])) == [
        "--label_map x=y label-map-unused",
        "--label_map z= label-map-unused",
    ]
    held_out = write("v.jsonl", ["a", "a"])
    with refused("no-rows", "v.jsonl", flag="--label_map"):
        load(write("t.jsonl", ["a", "b", "c"]), validation_file=held_out, label_map=["a="])


def test_labels_between_commas_are_several_where_these_are_asked_for_and_else_said() -> None:
    splits = load("labels_comma_list.csv", problem_type=MULTI)
    assert splits.labels == ["anger", "joy", "surprise"]
    assert counts(splits) == {"anger|surprise": 40, "joy": 80, "anger": 80, "joy|surprise": 40}
    assert len(splits.notes) == 1
    (note,) = load("labels_comma_list.csv").notes
    assert f"--problem_type {MULTI}" in note
    assert load("labels_comma_list.csv", problem_type="single_label_classification").notes == []


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["joy; anger", "joy", "fear;sad"], ["anger", "fear", "joy", "sad"]),
        (["joy/anger", "joy/fear", "N/A"], ["N/A", "anger", "fear", "joy"]),
        (["joy, anger", "joy, fear"], ["anger", "fear", "joy"]),
        (["hate/offence", "normal", "N/A"], ["N/A", "hate/offence", "normal"]),  # no label names another
        (["a|b, c", "b, c", "a"], ["a", "b, c"]),  # written with bars
        (["['b, c']", "['a']"], ["a", "b", "c"]),
    ],
)
def test_which_labels_are_split(labels: list[str], expected: list[str]) -> None:
    assert load(write("t.jsonl", labels), problem_type=MULTI).labels == expected


def test_labels_of_a_file_to_evaluate_are_split_where_the_model_knows_the_parts() -> None:
    path = write("new.jsonl", ["Joy, anger", "fear/sad"])
    splits = load_test_rows(path, EvaluationArguments(), ["joy", "anger", "fear/sad"], problem_type=MULTI)
    assert splits.rows["test"].table["label"].to_pylist() == ["joy|anger", "fear/sad"]


def plan_of(*words: str) -> Any:
    return plan_of_rows(read_recipe(["--output_dir", "out", *words], Classification.arguments), Classification())


@pytest.mark.parametrize("flag", ["--train_file", "--train_files"])
@pytest.mark.parametrize("name", ["labels_list.jsonl", "labels_list_of_ids.jsonl", "columns.json", "lists.parquet"])
def test_lists_are_several_labels_unasked(name: str, flag: str) -> None:
    path = INPUTS / name if (INPUTS / name).exists() else Path(name)
    if name == "columns.json":
        path.write_text(json.dumps({"text": {"0": "x", "1": "y"}, "labels": {"0": ["a"], "1": ["b", "a"]}}))
    elif name == "lists.parquet":
        pq.write_table(pa.table({"text": ["x", "y"], "label": [[3], [7, 3]]}), path)
    plan, problems = plan_of(flag, str(path))
    assert (plan.data.problem_type, problems) == (MULTI, [])
    assert len(load_splits(plan.data).labels) == {"columns.json": 2, "lists.parquet": 2}.get(name, 3)


def test_lists_of_true_and_false_say_which_labels_a_row_has() -> None:
    path = write("t.jsonl", [[True, False, False], [False, False, True], [True, False, True]])
    assert counts(load(path, problem_type=MULTI)) == {"0": 1, "2": 1, "0|2": 1}


def test_a_list_beside_texts_is_refused_and_columns_of_labels_are_no_lists() -> None:
    train = write("t.jsonl", [["a"], "b"])
    assert plan_of("--train_file", train)[0].data.problem_type is None
    with refused("value-of-wrong-type", f"--problem_type {MULTI}"):
        load(train)
    Path("t.json").write_text(json.dumps({"text": ["x", "y"], "label": ["a", "b"]}))
    assert plan_of("--train_file", "t.json")[0].data.problem_type is None
    assert load("t.json").labels == ["a", "b"]


class TestColumnsOfLabels:
    FLAGS = "--label_column", "joy", "anger", "surprise"

    def test_a_column_of_0_and_1_is_a_label(self) -> None:
        plan, problems = plan_of("--train_file", str(INPUTS / "labels_one_hot.csv"), *self.FLAGS)
        assert (plan.data.problem_type, problems) == (MULTI, [])
        splits = load_splits(plan.data)
        assert splits.labels == ["anger", "joy", "surprise"]
        assert counts(splits) == {"anger|surprise": 10, "joy": 20, "anger": 20, "joy|surprise": 10}

    def test_other_files_have_them_too_and_a_row_may_have_none(self) -> None:
        rows = [{"text": "x", "a": True, "b": 0}, {"text": "y", "a": 0.0, "b": False}, {"text": "z", "a": 0, "b": 1}]
        Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert counts(load("t.jsonl", label_column=["a", "b"], problem_type=MULTI)) == {"a": 1, "|": 1, "b": 1}
        pq.write_table(pa.table({"text": ["x", "y"], "a": [1.0, 0.0], "b": [False, True]}), "t.parquet")
        assert counts(load("t.parquet", label_column=["a", "b"], problem_type=MULTI)) == {"a": 1, "b": 1}

    def test_other_values_are_bad_rows(self) -> None:
        Path("t.csv").write_text("text,a,b\nx,1,0\ny,2,0\nz,,1\n,,\nu,0,1\n")
        with pytest.raises(UserError) as raised:
            load("t.csv", label_column=["a", "b"], problem_type=MULTI)
        assert [(each.value, each.code) for each in raised.value.problems] == [
            ("t.csv:3", "value-of-wrong-type"),
            ("t.csv:4", "value-of-wrong-type"),
        ]

    def test_a_file_without_a_label_leads_there(self) -> None:
        Path("t.jsonl").write_text('{"text": "x", "joy": 1, "anger": 0, "surprise": 0}\n')
        Path("t.csv").write_text("text,joy,anger,surprise\nx,True,False,False\ny,True,False,True\n")
        for name in ("labels_one_hot.csv", "t.jsonl", "t.csv"):
            with refused("column-missing", " ".join(self.FLAGS)):
                load(name)

    def test_they_are_no_single_label(self) -> None:
        flags = "--train_file", "f.csv", "--problem_type", "regression", *self.FLAGS
        plan, _ = plan_of(*flags)
        assert ("no-effect", "--label_column") in codes(Classification().check(plan))


def test_a_bar_alone_is_no_class() -> None:
    labels = ["|", "joy", "anger"] * 5
    train = write("t.jsonl", labels)
    for path in (train, str(INPUTS / "labels_pipe_first.csv")):
        assert plan_of("--train_file", path)[0].data.problem_type == MULTI
    refusals = [
        problems_raised(partial(load, train, problem_type=kind)) for kind in (None, "single_label_classification")
    ]
    assert refusals == [["--train_file t.jsonl bar-is-no-label"]] * 2
    assert load(train, problem_type=MULTI).labels == ["anger", "joy"]
    assert load(train, label_map=["|="]).labels == ["anger", "joy"]


def test_half_stars_are_no_classes_unasked() -> None:
    with refused("labels-look-continuous"):
        load("half_stars.csv")
    assert len(load("half_stars.csv", problem_type="single_label_classification").labels) == 9
    assert load("half_stars.csv", problem_type="regression").labels == ["score"]

"""Loading: the rows of a run, and every problem of them in one raise."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indictune.config.arguments import DataArguments
from indictune.config.shared_arguments import EvaluationArguments
from indictune.data import cache as rows_module
from indictune.data.bad_rows import BadRows
from indictune.data.cache import StoredRows
from indictune.data.columns import Wanted
from indictune.data.health.findings import Finding
from indictune.data.load_rows import load_splits, load_test_rows
from indictune.data.read import hub_datasets, read_files, row_sources
from indictune.data.read.row_sources import text_sources
from indictune.data.row_choice import Splits
from indictune.errors import Problems, UserError, problem
from tests.problems import problems_raised

Row = dict[str, Any]
Write = Callable[[str, list[Row]], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, rows: list[Row]) -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return name

    return write_file


def labelled(*texts_and_labels: tuple[str | None, object]) -> list[Row]:
    return [{"text": text, "label": label} for text, label in texts_and_labels]


def problems_of(**arguments: Any) -> list[str]:
    return problems_raised(lambda: load_splits(DataArguments(**arguments)))


def columns_of(rows: StoredRows | None) -> Row:
    assert rows is not None
    return dict(rows.table.to_pydict())


def test_rows_are_cleaned_labelled_and_given_a_language(write: Write) -> None:
    train = write("train.jsonl", labelled(("#अच्छी\nफिल्म", 1), ("@ravi acchi film", 0.0), ("నచ్చింది", True)))
    splits = load_splits(DataArguments(train_file=train))
    assert columns_of(splits.rows["train"]) == {
        "text": ["अच्छी फिल्म", "@user acchi film", "నచ్చింది"],
        "label": ["1", "0", "true"],
        "language": ["hi", "und-Latn", "te"],
        "line": [1, 2, 3],
    }
    assert splits.labels == ["0", "1", "true"]
    assert "validation" not in splits.rows
    assert "test" not in splits.rows
    assert splits.notes == []
    assert len(splits.rows["train"]) == 3
    assert splits.rows["train"].location(1) == "train.jsonl:2"


def test_labels_that_are_all_numbers_are_in_numerical_order(write: Write) -> None:
    train = write("train.jsonl", labelled(("a", 10), ("b", 9), ("c", -1.5), ("d", "9.0")))
    assert load_splits(DataArguments(train_file=train)).labels == ["-1.5", "9", "10"]


def test_a_language_column_decides_where_it_says_something(write: Write) -> None:
    rows = [
        {"text": "a", "label": 0, "language": " mr "},
        {"text": "b", "label": 1, "language": ""},
        {"text": "க", "label": 1, "lang": "xx"},
    ]
    train = write("train.jsonl", rows)
    assert columns_of(load_splits(DataArguments(train_file=train)).rows["train"])["language"] == [
        "mr",
        "und-Latn",
        "ta",
    ]
    rows[0]["lang"] = "kok"
    train = write("train.jsonl", rows)
    named = load_splits(DataArguments(train_file=train, language_column="lang"))
    assert columns_of(named.rows["train"])["language"] == ["kok", "und-Latn", "xx"]


def test_a_language_column_that_is_named_must_be_there(write: Write) -> None:
    train = write("train.jsonl", labelled(("a", 0), ("b", 1)))
    assert problems_of(train_file=train, language_column="lang") == ["--train_file train.jsonl column-missing"]


def test_columns_have_the_names_given(write: Write) -> None:
    train = write("train.jsonl", [{"tweet": "a", "mood": "x"}, {"tweet": "b", "mood": "y"}])
    splits = load_splits(DataArguments(train_file=train, text_column="tweet", label_column="mood"))
    assert columns_of(splits.rows["train"])["text"] == ["a", "b"]
    assert splits.labels == ["x", "y"]


def test_rows_without_text_are_dropped_and_reported(write: Write) -> None:
    rows = labelled(("a", 0), (None, 0), ("", None), (" \n\u200b", 1), ("b", 1))
    splits = load_splits(DataArguments(train_file=write("train.jsonl", rows)))
    assert columns_of(splits.rows["train"])["line"] == [1, 5]
    assert splits.notes == [
        "--train_file train.jsonl: 3 rows without text were dropped: train.jsonl:2, train.jsonl:3, train.jsonl:4."
    ]
    assert splits.rows["train"].location(1) == "train.jsonl:5"


def test_at_most_ten_dropped_rows_are_listed(write: Write) -> None:
    rows = labelled(("a", 0), ("b", 1), *[("", 0)] * 23)
    (note,) = load_splits(DataArguments(train_file=write("train.jsonl", rows))).notes
    assert "23 rows" in note
    assert note.count("train.jsonl:") == 11
    assert note.endswith("train.jsonl:12 and 13 more.")


def test_order_and_chunks(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_files, "CHUNK_ROWS", 2)
    train = write("train.jsonl", labelled(*((f"t{index}", index % 2) for index in range(7))))
    assert columns_of(load_splits(DataArguments(train_file=train)).rows["train"])["text"] == [
        f"t{index}" for index in range(7)
    ]


def conflicts(splits: Splits[StoredRows]) -> Finding:
    (found,) = (each for each in splits.findings if each.name == "conflicting_labels")
    return found


def test_rows_in_train_and_held_out_are_reported_or_removed(write: Write) -> None:
    train = write("train.jsonl", labelled(("a http://x.in", 0), ("b", 1), ("c", 0), ("d", 1), ("b", 0)))
    validation = write("val.jsonl", labelled(("b", 1), ("e", 0)))
    test = write("test.jsonl", labelled(("A", 1), ("a  http://y.in", 0), ("b", 0)))
    files: Row = {"train_file": train, "validation_file": validation, "test_file": test}
    kept = load_splits(DataArguments(**files))
    assert len(kept.rows["train"]) == 5
    assert kept.notes == [
        "train.jsonl: 3 of 5 training rows also stand in val.jsonl or test.jsonl, whose scores will look too good; "
        "--drop_leaked_rows removes them from training.",
        conflicts(kept).note,
    ]
    assert conflicts(kept).examples[0] == "train.jsonl:2 (1) and test.jsonl:3 (0)"
    dropped = load_splits(DataArguments(**files, drop_leaked_rows=True))
    assert columns_of(dropped.rows["train"])["text"] == ["c", "d"]
    assert columns_of(dropped.rows["validation"])["text"] == ["b", "e"]
    assert dropped.notes == [
        "train.jsonl: 3 of 5 training rows also stand in val.jsonl or test.jsonl; they were removed from training "
        "(--drop_leaked_rows).",
        conflicts(dropped).note,
    ]
    assert conflicts(dropped).examples == ["val.jsonl:1 (1) and test.jsonl:3 (0)"]


@pytest.mark.more
def test_rows_are_removed_from_every_part_of_a_long_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_files, "CHUNK_ROWS", 3)
    monkeypatch.setattr(rows_module, "_LEAK_BATCHES", 2)
    train = write("train.jsonl", labelled(*((f"t{index}", index % 2) for index in range(20))))
    validation = write("val.jsonl", labelled(*((f"t{index}", index % 2) for index in range(0, 20, 3))))
    splits = load_splits(DataArguments(train_file=train, validation_file=validation, drop_leaked_rows=True))
    assert columns_of(splits.rows["train"])["text"] == [f"t{index}" for index in range(20) if index % 3]


def test_dropping_leaked_rows_can_leave_nothing(write: Write) -> None:
    train = write("train.jsonl", labelled(("a", 0), ("b", 1)))
    found = problems_of(train_file=train, validation_file=train, drop_leaked_rows=True)
    assert found == ["--drop_leaked_rows true all-rows-leaked"]


def test_all_problems_of_all_files_come_in_one_raise(write: Write) -> None:
    Path("train.csv").write_text("text,label\na,1,2\nb\n", encoding="utf-8")
    Path("val.jsonl").write_text("", encoding="utf-8")
    assert problems_of(train_file="train.csv", validation_file="val.jsonl", test_file="none.parquet") == [
        "--train_file train.csv:2 field-count",
        "--train_file train.csv:3 field-count",
        "--validation_file val.jsonl no-rows",
        "--test_file none.parquet no-such-file",
    ]


def test_a_file_with_empty_texts_alone_is_a_problem(write: Write) -> None:
    train = write("train.jsonl", labelled(("", 0), ("\n", 1)))
    assert problems_of(train_file=train) == ["--train_file train.jsonl no-texts"]


def test_rows_with_text_need_a_label(write: Write) -> None:
    train = write("train.jsonl", labelled(("a", 0), ("b", None), ("c", 1), ("d", " ")))
    assert problems_of(train_file=train) == [
        "--train_file train.jsonl:2 no-label",
        "--train_file train.jsonl:4 no-label",
    ]


def test_a_file_without_any_label_is_a_problem(write: Write) -> None:
    train = write("train.jsonl", labelled(("a", 0), ("b", 1)))
    test = write("test.jsonl", labelled(("a", None)))
    assert problems_of(train_file=train, test_file=test) == ["--test_file test.jsonl:1 no-label"]


def test_one_label_is_no_classification(write: Write) -> None:
    train = write("train.jsonl", labelled(("a", "x"), ("b", "x")))
    assert problems_of(train_file=train) == ["--train_file train.jsonl one-label"]


def test_a_label_that_training_rows_lack_is_named_with_its_first_line(write: Write) -> None:
    train = write("train.jsonl", labelled(("a", "x"), ("b", "y")))
    validation = write("val.jsonl", labelled(("c", "x"), ("d", "z"), ("e", "z"), ("f", "w")))
    test = write("test.jsonl", labelled(*((f"t{index}", f"n{index}") for index in range(7))))
    problems = problems_of(train_file=train, validation_file=validation, test_file=test)
    assert problems[:2] == [
        "--validation_file val.jsonl label-unknown",
        "--validation_file val.jsonl label-unknown",
    ]
    assert len(problems) == 2 + 5 + 1
    assert problems[-1] == "--test_file test.jsonl more-unknown-labels"


@pytest.mark.parametrize(
    ("labels", "free_text"),
    [
        ([f"id{index}" for index in range(21)], True),
        ([f"id{index}" for index in range(20)], False),
        ([f"id{index}" for index in range(101)] * 2, False),
        ([f"id{index}" for index in range(1000)] * 2, False),
    ],
)
def test_a_label_column_that_looks_like_free_text(write: Write, labels: list[str], free_text: bool) -> None:
    train = write("train.jsonl", labelled(*((f"t{index}", label) for index, label in enumerate(labels))))
    if not free_text:
        assert load_splits(DataArguments(train_file=train)).labels == sorted(set(labels))
        return
    validation = write("val.jsonl", labelled(("v", "not one of them")))
    assert problems_of(train_file=train, validation_file=validation) == [
        "--train_file train.jsonl labels-look-like-text"
    ]


@pytest.mark.parametrize(
    ("labels", "continuous"),
    [
        ([str(step / 10) for step in range(51)] * 2, True),
        ([str(step / 7) for step in range(80)], True),
        ([str(score) for score in range(51)] * 2, True),
        ([str(5 * step) for step in range(21)] * 2, True),
        ([str(step / 2) for step in range(5)] * 2, True),
        ([str(step / 2) for step in range(4)] * 2, False),
        ([str(number) for number in range(40) if number != 7] * 2, False),
        ([str(score) for score in range(50)] * 2, False),
        ([*(str(step / 10) for step in range(51)), "x"] * 2, False),
    ],
)
def test_labels_that_look_like_scores_are_refused_unless_they_are_named_classes(
    write: Write, labels: list[str], continuous: bool
) -> None:
    train = write("train.jsonl", labelled(*((f"t{index}", label) for index, label in enumerate(labels))))
    if continuous:
        assert problems_of(train_file=train) == ["--train_file train.jsonl labels-look-continuous"]
    insisting = DataArguments(train_file=train, problem_type="single_label_classification")
    if len(set(labels)) < len(labels):
        assert len(load_splits(insisting).labels) == len(set(labels))
    if not continuous:
        assert load_splits(DataArguments(train_file=train)).labels == load_splits(insisting).labels


def test_more_values_than_any_classifier_has_labels_are_free_text(write: Write) -> None:
    rows = [{"text": f"t{index}", "label": f"id{index % 1001}"} for index in range(3000)]
    assert problems_of(train_file=write("train.jsonl", rows)) == ["--train_file train.jsonl labels-look-like-text"]


def test_rows_for_a_finished_model(write: Write) -> None:
    path = write("new.jsonl", [{"tweet": "#a", "label": 1.0}, {"tweet": "", "label": 0}])
    splits = load_test_rows(path, EvaluationArguments(text_column="tweet"), ["0", "1"])
    assert columns_of(splits.rows["test"]) == {"text": ["a"], "label": ["1"], "language": ["und-Latn"], "line": [1]}
    assert splits.notes == ["--test_file new.jsonl: 1 rows without text were dropped: new.jsonl:2."]


def test_rows_for_a_finished_model_are_read_once_and_checked_each_time(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("new.jsonl", labelled(("a", "x"), ("", "x"), ("b", "z")))
    unknown = ["--test_file new.jsonl label-unknown"]
    assert problems_raised(lambda: load_test_rows(path, EvaluationArguments(), ["y", "x"])) == unknown
    load_test_rows(path, EvaluationArguments(), ["x", "z"])
    monkeypatch.setattr("indictune.data.load_rows.cleaned", None)
    assert problems_raised(lambda: load_test_rows(path, EvaluationArguments(), ["y", "x"])) == unknown
    splits = load_test_rows(path, EvaluationArguments(), ["x", "z"])
    assert (len(splits.rows["test"]), len(splits.notes)) == (2, 1)
    assert (splits.folder / "test.arrow").exists()


def test_rows_for_a_finished_model_have_its_labels(write: Write) -> None:
    path = write("new.jsonl", labelled(("a", "x"), ("b", "z")))
    with pytest.raises(UserError) as raised:
        load_test_rows(path, EvaluationArguments(), ["y", "x"])
    details = raised.value.problems[0].details
    assert (raised.value.code, details["label"], details["first"]) == ("label-unknown", "z", "new.jsonl:2")


def test_builtin_tweets_are_read_from_the_package() -> None:
    splits = load_splits(DataArguments(dataset_name="builtin:tweets"))
    assert splits.labels == ["negative", "neutral", "positive"]
    assert {"hi", "te", "ta"} <= set(columns_of(splits.rows["train"])["language"])
    assert splits.notes == []


def test_builtin_rows_come_from_the_folder_of_their_name(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "validation", "test"):
        write(f"{split}.jsonl", labelled((f"{split} a", 0), (f"{split} b", 1)))
    monkeypatch.setattr(importlib.resources, "files", lambda package: Path("/"))
    folder = str(Path.cwd())
    monkeypatch.setitem(row_sources.BUILTIN, "builtin:tweets", folder)
    splits = load_splits(DataArguments(dataset_name="builtin:tweets"))
    assert columns_of(splits.rows["test"])["text"] == ["test a", "test b"]


def test_an_unknown_builtin_dataset_and_other_problems(write: Write) -> None:
    assert problems_of(dataset_name="builtin:tweet", validation_file="no.csv") == [
        "--dataset_name builtin:tweet no-such-name",
        "--validation_file no.csv no-such-file",
    ]


@pytest.fixture
def hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that `datasets` loads like a dataset on the Hub, with class ids in parquet files."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub_datasets, "CHUNK_ROWS", 2)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["negative", "positive"])}
    )
    splits = {"train": [1, 0, 1], "validation": [0, 1], "test": [-1, -1]}
    (tmp_path / "tweets").mkdir()
    for split, labels in splits.items():
        rows = {"text": [f"{split} {index}" for index in range(len(labels))], "label": labels}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "tweets" / f"{split}.parquet")
    return "./tweets"


def test_a_run_that_is_refused_downloads_no_dataset(hub_folder: str) -> None:
    refused = Problems([problem("no-such-file", "--sed", "x")])
    assert text_sources(DataArguments(dataset_name=hub_folder), refused) == {}
    assert len(refused) == 1
    assert "train" in text_sources(DataArguments(dataset_name=hub_folder), Problems())
    assert text_sources(DataArguments(dataset_name="no/such"), refused) == {}
    assert len(refused) == 2


def test_class_ids_of_a_hub_dataset_become_their_names(hub_folder: str) -> None:
    splits = load_splits(DataArguments(dataset_name=hub_folder))
    assert columns_of(splits.rows["train"]) == {
        "text": ["train 0", "train 1", "train 2"],
        "label": ["positive", "negative", "positive"],
        "language": ["en"] * 3,
        "line": [1, 2, 3],
    }
    assert splits.labels == ["negative", "positive"]
    assert columns_of(splits.rows["validation"])["label"] == ["negative", "positive"]
    assert "test" not in splits.rows
    assert splits.notes == ["--dataset_name ./tweets: its test rows have no labels and are left out."]
    assert splits.rows["train"].location(2) == "./tweets/train row 3"


def test_lists_of_class_ids_in_a_hub_dataset_become_lists_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in go_emotions."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    emotions = datasets.List(datasets.ClassLabel(names=["joy", "anger"]))
    features = datasets.Features({"text": datasets.Value("string"), "label": emotions})
    rows = {"text": ["one", "two", "three"], "label": [[0, 1], [1], [0]]}
    (tmp_path / "emotions").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet("emotions/train.parquet")
    args = DataArguments(dataset_name="./emotions", problem_type="multi_label_classification", validation_split=0.0)
    assert load_splits(args).labels == ["anger", "joy"]


@pytest.mark.more
def test_files_take_the_place_of_a_hub_datasets_splits(hub_folder: str) -> None:
    pq.write_table(pa.table({"text": ["own"], "label": ["negative"]}), "own.parquet")
    splits = load_splits(DataArguments(dataset_name=hub_folder, test_file="own.parquet"))
    assert columns_of(splits.rows["test"])["text"] == ["own"]
    assert splits.rows["test"].location(0) == "own.parquet row 1"


def test_hub_datasets_that_do_not_fit(hub_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    found = problems_of(dataset_name=hub_folder, label_column="mood")
    assert found[0] == "--dataset_name ./tweets train column-missing"
    Path("tweets/train.parquet").unlink()
    assert problems_of(dataset_name=hub_folder) == ["--dataset_name ./tweets train-split-missing"]
    assert problems_of(dataset_name="./nothing_here")[0].startswith("--dataset_name ./nothing_here dataset-")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert problems_of(dataset_name="someone/tweets") == ["--dataset_name someone/tweets dataset-unreachable"]


def test_a_hub_split_without_rows_is_a_problem() -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": [], "label": []}, split="validation")
    split = hub_datasets.HubSplit(rows)
    batches = split.batches(Wanted({"text": "text", "label": "label"}, {}), BadRows("validation"))
    assert problems_raised(lambda: next(batches)) == ["validation no-rows"]


_SENTIMENT = Path(__file__).parents[3] / "shared" / "data" / "sentiment"


def test_real_tweets_load_with_their_languages() -> None:
    path = _SENTIMENT / "marathi_tweets.train.jsonl"
    if not path.exists():
        pytest.skip(f"no real data at {path}")
    splits = load_splits(
        DataArguments(train_file=str(path), validation_file=str(path).replace("train.jsonl", "validation.jsonl"))
    )
    assert (len(splits.rows["train"]), len(splits.rows["validation"])) == (12_000 - 2, 1_500)
    assert splits.notes[0].endswith(f"2 rows without text were dropped: {path}:7442, {path}:7811.")
    assert splits.labels == ["negative", "neutral", "positive"]
    assert set(columns_of(splits.rows["train"])["language"]) == {"mr"}
    assert not any("\n" in text or "&amp;" in text for text in columns_of(splits.rows["train"])["text"])


def spelt(write: Write, **splits: Sequence[object]) -> dict[str, Any]:
    """Files of rows with these labels."""
    return {
        f"{split}_file": write(
            f"{split}.jsonl", labelled(*((f"{split} {row}", label) for row, label in enumerate(labels)))
        )
        for split, labels in splits.items()
    }

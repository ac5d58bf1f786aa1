"""Tables, metrics and callbacks of a Python program, as a run gets them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import indictune
from indictune.data.bad_rows import BadRows
from indictune.data.read.read_files import read_records
from indictune.evaluation.own_metrics import OwnMetric, names_of_scores
from indictune.prediction.labelled_rows import name_beside_labels
from indictune.python_objects import functions_file, rows_file, tables_as_files, with_columns
from tests.refusals import refused

ROWS = [{"text": "अच्छी फिल्म", "label": "good", "stars": 5}, {"text": "बेकार", "label": "bad", "stars": 1}]
CLASSES = datasets.Features(
    {
        "text": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["bad", "good"]),
        "stars": datasets.Value("int64"),
    }
)
KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: ROWS,
    "pandas": lambda: pd.DataFrame(ROWS, index=[7, 9]).astype({"label": "category"}),
    "polars": lambda: pl.DataFrame(ROWS),
    "arrow": lambda: pa.Table.from_pylist(ROWS),
    "Dataset": lambda: datasets.Dataset.from_list(ROWS[::-1]).cast(CLASSES).select([1, 0]),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "cache"))


def read(path: str) -> list[dict[str, object]]:
    if path.endswith(".jsonl"):
        return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [record for _, record in read_records(path, BadRows(path))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_becomes_a_file_of_its_rows_and_equal_tables_one(kind: str) -> None:
    path = rows_file(KINDS[kind](), "train_file")
    assert read(path) == ROWS
    assert rows_file(KINDS[kind](), "test_file") == path


def test_what_pandas_and_numpy_put_into_dictionaries_is_plain() -> None:
    rows = [{"text": "a", "score": float("nan"), "at": np.int64(3), "parts": [np.float32(0.5), {"x": np.bool_(True)}]}]
    assert read(rows_file(rows, "train_file")) == [{"text": "a", "score": None, "at": 3, "parts": [0.5, {"x": True}]}]


def test_a_dictionary_of_splits_gives_the_files_that_are_not_given() -> None:
    splits = datasets.DatasetDict(
        {name: datasets.Dataset.from_list(ROWS[:1]) for name in ("train", "validation", "test")}
    )
    found = tables_as_files({"train_file": splits, "test_file": "mine.csv", "learning_rate": 1e-4})
    assert {name: isinstance(value, str) for name, value in found.items()} == {
        "train_file": True, "validation_file": True, "test_file": True, "learning_rate": False,
    }  # fmt: skip
    assert found["test_file"] == "mine.csv"
    with refused("wrong-type", flag="train_file"):
        tables_as_files({"train_file": {"validation": ROWS}})


NO_TABLES: dict[str, object] = {
    "set": {"a"},
    "object": object(),
    "list": [{"text": object()}],
    "mixed column": pd.DataFrame({"text": ["a", 1]}),
    "splits": datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}),
    "texts": ["a", "b"],
    "stream": datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
}


@pytest.mark.parametrize("kind", NO_TABLES)
def test_other_values_are_refused_by_the_name_of_the_flag(kind: str) -> None:
    with refused("wrong-type", flag="test_file"):
        tables_as_files({"test_file": NO_TABLES[kind]})


def test_names_of_files_stay() -> None:
    given = {"train_file": "a.csv", "validation_file": Path("b.csv"), "test_file": None, "train_files": ["c", "d"]}
    assert tables_as_files(given) == given


@pytest.mark.parametrize("kind", KINDS)
def test_labels_come_beside_the_columns_of_a_table_of_the_same_kind(kind: str) -> None:
    rows = KINDS[kind]()
    found = with_columns(rows, pa.table({"label": ["x", "y"], "score_x": [0.75, 0.25]}), name_beside_labels)
    assert isinstance(found, type(rows))
    frame = (
        pd.DataFrame(found)
        if kind == "list"
        else found
        if kind == "pandas"
        else pa.table(found).to_pandas()
        if kind != "Dataset"
        else found.to_pandas()
    )
    assert list(frame.columns) == ["text", "input_label", "stars", "label", "score_x"]
    assert frame["label"].tolist() == ["x", "y"]
    assert frame["text"].tolist() == [row["text"] for row in ROWS]
    if kind == "pandas":
        assert list(frame.index) == [7, 9]


def share(right: list[int], given: list[int]) -> float:
    return sum(a == b for a, b in zip(right, given, strict=True)) / len(right)


def test_a_function_is_a_metric_of_the_run_that_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with functions_file({"share": share}, ()) as variable:
        ((name, path),) = variable.items()
        monkeypatch.setenv(name, path)
        assert names_of_scores(["python:share"], False, "single_label_classification", lambda _: False) == ["share"]
        assert OwnMetric("python:share").scores([1, 0, 1], [1, 1, 1], "three rows") == {"share": 2 / 3}
        with refused("metric-of-program", flag="--metrics"):
            OwnMetric("python:other")
    monkeypatch.delenv(name)
    with refused("metric-of-program", flag="--metrics"):
        OwnMetric("python:share")
    with functions_file({}, ()) as variable:
        assert variable == {}


def test_what_cannot_be_copied_is_refused() -> None:
    with refused("wrong-type", flag="callbacks"), functions_file({}, [threading.Lock()]):
        pass


def test_the_package_shows_its_functions_alone() -> None:
    assert dir(indictune) == sorted(indictune.__all__)
    assert json.dumps(indictune.__all__)

"""Datasets of csv files, on the Hub or in a folder: what the files say is what the model sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from indictune.config.arguments import DataArguments
from indictune.config.chat_arguments import ChatDataArguments
from indictune.data.bad_rows import REJECTED
from indictune.data.load_rows import load_splits
from tests.data.chats import load
from tests.problems import problems_raised

pytestmark = pytest.mark.usefixtures("folder")

GOOD = 'text,label\n"good, film",None\nNA,null\nnull,NA\nNone,nan\n1.0,None\n'
DECLARED = (
    "---\ndataset_info:\n  features:\n  - name: text\n    dtype: string\n  - name: label\n    dtype:\n"
    "      class_label:\n        names:\n          '0': negative\n          '1': positive\n---\n"
)


def problems_of(**arguments: Any) -> list[str]:
    return problems_raised(lambda: load_splits(DataArguments(dataset_name="set", **arguments)))


@pytest.mark.parametrize("name", ["train.csv", "train.tsv"])
def test_a_folder_gives_the_rows_that_its_file_gives(folder: Path, name: str) -> None:
    rows = [line.rsplit(",", 1) for line in GOOD.replace('"', "").splitlines()]
    text = GOOD if name == "train.csv" else "".join("\t".join(row) + "\n" for row in rows)
    (folder / name).write_text(text)
    by_name = load_splits(DataArguments(dataset_name="set"))
    by_file = load_splits(DataArguments(train_file=str(folder / name)))
    assert by_name.rows["train"].table.equals(by_file.rows["train"].table)
    assert by_name.rows["train"].table["text"].to_pylist() == ["good, film", "NA", "null", "None", "1.0"]
    assert by_name.rows["train"].table["label"].to_pylist() == ["None", "null", "NA", "nan", "None"]
    assert by_name.labels == by_file.labels == ["NA", "None", "nan", "null"]
    assert by_name.rows["train"].location(1) == f"{folder / name}:3"


def test_rows_with_more_fields_than_the_header_shift_no_column(folder: Path) -> None:
    (folder / "train.csv").write_text("text,label\ngood film,pos,x\nbad film,neg,y\n")
    assert problems_of() == [f"--dataset_name set {folder / 'train.csv'}:{line} field-count" for line in (2, 3)]


def test_such_a_row_is_left_out_where_bad_rows_are(folder: Path) -> None:
    (folder / "train.csv").write_text("text,label\ngood film,pos\nbad, film,neg\nbad film,neg\n")
    splits = load_splits(DataArguments(dataset_name="set", bad_rows="quarantine", max_bad_fraction=0.5))
    assert splits.rows["train"].table["text"].to_pylist() == ["good film", "bad film"]
    (entry,) = map(json.loads, (splits.folder / REJECTED).read_text().splitlines())
    assert (entry["file"], entry["line"], entry["read"]) == (str(folder / "train.csv"), 3, "bad, film,neg\n")


@pytest.mark.more
def test_several_files_are_a_split_whose_bad_rows_are_named_by_file_and_line(folder: Path) -> None:
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: '*.csv'\n---\n")
    (folder / "hi.csv").write_text("text,label\na,x\nb,y\n")
    (folder / "te.csv").write_text("text,label\nc,x,1\nd,y\n")
    assert problems_of() == [f"--dataset_name set {folder / 'te.csv'}:2 field-count"]
    splits = load_splits(DataArguments(dataset_name="set", bad_rows="quarantine", max_bad_fraction=0.5))
    assert splits.rows["train"].table["text"].to_pylist() == ["a", "b", "d"]
    assert [splits.rows["train"].location(row) for row in range(3)] == [
        f"{folder / 'hi.csv'}:2",
        f"{folder / 'hi.csv'}:3",
        f"{folder / 'te.csv'}:3",
    ]
    (entry,) = map(json.loads, (splits.folder / REJECTED).read_text().splitlines())
    assert (entry["file"], entry["line"]) == (str(folder / "te.csv"), 2)


def test_declared_class_names_stand_for_numbers_and_for_nothing_else(folder: Path) -> None:
    (folder / "README.md").write_text(DECLARED)
    (folder / "train.csv").write_text("text,label\nNA,1\nb,0\nc,positive\n")
    (folder / "test.csv").write_text("text,label\nd,-1\n")
    splits = load_splits(DataArguments(dataset_name="set"))
    assert splits.rows["train"].table["label"].to_pylist() == ["positive", "negative", "positive"]
    assert splits.labels == ["negative", "positive"]
    assert splits.notes == ["--dataset_name set: its test rows have no labels and are left out."]
    (folder / "train.csv").write_text("text,label\nNA,1\nb,0\nc,2\n")
    assert problems_of() == [f"--dataset_name set {folder / 'train.csv'}:4 class-undeclared"]


def test_class_names_that_are_numbers_of_other_classes_are_refused(folder: Path) -> None:
    (folder / "README.md").write_text(DECLARED.replace("negative", "'1'").replace("positive", "'2'"))
    (folder / "train.csv").write_text("text,label\na,0\nb,1\n")
    assert problems_of() == ["--dataset_name set train class-names-unclear"]


@pytest.mark.parametrize("settings", ["sep: ';'", "header: null", "encoding: latin-1", "on_bad_lines: skip"])
def test_csv_files_in_a_way_of_their_own_are_refused_with_the_way_out(folder: Path, settings: str) -> None:
    config = f"---\nconfigs:\n- config_name: default\n  data_files: train.csv\n  {settings}\n---\n"
    (folder / "README.md").write_text(config)
    (folder / "train.csv").write_text("text,label\na,x\nb,y\n")
    (problem,) = problems_of()
    assert problem in ("--dataset_name set dataset-settings", "--dataset_name set dataset-file-kind")


def test_conversations_in_csv_files_are_refused(folder: Path) -> None:
    (folder / "train.csv").write_text("prompt,completion\na,b,c\n")
    found = problems_raised(lambda: load(ChatDataArguments(dataset_name="set")))
    assert found == [f"--dataset_name set {folder / 'train.csv'} file-kind-unknown"]

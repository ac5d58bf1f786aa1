"""Datasets of json and parquet files, on the Hub or in a folder: what the files say is what the model sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indictune.config.arguments import DataArguments
from indictune.config.chat_arguments import ChatDataArguments
from indictune.data.bad_rows import REJECTED, BadRows, Quarantine
from indictune.data.cache import StoredRows
from indictune.data.chat.conversations import chat_sources as chat_sources_of
from indictune.data.columns import Wanted
from indictune.data.load_rows import load_splits
from indictune.data.read import hub_datasets
from indictune.data.read.read_files import SplitFiles, read_records
from indictune.data.read.row_sources import text_sources
from indictune.data.row_choice import Splits
from indictune.errors import Problems
from tests.data.chats import load
from tests.data.tables import read_table
from tests.data.test_hub_csv import DECLARED, problems_of
from tests.problems import problems_raised

pytestmark = pytest.mark.usefixtures("folder")

GOOD = '{"text": "शुभ \\"दिन\\"", "label": "neg"}\n{"text": "b\\n", "label": "pos"}\n'
COLUMNS = {"text": "text", "label": "label"}
# Chats that the library has written as JSON, in quotes, or has changed otherwise: rows and answers.
CHATS = {
    "a number": ('{"prompt": "a", "completion": "x"}\n{"prompt": "a", "completion": 7.10}\n', ["x", "7.10"]),
    "a content in parts": (
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": '
        '"part"}]}]}\n{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "y"}]}\n',
        ["part", "y"],
    ),
    "dates": ('{"prompt": "a", "completion": "2026-01-02"}\n', ["2026-01-02"]),
}


def rows_of(splits: Splits[StoredRows]) -> list[tuple[str, str]]:
    return list(zip(*(splits.rows["train"].table[column].to_pylist() for column in ("text", "label")), strict=True))


def json_files() -> SplitFiles:
    files = hub_datasets.load_hub_dataset("set", None)["train"]
    assert isinstance(files, SplitFiles)
    return files


@pytest.fixture
def quarantine(tmp_path: Path) -> Quarantine:
    return Quarantine("set/train", 0.9, tmp_path)


def rejects(bad: Quarantine, good: int) -> list[dict[str, Any]]:
    bad.finish(good)
    return [json.loads(line) for line in Path(REJECTED).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "odd",
    [
        '{"text": 5, "label": "pos"}',
        '{"text": "x", "label": 1}',
        '{"text": "x", "label": false}',
        '{"text": 1e5, "label": 99999999999999999998}',
        '{"text": 2.10, "label": 99999999999999999999}',
        '{"text": "2026-01-02", "label": "12:30:00"}',
        '{"text": "NA", "label": "None"}',
    ],
)
def test_a_folder_gives_the_rows_that_its_file_gives_with_one_odd_row(folder: Path, odd: str) -> None:
    (folder / "train.jsonl").write_text(GOOD * 3 + odd)
    by_name = load_splits(DataArguments(dataset_name="set"))
    by_file = load_splits(DataArguments(train_file=str(folder / "train.jsonl")))
    assert rows_of(by_name) == rows_of(by_file)
    assert rows_of(by_name)[0] == ('शुभ "दिन"', "neg")
    assert by_name.labels == by_file.labels
    assert by_name.rows["train"].location(6) == f"{folder / 'train.jsonl'}:7"


def test_texts_and_labels_that_all_are_dates_or_numbers_stay_what_they_are(folder: Path) -> None:
    lines = [f'{{"text": {number}, "label": "2026-01-0{number[0]}"}}' for number in ("1e5", "2.10", "3")]
    (folder / "train.json").write_text(f"[{', '.join(lines)}]")
    splits = load_splits(DataArguments(dataset_name="set"))
    assert rows_of(splits) == [("1e5", "2026-01-01"), ("2.10", "2026-01-02"), ("3", "2026-01-03")]


@pytest.mark.parametrize("name", ["train.json", "train.ndjson"])
def test_one_object_a_line_is_read_whatever_the_file_is_called(folder: Path, name: str) -> None:
    (folder / name).write_text("\ufeff" + GOOD, encoding="utf-8")
    assert len(load_splits(DataArguments(dataset_name="set")).rows["train"]) == 2


@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
def test_a_broken_line_is_named_by_file_and_line(folder: Path, name: str) -> None:
    (folder / name).write_text(GOOD + '{"text": "c", \n')
    assert problems_of() == [f"--dataset_name set {folder / name}:3 invalid-json"]


def test_a_duplicate_key_is_reported(folder: Path) -> None:
    (folder / "train.json").write_text('[{"text": "c", "text": "d", "label": "x"}]')
    assert problems_of() == [f"--dataset_name set {folder / 'train.json'}:1 key-duplicate"]


def test_bad_rows_of_several_files_are_left_out_with_their_places(folder: Path, quarantine: Quarantine) -> None:
    (folder / "train-1.jsonl").write_text(GOOD)
    (folder / "train-2.jsonl").write_text("\n{}}\n" + GOOD + '{"text": ["c"], "label": "x"}\n')
    batches = list(json_files().batches(Wanted(COLUMNS, {"language": "language"}), quarantine))
    first, second = str(folder / "train-1.jsonl"), str(folder / "train-2.jsonl")
    assert [quarantine.location(line) for batch in batches for line in batch["line"].to_pylist()] == [
        *(f"{first}:1", f"{first}:2"),
        *(f"{second}:3", f"{second}:4"),
    ]
    entries = rejects(quarantine, 4)
    assert [(entry["file"], entry["line"]) for entry in entries] == [(second, 2), (second, 5)]
    assert entries[0]["read"] == "{}}\n"


def test_bad_lines_of_chats_are_left_out_with_their_places(folder: Path, quarantine: Quarantine) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "a", "completion": 1.50}\nbroken\n{"prompt": "b"}\n')
    records = list(json_files().records(quarantine))
    assert records == [(1, {"prompt": "a", "completion": "1.50"}), (3, {"prompt": "b"})]
    assert [entry["line"] for entry in rejects(quarantine, 2)] == [2]
    found = problems_raised(lambda: load(ChatDataArguments(dataset_name="set")))
    assert found[0] == f"--dataset_name set {folder / 'train.jsonl'}:2 invalid-json"


BAD = GOOD + '{"text": \n\n{"text": "", "label": "x"}\n' + GOOD + '{"text": "c", "label": null}\n' + GOOD


@pytest.mark.parametrize(
    "names", [["train.jsonl"], ["train.ndjson"], ["train-1.jsonl", "train-2.jsonl"]], ids=" ".join
)
def test_rows_that_cannot_be_used_are_named_by_file_and_line_whatever_was_left_out_before(
    folder: Path, names: list[str]
) -> None:
    for name in names:
        (folder / name).write_text(BAD)
    splits = load_splits(DataArguments(dataset_name="set", bad_rows="quarantine", max_bad_fraction=0.6))
    good = [f"{folder / name}:{line}" for name in names for line in (1, 2, 6, 7, 9, 10)]
    assert [splits.rows["train"].location(row) for row in range(len(splits.rows["train"]))] == good
    entries = map(json.loads, (splits.folder / REJECTED).read_text(encoding="utf-8").splitlines())
    assert [(entry["file"], entry["line"]) for entry in entries] == [
        (str(folder / name), line) for line in (3, 8) for name in names
    ]
    assert problems_of() == [
        f"--dataset_name set {folder / name}:{line} {code}"
        for line, code in ((3, "invalid-json"), (8, "no-label"))
        for name in names
    ]


def test_conversations_of_several_files_are_named_by_file_and_line(folder: Path) -> None:
    good = '{"prompt": "a", "completion": "b"}\n'
    first, second = (str(folder / f"train-{number}.jsonl") for number in (1, 2))
    Path(first).write_text(good + "broken\n" + good)
    Path(second).write_text("\n" + good + '{"prompt": "a", "completion": ""}\n' + good)
    splits = load(ChatDataArguments(dataset_name="set", bad_rows="quarantine", max_bad_fraction=0.6))
    train = splits.rows["train"]
    places = [train.location(row) for row in range(len(train))]
    assert places == [f"{first}:1", f"{first}:3", f"{second}:2", f"{second}:4"]
    entries = map(json.loads, (splits.folder / REJECTED).read_text(encoding="utf-8").splitlines())
    assert [(entry["file"], entry["line"]) for entry in entries] == [(first, 2), (second, 3)]
    Path(first).write_text(good)
    found = problems_raised(lambda: load(ChatDataArguments(dataset_name="set")))
    assert found == [f"--dataset_name set {second}:3 no-answer"]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    Path(second).write_text(good + json.dumps({"messages": turns}) + "\n")
    found = problems_raised(lambda: load(ChatDataArguments(dataset_name="set")))
    assert found == [f"--dataset_name set {second}:2 forms-mixed"]


def test_a_run_leaves_out_bad_rows_of_a_dataset_where_it_is_asked_to(folder: Path) -> None:
    few: dict[str, Any] = {"dataset_name": "set", "bad_rows": "quarantine", "max_bad_fraction": 0.5}
    (folder / "train.jsonl").write_text(GOOD + "{}}\n")
    splits = load_splits(DataArguments(**few))
    (note,) = splits.notes
    assert note.startswith(f"--dataset_name set {folder / 'train.jsonl'}: 1 bad rows were left out, first ")
    (entry,) = map(json.loads, (splits.folder / REJECTED).read_text(encoding="utf-8").splitlines())
    assert (entry["file"], entry["line"]) == (str(folder / "train.jsonl"), 3)
    (folder / "train.jsonl").unlink()
    (folder / "README.md").write_text(DECLARED)
    pq.write_table(pa.table({"text": ["a", "b", "c"], "label": [0, 7, 1]}), folder / "train.parquet")
    assert rows_of(load_splits(DataArguments(**few))) == [("a", "negative"), ("c", "positive")]
    (folder / "README.md").unlink()
    (folder / "train.parquet").unlink()
    (folder / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\nbroken\n')
    assert len(load(ChatDataArguments(**few)).rows["train"]) == 1


@pytest.mark.parametrize(("rows", "answers"), CHATS.values(), ids=CHATS.keys())
def test_answers_stay_what_they_are(folder: Path, rows: str, answers: list[str]) -> None:
    (folder / "train.jsonl").write_text(rows)
    train = load(ChatDataArguments(dataset_name="set")).rows["train"]
    messages = train.table["messages"].to_pylist()
    assert [each[-1]["content"] for each in messages] == answers


@pytest.mark.parametrize("kind", ["tweets", "chats", "parquet"])
def test_splits_that_a_run_does_not_read_are_reported(
    folder: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Such as GLUE's `validation_matched`."""
    of_split = {"train": "train", "test": "test", "dev_a": "validation_matched", "dev_b": "validation_other"}
    rows = '{"prompt": "a", "completion": "b"}\n' if kind == "chats" else GOOD
    files = "".join(f"  - {{split: {name}, path: {file}.*}}\n" for file, name in of_split.items())
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n")
    for file in of_split:
        (folder / f"{file}.jsonl").write_text(rows)
        if kind == "parquet":
            table = pa.Table.from_pylist([json.loads(row) for row in rows.splitlines()])
            pq.write_table(table, folder / f"{file}.parquet")
            (folder / f"{file}.jsonl").unlink()
    if kind == "chats":
        assert set(chat_sources_of(ChatDataArguments(dataset_name="set"), Problems())) == {"train", "test"}
    else:
        assert "validation" not in load_splits(DataArguments(dataset_name="set")).rows
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "--dataset_name set: ignoring its rows of validation_matched, validation_other."
    ]
    caplog.clear()
    (folder / "README.md").unlink()
    for path in folder.glob("dev*"):
        path.unlink()
    assert set(text_sources(DataArguments(dataset_name="set"), Problems())) == {"train", "test"}
    assert caplog.records == []


def test_test_rows_may_lack_the_labels_column(folder: Path) -> None:
    (folder / "train.jsonl").write_text(GOOD)
    (folder / "test.jsonl").write_text('{"text": "c"}\n')
    splits = load_splits(DataArguments(dataset_name="set"))
    assert splits.notes == ["--dataset_name set: its test rows have no labels and are left out."]
    (folder / "validation.jsonl").write_text('{"text": "c"}\n')
    assert problems_of() == [f"--dataset_name set {folder / 'validation.jsonl'} column-missing"]


@pytest.mark.parametrize("settings", ["field: rows", "encoding: latin-1", "encoding_errors: ignore"])
def test_json_files_in_a_way_of_their_own_are_refused_with_the_way_out(folder: Path, settings: str) -> None:
    config = f"---\nconfigs:\n- config_name: default\n  data_files: train.json\n  {settings}\n---\n"
    (folder / "README.md").write_text(config)
    (folder / "train.json").write_text('{"rows": []}')
    assert problems_of() == ["--dataset_name set dataset-settings"]


def test_packed_json_files_are_refused_with_the_way_out(folder: Path) -> None:
    (folder / "train.jsonl.gz").write_bytes(b"\x1f\x8b")
    assert problems_of() == ["--dataset_name set dataset-file-kind"]


# `datasets` 5.2 checks no id of a file; it crashed later, in `take`, without a row.
@pytest.mark.more
@pytest.mark.parametrize("declared", ["in README.md", "in the file"])
@pytest.mark.parametrize("wrong", [7, 2, -2])
def test_a_class_id_out_of_range_is_reported_by_row_and_left_out(
    folder: Path, quarantine: Quarantine, declared: str, wrong: int
) -> None:
    table = pa.table({"text": ["a", "b", "c", "d"], "label": [1, 0, wrong, 0]})
    if declared == "in README.md":
        (folder / "README.md").write_text(DECLARED)
    else:
        names = datasets.ClassLabel(names=["negative", "positive"])
        features = datasets.Features({"text": datasets.Value("string"), "label": names})
        table = table.replace_schema_metadata(features.arrow_schema.metadata)
    pq.write_table(table, folder / "train.parquet")
    assert problems_of() == ["--dataset_name set set/train row 3 class-undeclared"]
    (rows,) = hub_datasets.load_hub_dataset("set", None).values()
    (batch,) = rows.batches(Wanted(COLUMNS, {}), quarantine)
    assert batch.select(["text", "label", "line"]).to_pylist() == [
        {"text": "a", "label": "positive", "line": 1},
        {"text": "b", "label": "negative", "line": 2},
        {"text": "d", "label": "negative", "line": 4},
    ]
    assert [(entry["line"], entry["read"]["text"]) for entry in rejects(quarantine, 3)] == [(3, "c")]


@pytest.mark.parametrize("declared", ["in README.md", "in the file"])
def test_languages_that_are_class_ids_get_their_names(folder: Path, declared: str) -> None:
    table = pa.table({"text": ["a", "b", "ok"], "label": ["x", "y", "y"], "language": [1, 0, -1]})
    if declared == "in README.md":
        names = DECLARED.replace("name: label", "name: label\n    dtype: string\n  - name: language")
        names = names.replace("negative", "hi").replace("positive", "te")
        (folder / "README.md").write_text(names)
    else:
        names = datasets.ClassLabel(names=["hi", "te"])
        text = datasets.Value("string")
        features = datasets.Features({"text": text, "label": text, "language": names})
        table = table.replace_schema_metadata(features.arrow_schema.metadata)
    pq.write_table(table, folder / "train.parquet")
    assert load_splits(DataArguments(dataset_name="set")).rows["train"].table["language"].to_pylist() == [
        "te",
        "hi",
        "und-Latn",
    ]


def test_class_ids_whose_names_are_numbers_get_these_names(folder: Path) -> None:
    (folder / "README.md").write_text(DECLARED.replace("negative", "'1'").replace("positive", "'2'"))
    pq.write_table(pa.table({"text": ["a", "b"], "label": [0, 1]}), folder / "train.parquet")
    assert rows_of(load_splits(DataArguments(dataset_name="set"))) == [("a", "1"), ("b", "2")]


def test_class_names_that_are_no_text_are_refused(folder: Path) -> None:
    (folder / "README.md").write_text(DECLARED.replace("negative", "no"))
    pq.write_table(pa.table({"text": ["a", "b"], "label": [0, 1]}), folder / "train.parquet")
    assert problems_of() == ["--dataset_name set train class-names-unclear"]
    (folder / "train.parquet").unlink()
    (folder / "train.jsonl").write_text(GOOD)
    assert problems_of() == ["--dataset_name set train class-names-unclear"]


def test_columns_of_json_are_refused_in_parquet_files_and_datasets_of_them(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"text": "a", "label": "x", "prompt": "a", "completion": "b"}\n{"text": 5}\n')
    made = datasets.load_dataset("json", data_files=str(folder / "rows.jsonl"), cache_dir="other")["train"]
    (folder / "rows.jsonl").unlink()
    path = str(folder / "train.parquet")
    made.to_parquet(path)
    assert pq.read_table(path)["text"].to_pylist() == ['"a"', "5"]
    assert problems_raised(lambda: read_table(path, COLUMNS)) == [f"{path} column-type"]
    assert problems_raised(lambda: list(read_records(path, BadRows(path)))) == [f"{path} column-json"]
    assert problems_of() == ["--dataset_name set train column-type"]
    chats = problems_raised(lambda: load(ChatDataArguments(dataset_name="set")))
    assert chats == ["--dataset_name set train column-json"]

"""Bad data files: refused with file and line, left out and written down, or read exactly; never changed in silence."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from indictune.cli import main
from indictune.config.arguments import DataArguments
from indictune.config.shared_arguments import EvaluationArguments
from indictune.data.bad_rows import REJECTED, keep_rejected
from indictune.data.chat.conversations import evaluated_file, load_conversations
from indictune.data.load_rows import load_splits, load_test_rows
from indictune.models import builtin
from tests.conftest import FinishedRun
from tests.data.tables import read_table
from tests.problems import problems_raised
from tests.ranks import test_llama
from tests.ranks.launching import SCRIPT, accelerate, python, start
from tests.training.tiny import tiny_llama

COLUMNS = {"text": "text", "label": "label"}
HEAD = b"text,label\n"
GOOD = b"a,x\nb,y\n"
TABLE = HEAD + GOOD
ROWS = b'{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n'
LISTED = b'[{"text": "a", "label": "x"},\n{"text": "b", "label": "y"}]'


def parquet(**columns: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def not_text() -> pa.Array:
    """A column of strings of which one is no UTF-8, as faulty writers leave it."""
    return pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"b", b"\xff"], pa.binary()).buffers())


def twice(name: str) -> bytes:
    """A file with two columns of that name."""
    file, names = io.BytesIO(), ["text", "label", "language", name]
    pq.write_table(pa.Table.from_arrays([pa.array(["a", "b"]), *[pa.array(["x", "y"])] * 3], names=names), file)
    return file.getvalue()


# Name of the file, its bytes, and all texts and labels in it.
READ_EXACTLY: dict[str, tuple[str, bytes, list[tuple[str | None, str | None]]]] = {
    "NA": ("f.csv", HEAD + b"NA,x\n", [("NA", "x")]),
    "null": ("f.csv", HEAD + b"null,None\n", [("null", "None")]),
    "a number": ("f.csv", HEAD + b"1e5,007\n", [("1e5", "007")]),
    "a boolean in csv": ("f.csv", HEAD + b"True,False\n", [("True", "False")]),
    "spaces": ("f.csv", HEAD + b" a , x \n", [(" a ", " x ")]),
    "a byte order mark": ("f.csv", b"\xef\xbb\xbf" + TABLE, [("a", "x"), ("b", "y")]),
    "a quoted header after a mark": ("f.csv", b'\xef\xbb\xbf"text","label"\na,x\n', [("a", "x")]),
    "lines of Windows": ("f.csv", TABLE.replace(b"\n", b"\r\n"), [("a", "x"), ("b", "y")]),
    "no last line end": ("f.csv", TABLE[:-1], [("a", "x"), ("b", "y")]),
    "quoted line breaks": ("f.csv", HEAD + b'"a\r\n\nb",x\n', [("a\r\n\nb", "x")]),
    "doubled quotes": ("f.csv", HEAD + b'"""a"", b",x\n', [('"a", b', "x")]),
    "a quote inside a field": ("f.csv", HEAD + b'5" x 3",x\n', [('5" x 3"', "x")]),
    "a backslash": ("f.csv", HEAD + b"a\\n\\,x\n", [("a\\n\\", "x")]),
    "a formula": ("f.csv", HEAD + b'"=1+1",x\n', [("=1+1", "x")]),
    "NUL": ("f.csv", HEAD + b"a\x00b,x\n", [("a\x00b", "x")]),
    "a line separator": ("f.csv", HEAD + "a\u2028b\x85c,x\n".encode(), [("a\u2028b\x85c", "x")]),
    "a long field": ("f.csv", HEAD + b"a" * 300_000 + b",x\n", [("a" * 300_000, "x")]),
    "another column there twice": ("f.csv", b"id,text,label,id\n1,a,x,2\n", [("a", "x")]),
    "commas in tsv": ("f.tsv", b"text\tlabel\na,b\tx\n", [("a,b", "x")]),
    "a quoted tab": ("f.tsv", b'text\tlabel\n"a\tb"\tx\n', [("a\tb", "x")]),
    "numbers in jsonl": ("f.jsonl", b'{"text": 1e5, "label": 1.50}', [("1e5", "1.50")]),
    "a huge number": ("f.jsonl", b'{"text": ' + b"9" * 5000 + b', "label": 0}', [("9" * 5000, "0")]),
    "text of NaN": ("f.jsonl", b'{"text": "NaN", "label": "nan"}', [("NaN", "nan")]),
    "a line break in a text": ("f.jsonl", b'{"text": "a\\nb", "label": "x"}', [("a\nb", "x")]),
    "a header of other case": ("f.csv", b"Text,Label\na,x\n", [("a", "x")]),
    "semicolons": ("f.csv", TABLE.replace(b",", b";"), [("a", "x"), ("b", "y")]),
    "tabs in csv": ("f.csv", TABLE.replace(b",", b"\t"), [("a", "x"), ("b", "y")]),
    "csv.gz": ("f.csv.gz", gzip.compress(TABLE), [("a", "x"), ("b", "y")]),
    "an emoji of two escapes": ("f.jsonl", b'{"text": "\\ud83d\\ude02", "label": "x"}', [("\U0001f602", "x")]),
    "blank lines": ("f.jsonl", b'\n{"text": "a", "label": "x"}\n \n', [("a", "x")]),
    "a list in one line": ("f.json", LISTED.replace(b"\n", b""), [("a", "x"), ("b", "y")]),
    "jsonl named json": ("f.json", ROWS, [("a", "x"), ("b", "y")]),
    "braces in a text": ("f.json", b'[{"text": "}],[{", "label": "x"}]', [("}],[{", "x")]),
    "large strings": (
        "f.parquet",
        parquet(text=pa.array(["NA"], pa.large_string()), label=pa.array([1], pa.int8())),
        [("NA", "1")],
    ),
    "string views": ("f.parquet", parquet(text=pa.array(["a"], pa.string_view()), label=[True]), [("a", "true")]),
    "a dictionary": ("f.parquet", parquet(text=pa.array(["a", "a"]).dictionary_encode(), label=["x", None]), [
        ("a", "x"),
        ("a", None),
    ]),
    "decimals and dates": (
        "f.parquet",
        parquet(text=pa.array([0], pa.date32()), label=pa.array([1], pa.decimal128(5, 2))),
        [("1970-01-01", "1.00")],
    ),
    "nothing but nulls": ("f.parquet", parquet(text=pa.nulls(1), label=["x"]), [(None, "x")]),
}  # fmt: skip

# Files of which nothing is taken, whatever --bad_rows says: the bytes, and how the message goes on after the path.
REFUSED: dict[str, tuple[str, bytes, str]] = {
    "empty": ("f.csv", b"", " no-rows"),
    "empty jsonl": ("f.jsonl", b"", " no-rows"),
    "a mark alone": ("f.csv", b"\xef\xbb\xbf", " no-rows"),
    "a header alone": ("f.csv", HEAD, " no-rows"),
    "blank lines alone": ("f.jsonl", b"\n \n", " no-rows"),
    "an empty list": ("f.json", b"[]", " no-rows"),
    "UTF-16 without a mark": ("f.csv", TABLE.decode().encode("utf-16-le"), " column-missing"),
    "UTF-32": ("f.csv", TABLE.decode().encode("utf-32"), ":1 not-utf8"),
    "gzip named csv": ("f.csv", gzip.compress(TABLE), ":1 not-utf8"),
    "zip named jsonl": ("f.jsonl", b"PK\x03\x04" + bytes(60), ":1 invalid-json"),
    "parquet named csv": ("f.csv", parquet(text=["a"], label=["x"]), " column-missing"),
    "csv named parquet": ("f.parquet", TABLE, " rows-unreadable"),
    "csv named json": ("f.json", TABLE, " json-list-missing"),
    "jsonl named csv": ("f.csv", ROWS, " column-missing"),
    "an unknown extension": ("f.txt", TABLE, " file-kind-unknown"),
    "no header": ("f.csv", GOOD, " column-missing"),
    "a column there twice": ("f.csv", b"text,label,text\na,x,b\n", " column-duplicate"),
    "a header that is no text": ("f.csv", b"text,label,\xe9\na,x,1\n", ":1 not-utf8"),
    "a broken header": ("f.csv", b'"text"x,label\na,x\n', ":1 row-unreadable"),
    "a list cut short": ("f.json", LISTED[:-1], ":2 invalid-json"),
    "a list without a comma": ("f.json", LISTED.replace(b"},", b"}"), ":1 invalid-json"),
    "a comma too many": ("f.json", LISTED[:-1] + b",]", ":2 invalid-json"),
    "text after the list": ("f.json", LISTED + b"x", ":2 invalid-json"),
    "a list nested too deeply": ("f.json", b"[" * 100_000, ":1 invalid-json"),
    "bytes outside the list": ("f.json", b'{"a": "\xff", "data": ' + LISTED + b"}", ":1 not-utf8"),
    "bytes in a list": ("f.json", b'[{"text": "\xff",\n"label": "x"},' + LISTED[1:], ":1 not-utf8"),
    "a key there twice in a list": ("f.json", b'[{"text": "c", "text": "d"},' + LISTED[1:], ":1 key-duplicate"),
    "two data": ("f.json", b'{"data": [], "data": []}', ":1 key-duplicate"),
    "no column of that name": ("f.jsonl", ROWS.replace(b'"label"', b'"mood"'), " column-missing"),
    "parquet cut short": ("f.parquet", parquet(text=["a"], label=["x"])[:-9], " rows-unreadable"),
    "parquet of lists": ("f.parquet", parquet(text=[["a"]], label=["x"]), " column-type"),
    "parquet of bytes": ("f.parquet", parquet(text=[b"a"], label=["x"]), " column-type"),
    "parquet of fixed bytes": (
        "f.parquet",
        parquet(text=["a"], label=pa.array([b"xy"], pa.binary(2))),
        " column-type",
    ),
    "parquet with bytes that are no text": (
        "f.parquet",
        parquet(text=not_text(), label=["x", "y", "x"]),
        " column-unreadable",
    ),
    "parquet without a column": ("f.parquet", parquet(text=["a"]), " column-missing"),
    "parquet with a column there twice": ("f.parquet", twice("text"), " column-duplicate"),
    "parquet with an optional one twice": ("f.parquet", twice("language"), " column-duplicate"),
    "parquet without rows": (
        "f.parquet",
        parquet(text=pa.array([], pa.string()), label=pa.array([], pa.string())),
        " no-rows",
    ),
}  # fmt: skip

# Files with lines that a stray quote damages: the bytes, the problem, and how many rows are read and lines left out.
DAMAGED: dict[str, tuple[bytes, str, int, list[int]]] = {
    "a quote that is never closed": (TABLE + b'"c,x\n' + GOOD, ":4 row-unreadable", 4, [4]),
    "a stray quote over lines": (TABLE + b'"c,x\n"d,y",x\n', ":4 row-unreadable", 3, [4]),
    "a quote left open in a line": (TABLE + b'"c"" ,"d"\n', ":4 row-unreadable", 2, [4]),
    "a ragged row of several lines": (HEAD + b'"c\nd",x,y\n' + GOOD, ":2 row-of-many-lines", 2, [2, 3]),
    "a quoted text of several lines with a stray quote": (
        HEAD + b'"He said "hi" to\nme, and\nleft",x\n' + GOOD,
        ":2 row-unreadable",
        2,
        [2, 3, 4],
    ),
    "rows that a stray quote swallows": (
        HEAD + GOOD * 50 + b'"c,x\n' + GOOD * 50 + b'5",d,x\n' + GOOD * 50,
        ":102 row-of-many-lines",
        300,
        [102, 203],
    ),
    "two stray quotes that join rows": (
        HEAD + GOOD * 5 + b'"c,x\n' + GOOD + b'd","y\n' + GOOD * 5,
        ":12 row-unreadable",
        22,
        [12, 15],
    ),
    "swallowed rows with bytes that are no text": (
        TABLE + b'"c,x\n' + GOOD * 50 + b'\xff",d,x\n' + GOOD,
        ":4 row-of-many-lines",
        104,
        [4, 105],
    ),
    "very many swallowed rows": (TABLE + b'"c,x\n' + GOOD * 60 + b'd",x\n', ":4 row-too-long", 123, [4]),
}  # fmt: skip

# Files with good rows a, b and bad ones: the bytes, and line and reason of each bad one.
LEFT_OUT: dict[str, tuple[str, bytes, list[tuple[int, str]]]] = {
    "too many fields": ("f.csv", TABLE + b"c,x,1\n", [(4, "field-count")]),
    "too few fields": ("f.csv", HEAD + b"c\n" + GOOD, [(2, "field-count")]),
    "one field too many in the first row": ("f.csv", HEAD + b"1,c,x\n" + GOOD, [(2, "field-count")]),
    "a line of spaces": ("f.csv", HEAD + b"  \n" + GOOD, [(2, "field-count")]),
    "a stray quote in one line": (
        "f.csv",
        HEAD + b'"c" d,x\n' + GOOD,
        [(2, "row-unreadable")],
    ),
    "lone carriage returns": ("f.csv", HEAD + b"c\rd,x\n" + GOOD, [(2, "row-unreadable")]),
    "tsv too few": ("f.tsv", (TABLE + b"c\n").replace(b",", b"\t"), [(4, "field-count")]),
    "latin-1": ("f.csv", HEAD + "naïve,x\n".encode("latin-1") + GOOD, [(2, "not-utf8")]),
    "a letter cut in two": ("f.csv", HEAD + "कख,x\n".encode()[2:] + GOOD, [(2, "not-utf8")]),
    "a surrogate in UTF-8": ("f.csv", HEAD + b"\xed\xa0\xbd,x\n" + GOOD, [(2, "not-utf8")]),
    "bytes in the second line of a row": ("f.csv", HEAD + b'"c\n\xff",x\n' + GOOD, [(3, "not-utf8")]),
    "bytes in jsonl": ("f.jsonl", b'{"text": "\xff", "label": "x"}\n' + ROWS, [(1, "not-utf8")]),
    "a broken object": ("f.jsonl", ROWS + b'{"text": "c", \n', [(3, "invalid-json")]),
    "an object over two lines": ("f.jsonl", ROWS + b'{"text":\n"c"}\n', [(3, "invalid-json"), (4, "invalid-json")]),
    "two objects in a line": ("f.jsonl", ROWS + b"{} {}\n", [(3, "invalid-json")]),
    "single quotes": ("f.jsonl", ROWS + b"{'text': 'c'}\n", [(3, "invalid-json")]),
    "a line nested too deeply": ("f.jsonl", ROWS + b"[" * 100_000, [(3, "invalid-json")]),
    "a list in a line": ("f.jsonl", ROWS + b'["c", "x"]', [(3, "not-an-object")]),
    "a number in a line": ("f.jsonl", ROWS + b"3", [(3, "not-an-object")]),
    "a text that is a list": ("f.jsonl", ROWS + b'{"text": ["c"], "label": "x"}', [(3, "value-of-wrong-type")]),
    "a label that is an object": ("f.jsonl", ROWS + b'{"text": "c", "label": {}}', [(3, "value-of-wrong-type")]),
    "a key there twice": (
        "f.jsonl",
        ROWS + b'{"text": "c", "text": "d", "label": "x"}',
        [(3, "key-duplicate")],
    ),
    "null in a list": ("f.json", LISTED[:-1] + b",\nnull]", [(3, "not-an-object")]),
}  # fmt: skip

# As above, for rows that can be read.
UNUSABLE: dict[str, tuple[str, bytes, list[tuple[int, str]]]] = {
    "no label": ("f.csv", TABLE + b"c,\n", [(4, "no-label")]),
    "a label of spaces": ("f.csv", TABLE + b'c," "\n', [(4, "no-label")]),
    "a label that is null": ("f.jsonl", ROWS + b'{"text": "c", "label": null}', [(3, "no-label")]),
    "a label that is NaN": ("f.jsonl", ROWS + b'{"text": "c", "label": NaN}', [(3, "no-label")]),
    "a row without the key": ("f.jsonl", ROWS + b'{"text": "c"}', [(3, "no-label")]),
    "NaN in parquet": ("f.parquet", parquet(text=["a", "b", "c"], label=[0.0, 1.0, float("nan")]), [(3, "no-label")]),
}

# The files of a run by split, where one file has a label that the run lacks; and the message.
STRANGERS: dict[str, tuple[dict[str, bytes], str]] = {
    "one label alone": (
        {"train": HEAD + b"a,x\nb,x\n"},
        "--train_file train.csv one-label",
    ),
    "free text": (
        {"train": HEAD + b"".join(b"a,it is row %d of many\n" % row for row in range(21))},
        "--train_file train.csv labels-look-like-text",
    ),
    "of validation rows alone": (
        {"train": TABLE, "validation": TABLE + b"c,z\n"},
        "--validation_file validation.csv label-unknown",
    ),
    "of test rows alone": (
        {"train": TABLE, "test": TABLE + b"c,z\n"},
        "--test_file test.csv label-unknown",
    ),
    "with another hyphen around it": (
        {"train": TABLE, "validation": TABLE + b"c,x-\n"},
        "--validation_file validation.csv label-unknown",
    ),
    "-1": (
        {"train": HEAD + b"a,0\nb,1\n", "validation": HEAD + b"a,0\nb,-1\n"},
        "--validation_file validation.csv label-unknown",
    ),
    "3 of 0 and 1": (
        {"train": HEAD + b"a,0\nb,1\n", "validation": HEAD + b"a,3\nb,1\n"},
        "--validation_file validation.csv label-unknown",
    ),
}

# The label as it stands in csv or jsonl, and the class that it becomes.
LABELS: dict[str, tuple[str, bytes, list[str]]] = {
    "-1 and 3": ("f.csv", HEAD + b"a,-1\nb,3\n", ["-1", "3"]),
    "the word nan": ("f.csv", HEAD + b"a,nan\nb,NA\n", ["NA", "nan"]),
    "booleans": ("f.jsonl", b'{"text": "a", "label": true}\n{"text": "b", "label": "False"}', ["false", "true"]),
    "floats": ("f.jsonl", b'{"text": "a", "label": 1.0}\n{"text": "b", "label": 0}', ["0", "1"]),
    "leading zeros": ("f.csv", HEAD + b"a,01\nb,1\n", ["01", "1"]),
    "two cases of a word": ("f.csv", HEAD + b"a,Pos\nb,pos\nc,no\n", ["Pos", "no"]),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have short names."""
    monkeypatch.chdir(tmp_path)


def problems_of(**arguments: Any) -> list[str]:
    return problems_raised(lambda: load_splits(DataArguments(**arguments)))


def test_the_table_is_as_long_as_promised() -> None:
    assert len(REFUSED) + len(LEFT_OUT) >= 60
    assert len(UNUSABLE) + len(STRANGERS) >= 12


@pytest.mark.parametrize(("name", "content", "rows"), READ_EXACTLY.values(), ids=READ_EXACTLY.keys())
def test_a_file_is_read_exactly(name: str, content: bytes, rows: list[tuple[str | None, str | None]]) -> None:
    Path(name).write_bytes(content)
    read = read_table(name, COLUMNS)
    assert list(zip(read["text"].to_pylist(), read["label"].to_pylist(), strict=True)) == rows


@pytest.mark.parametrize("name", ["f.jsonl", "f.json"])
def test_half_an_emoji_is_a_bad_row(name: str) -> None:
    rows = [
        '{"text": "\\ud83d\\ude02", "label": "x"}',
        '{"text": "a\\ud83d", "label": "y"}',
        '{"text": "\\\\ud83d", "label": "y"}',
    ]
    Path(name).write_text(",\n".join(rows).join("[]") if name == "f.json" else "\n".join(rows), encoding="utf-8")
    assert problems_of(train_file=name) == [f"--train_file {name}:2 half-emoji"]
    kept = load_splits(DataArguments(train_file=name, bad_rows="quarantine", max_bad_fraction=0.5)).rows["train"]
    assert kept.table["line"].to_pylist() == [1, 3]


@pytest.mark.parametrize(("name", "content", "found"), REFUSED.values(), ids=REFUSED.keys())
def test_a_file_is_refused(name: str, content: bytes, found: str) -> None:
    Path(name).write_bytes(content)
    for more in ({}, {"bad_rows": "quarantine", "max_bad_fraction": 0.9}):
        assert problems_of(train_file=name, **more)[0] == f"--train_file {name}{found}"


@pytest.mark.parametrize(("content", "found", "good", "lines"), DAMAGED.values(), ids=DAMAGED.keys())
def test_quarantine_takes_the_fewest_damaged_lines(content: bytes, found: str, good: int, lines: list[int]) -> None:
    Path("f.csv").write_bytes(content)
    assert problems_of(train_file="f.csv")[0] == f"--train_file f.csv{found}"
    splits = load_splits(DataArguments(train_file="f.csv", bad_rows="quarantine", max_bad_fraction=0.9))
    assert len(splits.rows["train"]) == good
    rejected = [json.loads(line) for line in (splits.folder / REJECTED).read_bytes().splitlines()]
    assert [row["line"] for row in rejected] == lines
    written = content.splitlines(keepends=True)
    assert [row["read"].encode(errors="surrogateescape") for row in rejected] == [written[line - 1] for line in lines]


@pytest.mark.parametrize(("name", "content", "bad"), LEFT_OUT.values(), ids=LEFT_OUT.keys())
def test_a_bad_row_stops_the_run_or_is_left_out_and_written_down(
    name: str, content: bytes, bad: list[tuple[int, str]]
) -> None:
    assert_stops_or_is_left_out(name, content, bad)


@pytest.mark.parametrize(("name", "content", "bad"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_a_row_without_a_label_is_a_bad_one(name: str, content: bytes, bad: list[tuple[int, str]]) -> None:
    assert_stops_or_is_left_out(name, content, bad)


def assert_stops_or_is_left_out(name: str, content: bytes, bad: list[tuple[int, str]]) -> None:
    Path(name).write_bytes(content)
    (first, *_) = problems_of(train_file=name)
    line, code = bad[0]
    location = f"{name} row {line}" if name.endswith("parquet") else f"{name}:{line}"
    assert first == f"--train_file {location} {code}"
    for _ in range(2):  # the second time from the cache
        splits = load_splits(DataArguments(train_file=name, bad_rows="quarantine", max_bad_fraction=0.5))
        assert splits.rows["train"].table["text"].to_pylist() == ["a", "b"]
        keep_rejected(splits.folder, Path("out"), rank=0)
        rejected = [json.loads(entry) for entry in (Path("out") / REJECTED).read_text(encoding="utf-8").splitlines()]
        assert [(row["file"], row["line"]) for row in rejected] == [(name, line) for line, _ in bad]
        assert all(row["reason"].endswith(f"[{code}]") for row, (_, code) in zip(rejected, bad, strict=True))
        assert all(row.keys() == {"file", "line", "reason", "read"} for row in rejected)
        (note,) = splits.notes
        assert note.startswith(f"--train_file {name}: {len(bad)} bad rows were left out, first {location}")
        assert REJECTED not in note  # who reads rows alone writes none


@pytest.mark.parametrize(("files", "found"), STRANGERS.values(), ids=STRANGERS.keys())
def test_labels_that_cannot_be_classes_are_refused(files: dict[str, bytes], found: str) -> None:
    for split, content in files.items():
        Path(f"{split}.csv").write_bytes(content)
    assert problems_of(**{f"{split}_file": f"{split}.csv" for split in files}) == [found]


@pytest.mark.parametrize(("name", "content", "labels"), LABELS.values(), ids=LABELS.keys())
def test_a_label_keeps_its_name(name: str, content: bytes, labels: list[str]) -> None:
    Path(name).write_bytes(content)
    assert load_splits(DataArguments(train_file=name)).labels == labels


def test_what_was_read_is_written_down_with_its_bytes() -> None:
    Path("f.csv").write_bytes(HEAD + 'c,"ल",x\n'.encode() + b"\xff,y\n, z\n" + GOOD)
    splits = load_splits(DataArguments(train_file="f.csv", bad_rows="quarantine", max_bad_fraction=0.7))
    raw = (splits.folder / REJECTED).read_bytes()
    rejected = [json.loads(line) for line in raw.splitlines()]
    assert [row["line"] for row in rejected] == [2, 3]
    assert rejected[0]["read"] == 'c,"ल",x\n'
    assert "ल".encode() in raw
    assert rejected[1]["read"].encode(errors="surrogateescape") == b"\xff,y\n"


@pytest.mark.parametrize("name", ["f.csv", "f.jsonl"])
def test_more_bad_rows_than_the_fraction_stop_the_run(name: str) -> None:
    good = GOOD if name == "f.csv" else ROWS
    bad = b"c\n" if name == "f.csv" else b"[]\n"
    Path(name).write_bytes((HEAD if name == "f.csv" else b"") + good * 45 + bad * 10)
    first = 92 if name == "f.csv" else 91
    problems = problems_of(train_file=name, bad_rows="quarantine", max_bad_fraction=0.09)
    code = "field-count" if name == "f.csv" else "not-an-object"
    assert problems == [
        *(f"--train_file {name}:{line} {code}" for line in range(first, first + 5)),
        f"--train_file {name} too-many-bad-rows",
    ]
    allowed = DataArguments(train_file=name, bad_rows="quarantine", max_bad_fraction=0.1)
    assert len(load_splits(allowed).rows["train"]) == 90


@pytest.mark.parametrize("bad", [29, 57, 58, 69])
def test_bad_rows_that_are_just_the_fraction_are_left_out(bad: int) -> None:
    Path("f.csv").write_bytes(HEAD + b"c\n" * bad + b"a,x\n" * (98 - bad) + GOOD)
    share: dict[str, Any] = {"train_file": "f.csv", "bad_rows": "quarantine"}
    assert len(load_splits(DataArguments(**share, max_bad_fraction=bad / 100)).rows["train"]) == 100 - bad
    assert problems_of(**share, max_bad_fraction=(bad - 1) / 100)[-1] == "--train_file f.csv too-many-bad-rows"


def test_a_row_of_very_many_lines_is_bad() -> None:
    Path("f.csv").write_bytes(TABLE + b'"c,x\n' + GOOD * 50 + b'd",x\n' + b'"e\nf",x\n')
    assert problems_of(train_file="f.csv") == ["--train_file f.csv:4 row-too-long"]


def test_unlabelled_test_rows_of_a_dataset_are_left_out_where_others_have_labels() -> None:
    Path("set").mkdir()
    Path("set/train.jsonl").write_bytes(ROWS)
    Path("set/test.jsonl").write_bytes(ROWS + b'{"text": "c"}\n{"text": "d", "label": " "}\n')
    quarantine: dict[str, Any] = {"dataset_name": "set", "bad_rows": "quarantine", "max_bad_fraction": 0.5}
    splits = load_splits(DataArguments(**quarantine))
    assert splits.rows["test"].table["text"].to_pylist() == ["a", "b"]
    rejected = [json.loads(line) for line in (splits.folder / REJECTED).read_bytes().splitlines()]
    assert [(row["line"], row["reason"][-10:]) for row in rejected] == [(3, "[no-label]"), (4, "[no-label]")]
    Path("set/test.jsonl").write_bytes(b'{"text": "c"}\n{"text": "d"}\n')
    splits = load_splits(DataArguments(**quarantine))
    assert "test" not in splits.rows
    assert splits.notes == ["--dataset_name set: its test rows have no labels and are left out."]


def test_every_file_has_its_own_share_and_unreadable_rows_come_first() -> None:
    Path("t.csv").write_bytes(HEAD + GOOD * 60 + b"c,\nd\n" + GOOD)
    Path("v.csv").write_bytes(HEAD + b"c\n" + b"e,x\nf,y\n" * 60)
    splits = load_splits(
        DataArguments(train_file="t.csv", validation_file="v.csv", bad_rows="quarantine", max_bad_fraction=0.02)
    )
    rejected = [json.loads(line) for line in (splits.folder / REJECTED).read_bytes().splitlines()]
    assert [(row["file"], row["line"]) for row in rejected] == [("t.csv", 123), ("t.csv", 122), ("v.csv", 2)]


def test_empty_texts_are_dropped_with_a_note() -> None:
    Path("f.jsonl").write_bytes(ROWS + b'{"text": " \\u200b", "label": "x"}\n')
    dropped = load_splits(DataArguments(train_file="f.jsonl"))
    assert dropped.notes == ["--train_file f.jsonl: 1 rows without text were dropped: f.jsonl:3."]
    quarantined = load_splits(DataArguments(train_file="f.jsonl", bad_rows="quarantine"))
    assert quarantined.notes == dropped.notes
    for splits in (dropped, quarantined):
        assert splits.rows["train"].table["text"].to_pylist() == ["a", "b"]
        assert not (splits.folder / REJECTED).exists()


def test_rank_0_alone_keeps_the_rejects_and_an_earlier_runs_go_away(tmp_path: Path) -> None:
    Path(REJECTED).write_text("new")
    out = tmp_path / "out"
    keep_rejected(tmp_path, out, rank=1)
    assert not out.exists()
    keep_rejected(tmp_path, out, rank=0)
    assert (out / REJECTED).read_text() == "new"
    Path(REJECTED).unlink()
    keep_rejected(tmp_path, out, rank=0)
    assert list(out.iterdir()) == []


def test_flags_of_bad_rows_are_checked() -> None:
    assert problems_of_arguments(bad_rows="quarantine", max_bad_fraction=1.0) == [
        "--max_bad_fraction 1.0 share-expected"
    ]
    assert problems_of_arguments(max_bad_fraction=0.2) == ["--max_bad_fraction 0.2 no-effect"]


def problems_of_arguments(**arguments: Any) -> list[str]:
    return problems_raised(lambda: DataArguments(train_file="f.csv", **arguments))


def run(folder: Path, *flags: str) -> tuple[int, str]:
    """Exit code and messages of a run of one step."""
    more = ["--global_batch_size", "4", "--per_device_train_batch_size", "4", "--max_steps", "1"]
    job = start([*python(), SCRIPT, "--output_dir", str(folder / "out"), *more, *flags])
    return job.returncode, job.stderr


def test_a_run_leaves_the_rejects_beside_its_model(tmp_path: Path) -> None:
    train = tmp_path / "t.csv"
    train.write_bytes(TABLE + b"c,x,1\n" + "घ,x\n".encode())
    quarantine = ["--train_file", str(train), "--bad_rows", "quarantine"]
    code, output = run(tmp_path, *quarantine)
    assert code == 2, output
    assert f"{train}:4: 3 fields" in output
    assert "[field-count]" in output
    assert "1 of 4 rows (25.00%) cannot be used" in output
    assert "[too-many-bad-rows]" in output
    assert not (tmp_path / "out" / REJECTED).exists()
    code, output = run(tmp_path, *quarantine, "--max_bad_fraction", "0.3")
    assert code == 0, output
    assert f"--train_file {train}: 1 bad rows were left out, first " in output
    (entry,) = (tmp_path / "out" / REJECTED).read_text(encoding="utf-8").splitlines()
    assert json.loads(entry)["read"] == "c,x,1\n"


@pytest.mark.more
def test_a_run_of_chats_leaves_out_what_becomes_no_tokens(tmp_path: Path) -> None:
    """Neither training nor the samples meet these rows, and both kinds stand in one file."""
    recipe = test_llama.write_job(tmp_path)
    for split in ("train", "validation"):
        path = tmp_path / f"{split}.jsonl"
        too_long = {"messages": [{"role": "user", "content": "a " * 200}, {"role": "assistant", "content": "b"}]}
        path.write_text(json.dumps(too_long) + "\n[]\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    flags = ["--config", str(recipe), "--output_dir", str(tmp_path / "out"), "--max_steps", "1"]
    flags += ["--bad_rows", "quarantine", "--max_bad_fraction", "0.1"]
    flags += ["--num_sample_generations", "1", "--max_new_tokens", "1"]
    job = start([*python(), test_llama.SCRIPT, *flags])
    assert job.returncode == 0, job.stderr
    entries = [json.loads(entry) for entry in (tmp_path / "out" / REJECTED).read_bytes().splitlines()]
    files = [str(tmp_path / f"{split}.jsonl") for split in ("train", "validation")]
    assert [(each["file"], each["line"]) for each in entries] == [(file, line) for line in (2, 1) for file in files]
    for file in files:
        assert f"{file}: 1 bad rows were left out, first " in job.stderr
    sample = json.loads((tmp_path / "out" / "samples.jsonl").read_text(encoding="utf-8"))
    assert "a a a a" not in sample["prompt"]


@pytest.mark.more
def test_two_ranks_leave_the_rejects_once_and_whole(tmp_path: Path) -> None:
    train, out = tmp_path / "t.jsonl", tmp_path / "out"
    bad = [b'{"text": "c' + str(number).encode() * 20_000 + b'"\n' for number in range(9)]  # without an end
    train.write_bytes(b"".join(ROWS + line for line in bad))
    flags = ["--train_file", str(train), "--bad_rows", "quarantine", "--max_bad_fraction", "0.5", "--max_steps", "1"]
    flags += ["--global_batch_size", "4", "--per_device_train_batch_size", "2", "--output_dir", str(out)]
    cache = {"INDICTUNE_CACHE": str(tmp_path / "cache")}  # which both have to make
    job = start([*accelerate("ddp", 2), SCRIPT, *flags], cache)
    assert job.returncode == 0, job.stderr
    entries = [json.loads(line) for line in (out / REJECTED).read_text(encoding="utf-8").splitlines()]
    assert [entry["line"] for entry in entries] == [3 * number + 3 for number in range(9)]
    assert [entry["read"].encode() for entry in entries] == bad
    assert job.stderr.count("9 bad rows were left out") == 1


def test_too_many_bad_rows_of_a_test_file_are_refused() -> None:
    Path("t.jsonl").write_bytes(ROWS + b'{"text": \n')
    Path("c.jsonl").write_bytes(b'{"prompt": "a", "completion": "b"}\n' * 2 + b'{"prompt": \n')
    stop, few = EvaluationArguments(), EvaluationArguments(bad_rows="quarantine")
    for last, args in ((":3 invalid-json", stop), (" too-many-bad-rows", few)):
        rows = partial(load_test_rows, "t.jsonl", args, None)
        chats = partial(load_conversations, evaluated_file("c.jsonl"), args)
        assert problems_raised(rows)[-1] == f"--test_file t.jsonl{last}"
        assert problems_raised(chats)[-1] == f"--test_file c.jsonl{last}"


@pytest.mark.more
@pytest.mark.parametrize("kind", ["tweets", "chats"])
def test_evaluating_leaves_bad_rows_out_where_it_is_asked_to(
    finished_run: FinishedRun, tmp_path: Path, kind: str
) -> None:
    if kind == "tweets":
        model, good, found_later = finished_run.folder, b'{"text": "a", "label": "positive"}\n', b""
    else:
        model, good = Path(tiny_llama(tmp_path / "model")), b'{"prompt": "a", "completion": "b"}\n'
        found_later = b'{"prompt": "' + b"a " * 3_000 + b'", "completion": "b"}\n'  # the answer is cut off
    test, out = tmp_path / "t.jsonl", tmp_path / "out"
    test.write_bytes(good + b'{"text": \n' + good + found_later)
    command = [*python(), "indictune/__main__.py", "evaluate", "--model", str(model), "--test_file", str(test)]
    flags = ["--output_dir", str(out), "--bad_rows", "quarantine", "--max_bad_fraction", "0.5"]
    job = start([*command, *flags])
    assert job.returncode == 0, job.stderr
    assert f"--test_file {test}: 1 bad rows were left out, first " in job.stderr
    entries = [json.loads(entry) for entry in (out / REJECTED).read_bytes().splitlines()]
    assert [entry["line"] for entry in entries] == ([2] if kind == "tweets" else [2, 4])
    assert json.loads((out / "metrics.json").read_text(encoding="utf-8"))["test"]["num_examples"] == 2


@pytest.mark.more
def test_token_ids_beyond_the_embedding_are_reported_before_the_first_step(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(builtin.resolve("builtin:tiny-indic-bert"), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = len(tokenizer)
    tokenizer.add_tokens(["क्रिकेटर"])
    tokenizer.save_pretrained(folder)
    (tmp_path / "t.csv").write_bytes(TABLE + "क्रिकेटर,x\n".encode())
    code, output = run(tmp_path, "--train_file", str(tmp_path / "t.csv"), "--model_name_or_path", str(folder))
    assert code == 2, output
    assert f"{rows} rows" in output
    assert "[token-id-without-row]" in output
    assert not (tmp_path / "out" / "train_log.jsonl").exists()


def test_preparing_names_the_file_of_the_rejects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_bytes(TABLE + b"c\n")
    flags = ["--train_file", str(tmp_path / "t.csv"), "--bad_rows", "quarantine"]
    assert main(["prepare", *flags]) == 2
    assert "[too-many-bad-rows]" in capsys.readouterr().err
    assert main(["prepare", *flags, "--max_bad_fraction", "0.5"]) == 0
    shown = capsys.readouterr()
    (line,) = (line for line in shown.out.splitlines() if line.startswith("Rows that were left out, with reasons: "))
    (entry,) = Path(line.partition(": ")[2]).read_bytes().splitlines()
    assert json.loads(entry)["line"] == 4
    assert "1 bad rows were left out" in shown.err

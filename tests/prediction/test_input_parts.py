"""Parts of input files: together they hold each row once, and each is read by its own bytes or rows."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xlsxwriter

from indictune.data.bad_rows import BadRows, Quarantine
from indictune.data.columns import Wanted
from indictune.prediction import input_parts, labelled_rows
from indictune.prediction.input_parts import InputPart, counted_parts, parts_of_files, read_parts, version_of
from indictune.prediction.labelled_rows import TextFile
from tests.refusals import refused

ROWS = [f'{"अच्छी, फिल्म"} "{number}"' + ("\nनीचे" if number % 7 == 0 else "") for number in range(95)]
WANTED = Wanted({"text": "text"}, {"language": "language"})


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (input_parts, labelled_rows):
        monkeypatch.setattr(module, "WINDOW_ROWS", 10)
    monkeypatch.setattr(input_parts, "_MOST_PARTS", 5)


def delimited(delimiter: str = ",", encoding: str = "utf-8") -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter).writerows([["id", "text"], *enumerate(ROWS)])
    return text.getvalue().encode(encoding)


def json_lines() -> bytes:
    return "".join(f"{json.dumps({'text': text})}\n\n" for text in ROWS).encode()


def parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": ROWS, "id": range(95)}), file, row_group_size=7)
    return file.getvalue()


def workbook() -> bytes:
    file = io.BytesIO()
    with xlsxwriter.Workbook(file) as book:
        book.add_worksheet().write_column(0, 0, ["text", *ROWS])
    return file.getvalue()


# The content of each kind of file, and whether a part of it is read by its own bytes or rows.
FILES: dict[str, tuple[Callable[[], bytes], bool]] = {
    "a.csv": (delimited, True),
    "bom.csv": (lambda: delimited(encoding="utf-8-sig"), True),
    "a.tsv": (lambda: delimited("\t"), True),
    "a.jsonl": (json_lines, True),
    "a.parquet": (parquet, True),
    "a.csv.gz": (lambda: gzip.compress(delimited()), False),
    "utf16.tsv": (lambda: delimited("\t", "utf-16"), False),
    "a.json": (lambda: json.dumps([{"text": text} for text in ROWS]).encode(), False),
    "a.xlsx": (workbook, False),
}


def texts_of(parts: list[InputPart], file: TextFile) -> dict[int, list[str]]:
    read = read_parts(parts, file, lambda part: BadRows(part.file))
    return {part.number: [row for window in windows for row in window["text"].to_pylist()] for part, windows in read}


@pytest.mark.parametrize("name", FILES)
def test_parts_hold_each_row_once_for_one_process_and_for_four(tmp_path: Path, name: str) -> None:
    make, by_place = FILES[name]
    file = TextFile(str(tmp_path / name), WANTED)
    Path(file.path).write_bytes(make())
    parts = counted_parts(file, BadRows(file.path))
    assert [part.rows for part in parts] == [(0, 20), (20, 40), (40, 60), (60, 80), (80, 95)]
    assert all((part.place is not None) == by_place for part in parts)
    alone = texts_of(parts, file)
    assert [text for number in range(5) for text in alone[number]] == ROWS
    shared = [texts_of([part for part in parts if part.number % 4 == rank], file) for rank in range(4)]
    assert {number: texts for of_rank in shared for number, texts in of_rank.items()} == alone


def test_lines_of_a_txt_file_are_its_rows(tmp_path: Path) -> None:
    file = TextFile(str(tmp_path / "a.txt"), WANTED)
    Path(file.path).write_text("".join(f"पंक्ति {number}\n" for number in range(45)), encoding="utf-8")
    parts = counted_parts(file, BadRows(file.path))
    assert texts_of(parts[2:3], file) == {2: [f"पंक्ति {number}" for number in range(20, 30)]}


def test_bad_rows_between_parts_are_left_out_as_in_the_whole_file(tmp_path: Path) -> None:
    lines = delimited().decode().splitlines(keepends=True)
    for at in (1, 24, 25, 26, 50, 100):
        lines.insert(at, f'{at},"stray" quote\n' if at % 2 else f"{at},one,too many\n")
    file = TextFile(str(tmp_path / "bad.csv"), WANTED)
    Path(file.path).write_text("".join(lines), encoding="utf-8")
    bad = Quarantine(file.path, 0.5, tmp_path)
    parts = counted_parts(file, bad)
    assert bad.count == 6
    read = read_parts(parts, file, lambda part: BadRows(part.file, skips_damage=True))
    assert [row for _, windows in read for window in windows for row in window["text"].to_pylist()] == ROWS


def test_a_file_that_changed_is_refused(tmp_path: Path) -> None:
    for name in ("a.csv", "a.parquet", "a.csv.gz"):
        file = TextFile(str(tmp_path / name), WANTED)
        Path(file.path).write_bytes(FILES[name][0]())
        parts = counted_parts(file, BadRows(file.path))
        changed = [row.replace("5", "6") for row in ROWS]
        if name == "a.parquet":
            pq.write_table(pa.table({"text": changed}), file.path)
        else:
            content = delimited().replace(b'"5"', b'"6"').replace(b'""5""', b'""6""')
            Path(file.path).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        with refused("input-changed", name):
            texts_of(parts, file)


def test_a_file_that_changed_before_it_was_read_is_refused(tmp_path: Path) -> None:
    file = TextFile(str(tmp_path / "a.parquet"), WANTED)
    Path(file.path).write_bytes(parquet())
    parts = parts_of_files({file.path: version_of(file.path)}, keeps_damaged=False)
    pq.write_table(pa.table({"text": [*ROWS, "one more"]}), file.path)
    with refused("input-changed", file.path):
        texts_of(parts, file)


def test_a_large_row_group_is_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_parts, "_ROWS_OF_GROUPS", 60)
    for group_rows, rows_of_first, is_placed in ((50, (0, 50), True), (95, (0, 20), False)):
        path = str(tmp_path / f"{group_rows}.parquet")
        pq.write_table(pa.table({"text": ROWS}), path, row_group_size=group_rows)
        file = TextFile(path, WANTED)
        parts = counted_parts(file, BadRows(path))
        assert (parts[0].rows, parts[0].place is not None) == (rows_of_first, is_placed)
        assert [text for texts in texts_of(parts, file).values() for text in texts] == ROWS


def test_of_many_parquet_files_only_the_ends_are_read_and_row_groups_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_parts, "_ROWS_OF_GROUPS", 20)
    files = [str(tmp_path / name) for name in ("one.parquet", "two.parquet", "three.csv")]
    for file in files[:2]:
        Path(file).write_bytes(parquet())
    Path(files[2]).write_bytes(delimited())
    parts = parts_of_files({file: version_of(file) for file in files}, keeps_damaged=False)
    assert [part.rows for part in parts[:5]] == [(0, 21), (21, 42), (42, 63), (63, 84), (84, 95)]
    assert [part.rows for part in parts[10:]] == [None]
    found = texts_of(parts, TextFile(files[0], WANTED))
    assert [text for number in range(11) for text in found[number]] == ROWS * 3
    Path(files[1]).write_bytes(parquet()[:-9])
    with refused("rows-unreadable", files[1]):
        parts_of_files({file: version_of(file) for file in files}, keeps_damaged=False)

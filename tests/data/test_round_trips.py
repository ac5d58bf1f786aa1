"""Whatever texts a writer of the standard library or of Arrow puts into a file, the readers give back."""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indictune.data.bad_rows import BadRows
from indictune.data.read.read_files import read_records
from tests.data.tables import read_table

Table = Sequence[tuple[str, str]]

# Any character but halves of surrogate pairs, which no file can hold; those that formats give a meaning more often.
TEXT = st.text(st.one_of(st.sampled_from('",\n\r\t \\{}[]:\x00\x1a\x85\u2028\ufeff'), st.characters(codec="utf-8")))
TABLES = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=8)


def write_csv(path: Path, table: Table) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, "excel-tab" if path.suffix == ".tsv" else "excel")
        writer.writerows([("text", "label"), *table])


def write_jsonl(path: Path, table: Table) -> None:
    lines = [json.dumps({"text": text, "label": label}, ensure_ascii=len(text) % 2 == 0) for text, label in table]
    path.write_bytes("\n".join(lines).encode())


def write_json(path: Path, table: Table) -> None:
    rows = [{"text": text, "label": label} for text, label in table]
    path.write_bytes(json.dumps(rows, ensure_ascii=False, indent=len(rows) % 3).encode())


def write_parquet(path: Path, table: Table) -> None:
    texts, labels = zip(*table, strict=True)
    pq.write_table(pa.table({"text": pa.array(texts), "label": pa.array(labels)}), path)


WRITERS = {
    "t.csv": write_csv,
    "t.tsv": write_csv,
    "t.jsonl": write_jsonl,
    "t.json": write_json,
    "t.parquet": write_parquet,
}


@pytest.mark.more
@pytest.mark.parametrize(("name", "write"), WRITERS.items(), ids=WRITERS.keys())
def test_texts_come_back_as_they_were_written(name: str, write: Callable[[Path, Table], None]) -> None:
    @settings(max_examples=150, deadline=None)
    @given(TABLES)
    def check(table: Table) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            write(path, table)
            read = read_table(str(path), {"text": "text", "label": "label"})
        assert list(zip(read["text"].to_pylist(), read["label"].to_pylist(), strict=True)) == list(table)

    check()


@pytest.mark.parametrize("name", ["t.jsonl", "t.json", "t.parquet"])
def test_records_come_back_as_they_were_written(name: str) -> None:
    @settings(max_examples=100, deadline=None)
    @given(TABLES)
    def check(table: Table) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            WRITERS[name](path, table)
            read = list(read_records(str(path), BadRows(str(path))))
        assert [(record["text"], record["label"]) for _, record in read] == list(table)

    check()

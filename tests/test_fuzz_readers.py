"""The fuzzer of the readers counts what it read and finds a broken reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from indictune.data.read.read_files import read_batches
from tests import fuzz_readers
from tests.plain_readers import are_same, cells_of, plain_records, plain_rows


def test_the_fuzzer_counts_files_and_reports_the_one_that_broke_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = fuzz_readers.Outcomes()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert fuzz_readers.fuzz(tmp_path, 0.02, 0, 1.0, outcomes) is None
    files, as_datasets = fuzz_readers.counts_by_title(outcomes).values()
    assert files["count"] == as_datasets["count"] > 0
    for each in (files, as_datasets):
        assert sum(sum(counts.values()) for counts in each["by kind"].values()) == each["count"]
        assert sum(each["by outcome"].values()) == each["count"]
    monkeypatch.setattr(fuzz_readers, "stands_in", lambda *_: False)
    broken = fuzz_readers.fuzz(tmp_path, 1, 0, 0.0, outcomes)
    assert broken is not None
    assert "is not in the file" in broken


def without_first(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.slice(1)


def backwards(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.take(pa.array(range(batch.num_rows)[::-1]))


def shifted(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.rename_columns([{"text": "label", "label": "text"}.get(name, name) for name in batch.schema.names])


@pytest.mark.parametrize("wrong", [without_first, backwards, shifted])
def test_the_fuzzer_finds_missing_reordered_and_swapped_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> None:
    read = read_batches
    monkeypatch.setattr(fuzz_readers, "read_batches", lambda *given: map(wrong, read(*given)))
    broken = fuzz_readers.fuzz(tmp_path, 1, 0, 0.0, fuzz_readers.Outcomes())
    assert broken is not None
    assert "AssertionError: [(" in broken


@pytest.mark.parametrize("reader", ["read_batches", "read_records"])
def test_the_fuzzer_finds_a_row_dropped_without_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    read: Callable[..., Iterator[Any]] = getattr(fuzz_readers, reader)

    def dropping(*given: Any) -> list[Any]:
        found, is_bad = list(read(*given)), given[-1].count > 0
        if reader == "read_batches":
            return [*map(without_first, found)] if is_bad else found
        return found[is_bad:]

    monkeypatch.setattr(fuzz_readers, reader, dropping)
    broken = fuzz_readers.fuzz(tmp_path, 1, 0, 0.0, fuzz_readers.Outcomes())
    assert broken is not None
    assert " are bad, [" in broken


@pytest.mark.parametrize(
    ("name", "content", "rows", "number"),
    [
        ("a.csv", 'text,label\n"a\nb",x\n\nNA,y\n"c"d,z\ne\n', [("a\nb", "x", None), ("NA", "y", None)], 4),
        ("a.jsonl", '{"label": "x", "text": "a\\\\"}\n{"text": 1\n\n[]\n', [("a\\", "x", None)], 3),
        ("a.json", '{"data": [{"text": 1e5, "language": "hi"}, 3]}', [(1e5, None, "hi")], 2),
    ],
)
def test_the_plain_readers_read_each_cell(
    tmp_path: Path, name: str, content: str, rows: list[tuple[object, ...]], number: int
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert [cells for cells in map(cells_of, plain_records(tmp_path / name)) if cells] == rows
    assert len(plain_rows(tmp_path / name)) == number
    assert are_same([tuple("1e5" if cell == 1e5 else cell for cell in row) for row in rows], rows, is_all=True)
    assert not are_same(rows[1:], rows, is_all=True)
    assert are_same(rows[1:], rows, is_all=False)
    assert not are_same([*rows, *rows], rows, is_all=False)

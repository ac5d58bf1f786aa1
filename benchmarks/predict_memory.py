"""Peak memory of `indictune predict` over files of more and more rows, csv and parquet.

    OMP_NUM_THREADS=1 python -m benchmarks.predict_memory

Rows are three words of the built-in tweets and their number. The model is a BERT of one layer x 64, so that reading,
labelling and writing a million rows takes minutes. Each command runs in its own process.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from benchmarks.environment import environment, write_results
from benchmarks.predict import save_model
from benchmarks.preparation import watched_children, words
from indictune.console_text import table
from indictune.models.builtin import Size

KINDS = ("csv", "parquet")
_AT_ONCE = 50_000
_SCHEMA = pa.schema([("text", pa.string())])


def batches(number: int) -> Iterator[pa.RecordBatch]:
    """Short texts, no two of them equal."""
    draw, known = random.Random(0), words()
    for start in range(0, number, _AT_ONCE):
        rows = range(start, min(start + _AT_ONCE, number))
        texts = [f"{' '.join(draw.choices(known, k=3))} {row}" for row in rows]
        yield pa.record_batch([texts], schema=_SCHEMA)


def write_rows(path: Path, number: int) -> None:
    """Write a file of texts, of the kind that its extension says."""
    is_csv = path.suffix == ".csv"
    with pa.csv.CSVWriter(path, _SCHEMA) if is_csv else pq.ParquetWriter(path, _SCHEMA) as writer:
        for batch in batches(number):
            writer.write_batch(batch)


def measure(model: Path, folder: Path, kind: str, number: int) -> dict[str, Any]:
    """Seconds and peak memory of labelling a file of so many rows into one of the same kind."""
    rows, labels = folder / f"in.{kind}", folder / f"out.{kind}"
    write_rows(rows, number)
    command = [sys.executable, "-m", "indictune", "predict", str(model)]
    command += ["--input_file", str(rows), "--output_file", str(labels)]
    began = time.perf_counter()
    with watched_children() as peaks:
        subprocess.run(command, check=True)
    seconds = round(time.perf_counter() - began, 1)
    labels.unlink()
    return {"kind": kind, "rows": number, "seconds": seconds, "peak_bytes": max(peaks.values())}


def main() -> None:
    """Measure, print a table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    asked = parser.parse_args()
    about = environment()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        save_model(model, Size(hidden_size=64, num_layers=1))
        found = [measure(model, Path(folder), kind, number) for kind in KINDS for number in asked.rows]
    body = [
        [run["kind"], f"{run['rows']:,}", f"{run['seconds']:,.0f}", f"{run['peak_bytes'] / 1e6:,.0f}"] for run in found
    ]
    print(table(["file", "rows", "seconds", "peak MB"], body))
    print(write_results("predict-memory", {"environment": about, "runs": found}))


if __name__ == "__main__":
    main()

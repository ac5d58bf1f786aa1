"""Read the files of tests/faults/test_bad_data.py by `datasets.load_dataset`, and count what comes out, as JSON.

python benchmarks/stock_loading.py FOLDER
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets

from tests.faults.test_bad_data import LEFT_OUT, READ_EXACTLY, REFUSED, UNUSABLE

KINDS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def read(folder: Path, name: str, content: bytes) -> list[tuple[str | None, str | None]] | None:
    """Texts and labels as words; None where it is refused, or has no such columns."""
    folder.mkdir(parents=True)
    path = folder / name
    path.write_bytes(content)
    more: dict[str, Any] = {"sep": "\t"} if path.suffix == ".tsv" else {}
    try:
        rows = datasets.load_dataset(
            KINDS[path.suffix], data_files=str(path), split="train", cache_dir=str(folder / "cache"), **more
        )
        return [(_word(row["text"]), _word(row["label"])) for row in rows]
    except Exception:  # whatever it raises, it has refused the file
        return None


def _word(value: Any) -> str | None:
    """As a file would have it: nobody has to keep `true` from `True`."""
    return None if value is None else str(value).lower()


def main(work: Path) -> None:
    """Print the counts."""
    datasets.disable_progress_bars()
    logging.disable(logging.CRITICAL)
    good = Counter[str]()
    for number, (name, content, rows) in enumerate(READ_EXACTLY.values()):
        found = read(work / f"good-{number}", name, content)
        expected = [tuple(None if word is None else word.lower() for word in row) for row in rows]
        good["refused" if found is None else "as they stand" if found == expected else "changed in silence"] += 1
    bad = refused(work / "bad", [(name, content) for name, content, _ in [*REFUSED.values(), *LEFT_OUT.values()]])
    unlabelled = refused(work / "unlabelled", [(name, content) for name, content, _ in UNUSABLE.values()])
    print(json.dumps({"good files": good, "bad files": bad, "rows without a label": unlabelled}))


def refused(folder: Path, files: list[tuple[str, bytes]]) -> Counter[str]:
    """How many files are refused, of those whose kind it can be told."""
    found = Counter[str]()
    for number, (name, content) in enumerate(files):
        if Path(name).suffix in KINDS:
            rows = read(folder / str(number), name, content)
            found["refused" if rows is None else "loaded without an error"] += 1
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))

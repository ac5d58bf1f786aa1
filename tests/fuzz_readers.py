"""Mutate valid files and read them: either a message to the user comes out, or the rows that the standard library or
Arrow reads, in order and by column, all but those that are complained about, each of which is counted. A folder with
the file, given as a dataset, gives the same, and the same lines.

python -m tests.fuzz_readers --minutes 10 --results

writes to `benchmarks/results` how many files of each kind were read, how that went, how it went with those of them
that were read as datasets too, and what broke a reader, which ends it. `not compared` are those that the others do not
read, or with other delimiters, names and classes, or as one row from a stray quote on. `not counted` are those whose
bad rows the others divide otherwise. A file that hangs one kills it.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.environment import environment, write_results
from indictune.data.bad_rows import BadRows, Quarantine, Record
from indictune.data.columns import Wanted
from indictune.data.read.hub_datasets import load_hub_dataset
from indictune.data.read.read_files import RECORD_EXTENSIONS, read_batches, read_records
from indictune.errors import UserError
from tests.data.test_round_trips import WRITERS
from tests.plain_readers import Unreadable, are_same, cells_of, may_end_elsewhere, plain_rows

HANG_S = 20
# Of the files, how many are read as datasets too: these take a hundred times as long.
DATASETS = 0.03
WANTED = Wanted({"text": "text", "label": "label"}, {"language": "language"})
CLASSES = ["negative", "positive"]
TABLE = [('a, "b"\nक', "x"), ("", "1e5"), ("NA", "null"), ("😀 \\u0041", "-1"), ("c\td", "y")] * 3
PIECES = [
    *(b'"', b'""', b",", b"\t", b"\n", b"\r", b"\r\n", b"\x00", b"\xff", b"\xef\xbb\xbf", b"{", b"}", b"[", b"]"),
    *(b":", b"\\", b"\\u", b"\\ud83d", b"null", b"NaN", b"1e999", b"-", b"[" * 2000, b'{"text":', b'"data"', b"PAR1"),
    *(b"5", b"1e5", b"true", b"NA", b"language", b"text", b'{"a": 1}', b'["b"]', b'"language": "hi", '),
]  # fmt: skip


def seeds(folder: Path) -> dict[str, bytes]:
    """Valid files by name."""
    made = {}
    for name, write in WRITERS.items():
        write(folder / name, TABLE)
        made[name] = (folder / name).read_bytes()
    rows = [{"text": text, "label": label} for text, label in TABLE]
    plain = [{"text": f"{text} क{index}", "label": "x"} for index, text in enumerate(["a", "NA", "1e5", "[,]"] * 3)]
    lines = [json.dumps(row, ensure_ascii=False) for row in plain]
    made["plain.jsonl"], made["plain.json"] = "\n".join(lines).encode(), f"[{', '.join(lines)}]".encode()
    made["data.json"] = json.dumps({"version": 1, "data": rows}).encode()
    pq.write_table(pa.Table.from_pylist(rows), folder / "p.parquet", compression="none", use_dictionary=False)
    made["p.parquet"] = (folder / "p.parquet").read_bytes()
    odd = ['{"text": 1e5, "label": 2.10, "language": "hi"}', '{"text": "c", "label": true}', '{"text": "2026-01-02"}']
    made["odd.jsonl"] = "\n".join([*lines, *odd]).encode()
    made["lines.json"] = made["odd.jsonl"]
    made["languages.csv"] = "".join(f"{cell},x,hi\n" for cell in ("text,label,language\na", '"b,\n"', "NA")).encode()
    kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=CLASSES)}
    ids = pa.table({"text": [f"{text} क" for text, _ in TABLE], "label": [0, 1, 1] * 4 + [0, 7, -1]})
    ids = ids.replace_schema_metadata(datasets.Features(kinds).arrow_schema.metadata)
    pq.write_table(ids, folder / "ids.parquet", compression="none", use_dictionary=False)
    made["ids.parquet"] = (folder / "ids.parquet").read_bytes()
    names = ["text", "label", "language", "language"]
    twice = pa.Table.from_arrays([pa.array(["a", "b"]), *[pa.array(["x", "y"])] * 3], names=names)
    pq.write_table(twice, folder / "twice.parquet", compression="none", use_dictionary=False)
    made["twice.parquet"] = (folder / "twice.parquet").read_bytes()
    return made


def mutated(content: bytes, chance: random.Random) -> bytes:
    """The file with one to four changes."""
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(content) + 1)
        end = min(len(content), at + chance.choice([0, 1, 1, 2, 8, 64]))
        change = chance.randrange(5)
        if change == 0:
            content = content[:at] + chance.choice(PIECES) + content[end:]
        elif change == 1:
            content = content[:at] + chance.randbytes(end - at) + content[end:]
        elif change == 2:
            content = content[:at] + content[end:]
        elif change == 3:
            content = content[:end] + content[at:]
        elif at < len(content):
            content = content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]
    return content


def stands_in(text: str, content: bytes) -> bool:
    """Whether a text is written in a file, as it is or with doubled quotes."""
    return any(part.encode() in content for part in (text, text.replace('"', '""')))


@dataclass(frozen=True)
class Outcomes:
    """How it went, by kind of file.

    Attributes:
        files: of each file, once.
        as_datasets: of those of them that were read as datasets too.
    """

    files: Counter[str] = field(default_factory=Counter)
    as_datasets: Counter[str] = field(default_factory=Counter)


Read = TypeVar("Read")
Cells = tuple[str, str, str, int]


def unless_refused(read: Callable[[], Read]) -> Read | None:
    """What is read, or None where a message to the user comes out."""
    try:
        return read()
    except UserError:
        return None


def rows_of_file(path: Path, bad: BadRows) -> list[Cells]:
    """Text, label, language and line of each row; without a bad one where any of these stops the run."""
    return cells(list(read_batches(str(path), WANTED, bad)), bad)


def rows_of_dataset(folder: Path, bad: BadRows) -> list[Cells]:
    """As above, of the training rows of a dataset."""
    rows = load_hub_dataset(str(folder), None)["train"]
    return cells(list(rows.batches(WANTED, bad)), bad)


def records_of_file(path: Path) -> list[Record]:
    """Its rows as JSON has them, with their lines, where none is bad."""
    bad = BadRows("")
    records = list(read_records(str(path), bad))
    bad.finish(0)
    return records


def records_of_dataset(folder: Path) -> list[Record]:
    """As above, of the training rows of a dataset."""
    bad = BadRows("")
    records = list(load_hub_dataset(str(folder), None)["train"].records(bad))
    bad.finish(0)
    return records


def cells(batches: list[pa.RecordBatch], bad: BadRows) -> list[Cells]:
    rows = [row for batch in batches for row in batch.to_pylist()]
    bad.finish(len(rows))
    return [(row["text"], row["label"], row["language"], row["line"]) for row in rows]


def check(path: Path, folder: Path) -> str:
    """Read a file in all ways; returns how it went.

    Raises:
        AssertionError: something came out that does not stand in the file, or not there.
    """
    outcome = "refused"
    plain = None if path.name == "ids.parquet" else plain_or_none(path)  # it declares names of classes
    is_damaged = False
    for quarantine in (False, True):
        bad = Quarantine(str(path), 0.5, folder) if quarantine else BadRows(str(path))
        rows = unless_refused(functools.partial(rows_of_file, path, bad))
        is_damaged |= bool(bad.problems)
        if rows is None:
            continue
        texts = [row[:3] for row in rows]
        outcome = "left out" if bad.count else "read"
        assert_stand_in(path, {cell for row in texts for cell in row if cell})
        has_other_form = bool(bad.remarks)  # such as another delimiter
        if plain is None or is_damaged or has_other_form:
            outcome += ", not compared"
        else:
            expected = [cells for cells in map(cells_of, plain) if cells is not None]
            assert are_same(texts, expected, is_all=not bad.count), f"{texts} but {expected}"
            if bad.count and may_end_elsewhere(path):
                outcome += ", not counted"
            else:
                assert len(plain) == len(texts) + bad.count, f"{bad.count} are bad, {texts} are read of {plain}"
    if path.suffix in RECORD_EXTENSIONS:
        bad = Quarantine(str(path), 0.5, folder)
        records = unless_refused(lambda: [record for _, record in read_records(str(path), bad)])
        if records is not None and plain is not None:
            readable = [record for record in plain if record is not Unreadable]
            assert are_same(records, readable, is_all=not bad.count), f"{records} but {readable}"
            assert len(plain) == len(records) + bad.count, f"{bad.count} are bad, {records} are read of {plain}"
    return outcome


def plain_or_none(path: Path) -> list[Any] | None:
    """What the others read; None where they cannot."""
    try:
        return plain_rows(path)
    except (ValueError, KeyError, TypeError, OSError, RecursionError, OverflowError, pa.ArrowException):
        return None


def assert_stand_in(path: Path, texts: set[str]) -> None:
    content = path.read_bytes()
    # Arrow's compressed pages do not show texts, nor its schema names of classes, and JSON writes them with escapes.
    if path.name in ("t.parquet", "ids.parquet") or (path.suffix in RECORD_EXTENSIONS[:2] and b"\\" in content):
        return
    for text in texts:
        assert stands_in(text, content), f"{text!r} is not in the file"


def is_number(text: str) -> bool:
    return text.lstrip("-").isdigit()


def check_dataset(path: Path, folder: Path) -> str:
    """Read a file by its name and as a dataset; returns how it went.

    Raises:
        AssertionError: not the same comes out.
    """
    dataset = folder / "set"
    shutil.rmtree(dataset, ignore_errors=True)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    dataset.mkdir()
    shutil.copy(path, dataset / f"train{path.suffix}")
    outcome = "refused"
    for quarantine in (False, True):
        bads = [Quarantine("set", 0.5, folder) if quarantine else BadRows("set") for _ in range(2)]
        by_file = unless_refused(functools.partial(rows_of_file, path, bads[0]))
        by_name = unless_refused(functools.partial(rows_of_dataset, dataset, bads[1]))
        if by_name is not None:
            outcome = "read"
        if path.suffix == ".parquet":  # `datasets` itself refuses more
            labels = {label for _, label, *_ in by_name or []}
            if path.name == "ids.parquet" and any(label and not is_number(label) for label in labels):
                by_file = None  # a dataset gives the names of classes, which may be broken too
            assert by_name is None or by_file is None or by_name == by_file, f"{by_name} but {by_file}"
        else:
            assert by_name == by_file, f"{by_name} but {by_file}"
    if path.suffix in RECORD_EXTENSIONS:
        records = unless_refused(functools.partial(records_of_file, path))
        named = unless_refused(lambda: records_of_dataset(dataset))
        assert named is None or records is None or path.name == "ids.parquet" or named == records
    return outcome


def fuzz(folder: Path, minutes: float, seed: int, share_of_datasets: float, outcomes: Outcomes) -> str | None:
    """Read mutated files for so many minutes, and count how it went; returns what broke a reader."""
    chance = random.Random(seed)
    ends = time.monotonic() + 60 * minutes
    valid = seeds(folder)
    try:
        while time.monotonic() < ends:
            kind = chance.choice(list(valid))
            path = folder / kind
            path.write_bytes(mutated(valid[kind], chance))
            signal.alarm(HANG_S)
            outcomes.files[f"{kind} {check(path, folder)}"] += 1
            if chance.random() < share_of_datasets:
                outcomes.as_datasets[f"{kind} {check_dataset(path, folder)}"] += 1
    except Exception:  # whatever a reader does with a file
        return f"{kind}, {path.read_bytes()!r}: {traceback.format_exc()}"
    finally:
        signal.alarm(0)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--datasets", type=float, default=DATASETS)
    parser.add_argument("--results", action="store_true", help="write them to benchmarks/results")
    args = parser.parse_args()
    outcomes = Outcomes()
    folder = Path(tempfile.mkdtemp())  # it stays where a file breaks a reader
    print(f"Files are in {folder}")
    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    broken = fuzz(folder, args.minutes, args.seed, args.datasets, outcomes)
    found = counts_by_title(outcomes)
    for title, counted in found.items():
        print(f"{title}: {counted['count']:,}")
        for kind, counts in {"all": counted["by outcome"], **counted["by kind"]}.items():
            print(f"  {kind}: {', '.join(f'{count:,} {how}' for how, count in counts.items())}")
    if args.results:
        about = {"environment": environment(), "minutes": args.minutes, "seed": args.seed}
        print(write_results("fuzz-readers", {**about, **found, "broke a reader": broken}))
    if broken is not None:
        raise SystemExit(broken)
    shutil.rmtree(folder)


def counts_by_title(outcomes: Outcomes) -> dict[str, Any]:
    """How many files there were, how many of them were datasets too, and how each kind went."""
    counters = {"files": outcomes.files, "of them as datasets too": outcomes.as_datasets}
    return {
        title: {"count": counter.total(), "by outcome": by_outcome(counter), "by kind": sorted_by_kind(counter)}
        for title, counter in counters.items()
    }


def by_outcome(outcomes: Counter[str]) -> dict[str, int]:
    """How often any of them went how."""
    found = Counter[str]()
    for outcome, count in sorted(outcomes.items()):
        found[outcome.partition(" ")[2]] += count
    return dict(found)


def sorted_by_kind(outcomes: Counter[str]) -> dict[str, dict[str, int]]:
    """How often each went how."""
    found: dict[str, dict[str, int]] = {}
    for outcome, count in sorted(outcomes.items()):
        kind, _, how = outcome.partition(" ")
        found.setdefault(kind, {})[how] = count
    return found


if __name__ == "__main__":
    main()

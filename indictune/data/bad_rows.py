"""Bad rows stop the run, or are left out and written down with the reason."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from indictune.config.shared_arguments import BadRowArguments
from indictune.errors import Problem, Problems, problem
from indictune.files import kind_of_file

# What readers yield: rows of text columns and `line`; or of a json object or its like, with its line.
Batches = Iterator[pa.RecordBatch]
Record = tuple[int, dict[str, object]]

REJECTED = "rejected.jsonl"

# In a split of several files, a row's number is its line plus this many times the file's number, from 1.
LINES_PER_FILE = 1 << 32

_MAX_LISTED = 5  # of a kind
_MAX_SHOWN = 3  # of rows that are left out
_MAX_LISTED_OF_ALL = 10
_WITHOUT_LINES = ("", ".parquet", ".arrow", ".xlsx", ".ods")


def row_location(source: str, line: int, files: Sequence[str] = ()) -> str:
    """Where a row stands: `path:line`, as editors open it, or `source row number` in others.

    If the split has several `files`, `line` includes the file's number times `LINES_PER_FILE`.
    """
    file, line = file_and_line(source, line, files)
    return f"{file} row {line}" if kind_of_file(file) in _WITHOUT_LINES else f"{file}:{line}"


def file_and_line(source: str, line: int, files: Sequence[str]) -> tuple[str, int]:
    """The file of a row, and its line there."""
    number, line = divmod(line, LINES_PER_FILE)
    return files[number - 1] if number else source, line


class BadRows:
    """Count the bad rows of one file or split, and keep the first few of each kind. Any of them stops the run.

    Attributes:
        skips_damage: whether lines that a stray quote damages are bad rows, and the rows after them are read.
        problems: of the file as a whole. They stop the run in any case.
        files: of the split so far, if it has several. A line below `LINES_PER_FILE` is one of the last file.
    """

    def __init__(self, source: str, skips_damage: bool = False) -> None:
        self.source = source
        self.skips_damage = skips_damage
        self.problems = Problems()
        self.count = 0
        self.files: list[str] = []
        self.remarks: list[str] = []
        self._counts: Counter[str] = Counter()
        self._first: list[Problem] = []

    def add(self, line: int, code: str, read: object, **details: Any) -> None:
        """Add a row that cannot be used, by its first line and the code of its problem.

        `read` is its content, in a form that json can hold.
        """
        self.count += 1
        self._counts[code] += 1
        if self._counts[code] <= _MAX_LISTED and len(self._first) < _MAX_LISTED_OF_ALL:
            self._first.append(problem(code, "", self.location(line), **details))

    def stop(self, line: int, code: str, **details: Any) -> None:
        """Add a break of the file after which nobody knows where the next row begins."""
        self.problems.append(problem(code, "", self.location(line), **details))

    def remark(self, sentence: str) -> None:
        """Add a sentence for the user about how the file is read."""
        if sentence not in self.remarks:
            self.remarks.append(sentence)

    def notes(self) -> list[str]:
        """Sentences for the user: the remarks, and how many rows were left out. They quote no row."""
        return [*self.remarks]

    def left_out(self, reasons: bool = True) -> str:
        """A sentence for the user: how many rows were left out, and the first ones with `reasons`, or their codes.

        Reasons may quote a row.
        """
        some = self._first[:_MAX_SHOWN]
        shown = (str(replace(each, way_out="")) if reasons else f"{each.value} [{each.code}]" for each in some)
        first = (" " if reasons else ", ").join(shown)
        return f"{self.source}: {self.count:,} bad rows were left out, first {first}"

    def location(self, line: int) -> str:
        """Where a row stands, as `row_location` writes it."""
        return row_location(self.source, self._line_of_split(line), self.files)

    def finish(self, good: int) -> None:
        """Raise `UserError` for the bad rows once all rows were read, of which `good` are usable."""
        unlisted = self._counts - Counter(each.code for each in self._first)
        more = (problem("more-bad-rows", value=self.source, count=unlisted[code], like=code) for code in unlisted)
        Problems(dict.fromkeys([*self._first, *more, *self.problems])).raise_any()

    def _line_of_split(self, line: int) -> int:
        return line if line >= LINES_PER_FILE else line + len(self.files) * LINES_PER_FILE


class Quarantine(BadRows):
    """Leave the bad rows of one file or split out as long as their share is not above `max_fraction`, below 1.

    `folder` gets them. They go to disk at once, because a file may have millions.
    """

    def __init__(self, source: str, max_fraction: float, folder: Path) -> None:
        super().__init__(source, skips_damage=True)
        self.max_fraction = max_fraction
        self._path = folder / REJECTED
        self._entries = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed with this object)

    def add(self, line: int, code: str, read: object, **details: Any) -> None:
        super().add(line, code, read, **details)
        found = problem(code, "", self.location(line), **details)
        reason = str(found).removeprefix(f"{found.value}: ")
        file, line = file_and_line(self.source, self._line_of_split(line), self.files)
        entry = {"file": file, "line": line, "reason": reason, "read": read}
        text = json.dumps(entry, ensure_ascii=False, default=str)
        self._entries.write(f"{text}\n".encode(errors="backslashreplace"))  # half of a surrogate pair is no UTF-8

    def finish(self, good: int) -> None:
        self.problems.raise_any()
        bad, rows = self.count, good + self.count
        if bad and bad / rows > self.max_fraction:
            self.problems += self._first[:_MAX_LISTED]
            counts: dict[str, Any] = {"bad": bad, "rows": rows, "share": bad / rows, "allowed": self.max_fraction}
            self.problems.append(problem("too-many-bad-rows", value=self.source, **counts))
            self.problems.raise_any()
        if bad:
            self._entries.seek(0)
            with self._path.open("ab") as file:
                shutil.copyfileobj(self._entries, file)

    def notes(self) -> list[str]:
        return [*super().notes(), *([self.left_out(reasons=False)] if self.count else [])]


def numbered_files(files: Sequence[str], bad: BadRows) -> Iterator[tuple[str, int]]:
    """Each file of a split, with the number to add to its lines. `bad` gets them if there are several."""
    for file in files:
        if len(files) > 1:
            bad.files.append(file)
        yield file, len(bad.files) * LINES_PER_FILE


def bad_rows(source: str, args: BadRowArguments, folder: Path) -> BadRows:
    """A collector of bad rows as `--bad_rows` asks for; `folder` gets the rows that are left out."""
    if args.bad_rows == "quarantine":
        return Quarantine(source, args.max_bad_fraction, folder)
    return BadRows(source)


def keep_rejected(prepared: Path, output_dir: Path, rank: int) -> None:
    """On rank 0, copy the rejected rows of the prepared ones to the output, and say so. Those of an earlier run go."""
    if rank == 0:
        (output_dir / REJECTED).unlink(missing_ok=True)
        copy_rejected(prepared, output_dir)
        if (output_dir / REJECTED).exists():
            print(f"Rows that were left out, with reasons: {output_dir / REJECTED}", file=sys.stderr)


def copy_rejected(prepared: Path, folder: Path) -> None:
    """Copy the rejected rows, if there are any, to another folder."""
    if (prepared / REJECTED).exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(prepared / REJECTED, folder / REJECTED)

"""Rows that cannot be used: they stop the run, or are left out and written down with the reason."""

from __future__ import annotations

import json
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from indictune.errors import Problems

if TYPE_CHECKING:
    from indictune.config.arguments import BadRowArguments  # which is slow to import

TEXT_EXTENSIONS = (".csv", ".tsv", ".json", ".jsonl")
REJECTED = "rejected.jsonl"

# The rows of several files have one number each: their line, and so many more for each file before theirs.
LINES_OF_A_FILE = 1 << 32

_MAX_LISTED = 5
_BROKEN = "broken lines"
_HAVE_LINES = (*TEXT_EXTENSIONS, ".ndjson")


def place(source: str, line: int, files: Sequence[str] = ()) -> str:
    """Where a row stands: `path:line`, as editors open it, or `source row line` for what has no lines to open.

    Args:
        source: the file or split.
        line: of the row.
        files: of the split, where its rows are lines of files; `line` tells which of them, by `LINES_OF_A_FILE`.
    """
    file, line = _file_and_line(source, line, files)
    return f"{file}:{line}" if Path(file).suffix.lower() in _HAVE_LINES else f"{file} row {line}"


def _file_and_line(source: str, line: int, files: Sequence[str]) -> tuple[str, int]:
    number, line = divmod(line, LINES_OF_A_FILE)
    return files[number] if files else source, line


class _FirstFew:
    """Messages about rows: the first few of each kind, and the number of the others."""

    def __init__(self) -> None:
        self._listed: dict[str, list[str]] = {}
        self._more: Counter[str] = Counter()

    def add(self, kind: str, message: Callable[[], str]) -> None:
        """One more, with `kind` as in "3 more with <kind>"; the message is made where it is among the first."""
        listed = self._listed.setdefault(kind, [])
        if len(listed) < _MAX_LISTED:
            listed.append(message())
        else:
            self._more[kind] += 1

    def messages(self, source: str) -> list[str]:
        """All of them, where those of rows that are only counted name the source."""
        messages = []
        for kind, listed in self._listed.items():
            messages += listed
            if kind in self._more:
                messages.append(f"{source}: {self._more[kind]:,} more with {kind}.")
        return messages


class BadRows:
    """The bad rows of one file or split, any of which stops the run: counted, and the first few kept.

    Attributes:
        source: as messages name it.
        problems: of the file as a whole, and its broken lines. What is in it stops the run in any case.
        count: of the bad rows.
        files: of the split, where its rows are lines of files; who reads them sets it.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems = Problems()
        self.count = 0
        self.files: Sequence[str] = ()
        self._before = 0
        self._listed = _FirstFew()
        self._remarks = _FirstFew()

    def add_broken(self, line: int, reason: str, read: object) -> None:
        """A row that cannot be read.

        Args:
            line: on which it begins, from 1; for parquet and datasets the number of the row.
            reason: what is wrong, and what to do.
            read: what stands there, as json can hold it.

        Raises:
            UserError: it is the fifth: a file of another kind would have millions.
        """
        self.count += 1
        self.cannot_read(line, reason)

    def add(self, line: int, reason: str, read: object, kind: str) -> None:
        """A row that was read and cannot be used: as `add_broken`, with `kind` as in "3 more with <kind>"."""
        self.count += 1
        self._listed.add(kind, lambda: f"{self.place(line)}: {reason}")

    def cannot_read(self, line: int, reason: str) -> None:
        """The file is broken here in a way that leaves open where the next row begins, or how much is lost.

        Raises:
            UserError: it is the fifth such place.
        """
        self.problems.append(f"{self.place(line)}: {reason}")
        if len(self.problems) == _MAX_LISTED:
            file, _ = self._file_and_line(line)
            self.problems.append(f"{file}: {_MAX_LISTED} {_BROKEN} found; the lines after them were not read.")
            self.problems.raise_any()

    def remark(self, line: int, what: str, kind: str) -> None:
        """A good row that the user should look at, with `kind` as in "3 more with <kind>"."""
        self._remarks.add(kind, lambda: f"{self.place(line)}: {what}")

    def notes(self) -> list[str]:
        """What the user should know of the rows, in a sentence each."""
        return self._remarks.messages(self.source)

    def place(self, line: int) -> str:
        """Where a row stands, as `place` tells it."""
        return place(self.source, self._before + line, self.files)

    @contextmanager
    def reading(self, number: int) -> Iterator[None]:
        """A block in which lines are those of one of `files`, by its number from 0."""
        self._before = number * LINES_OF_A_FILE
        try:
            yield
        finally:
            self._before = 0

    def _file_and_line(self, line: int) -> tuple[str, int]:
        return _file_and_line(self.source, self._before + line, self.files)

    def finish(self, good: int) -> None:
        """All rows were read, of which `good` can be used.

        Raises:
            UserError: all problems.
        """
        self.problems += self._listed.messages(self.source)
        self.problems.raise_any()


class Quarantine(BadRows):
    """The bad rows of one file or split, which are left out as long as they are few.

    Args:
        source: as messages name it.
        max_fraction: of all rows that may be bad, from 0 up to, not including, 1.
        folder: gets them; they are on disk at once, because a file may have millions.
        before: how many were left out already, of those that count.
    """

    def __init__(self, source: str, max_fraction: float, folder: Path, before: int = 0) -> None:
        super().__init__(source)
        self.max_fraction = max_fraction
        self._before_these = before
        self._path = folder / REJECTED
        self._entries = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (goes with this object)
        self._lines = array("q")
        self._first: list[str] = []

    def add_broken(self, line: int, reason: str, read: object) -> None:
        self.add(line, reason, read, _BROKEN)

    def add(self, line: int, reason: str, read: object, kind: str) -> None:
        self.count += 1
        if len(self._first) < _MAX_LISTED:
            self._first.append(f"{self.place(line)}: {reason}")
        self._lines.append(self._before + line)
        file, line = self._file_and_line(line)
        self._entries.write(_entry({"file": file, "line": line, "reason": reason, "read": read}))

    def finish(self, good: int) -> None:
        self.problems.raise_any()
        count = self._before_these + self.count
        rows = good + count
        if self.count and count / rows > self.max_fraction:
            self.problems += self._first
            self.problems.append(
                f"{self.source}: {count:,} of {rows:,} rows ({count / rows:.2%}) cannot be used, which is "
                f"more than --max_bad_fraction {self.max_fraction}; the first are above. Mend the file, or allow "
                f"more: with more, `indictune prepare` trains nothing and writes all of them to {REJECTED}."
            )
            self.problems.raise_any()
        self._entries.seek(0)
        entries = sorted(zip(self._lines, self._entries, strict=True), key=lambda pair: pair[0])
        if entries:
            with self._path.open("ab") as file:
                file.writelines(entry for _, entry in entries)

    def notes(self) -> list[str]:
        """What the user should know of the rows, in a sentence each."""
        if not self.count:
            return super().notes()
        bad = "more bad rows" if self._before_these else "bad rows"
        left_out = f"{self.source}: {self.count:,} {bad} were left out; {REJECTED} has them, with reasons."
        return [*super().notes(), left_out]


def bad_rows(source: str, args: BadRowArguments, folder: Path) -> BadRows:
    """What becomes of the bad rows of a source, as `--bad_rows` says; `folder` gets those that are left out."""
    if args.bad_rows == "quarantine":
        return Quarantine(source, args.max_bad_fraction, folder)
    return BadRows(source)


def keep_rejected(prepared: Path, output_dir: Path, rank: int) -> None:
    """Put the rows that were left out beside the model, on rank 0. A file of an earlier run goes away.

    Args:
        prepared: folder of the prepared rows.
        output_dir: of the run.
        rank: of this process.
    """
    if rank != 0:
        return
    if (prepared / REJECTED).exists():
        output_dir.mkdir(parents=True, exist_ok=True)
        go_on_with(prepared, output_dir)
    else:
        (output_dir / REJECTED).unlink(missing_ok=True)


def go_on_with(prepared: Path, folder: Path) -> None:
    """Copy the rows that were left out before, where there are some, to a folder that gets those found later."""
    if (prepared / REJECTED).exists():
        shutil.copyfile(prepared / REJECTED, folder / REJECTED)


def _entry(entry: dict[str, object]) -> bytes:
    """A line of json. Half of a surrogate pair, or a byte that is no UTF-8, stays what it is as an escape."""
    try:
        return f"{json.dumps(entry, ensure_ascii=False, default=str)}\n".encode()
    except UnicodeEncodeError:
        return f"{json.dumps(entry, default=str)}\n".encode()

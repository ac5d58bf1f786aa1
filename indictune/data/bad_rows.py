"""Bad rows stop the run, or are left out and written down with the reason."""

from __future__ import annotations

import json
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from indictune.errors import Problem, Problems, problem

if TYPE_CHECKING:
    from indictune.config.arguments import BadRowArguments  # slow to import

TEXT_EXTENSIONS = (".csv", ".tsv", ".json", ".jsonl")
REJECTED = "rejected.jsonl"

# In a split of several files, a row's number is its line plus this many for each earlier file.
LINES_PER_FILE = 1 << 32

_MAX_LISTED = 5
_HAVE_LINES = (*TEXT_EXTENSIONS, ".ndjson")

Each = TypeVar("Each")


def row_location(source: str, line: int, files: Sequence[str] = ()) -> str:
    """Where a row stands: `path:line`, as editors open it, or `source row number` in parquet files and datasets.

    Args:
        source: the file or split.
        line: of the row.
        files: of the split, if it has several; `line` then includes the file's number times `LINES_PER_FILE`.
    """
    file, line = _file_and_line(source, line, files)
    return f"{file}:{line}" if Path(file).suffix.lower() in _HAVE_LINES else f"{file} row {line}"


def _file_and_line(source: str, line: int, files: Sequence[str]) -> tuple[str, int]:
    number, line = divmod(line, LINES_PER_FILE)
    return files[number] if files else source, line


class _FirstFew(Generic[Each]):
    """The first few items of each kind, and the number of the others."""

    def __init__(self) -> None:
        self._listed: dict[str, list[Each]] = {}
        self._more: Counter[str] = Counter()

    def add(self, kind: str, make: Callable[[], Each]) -> None:
        """Count one more; `make` is called for the first few only."""
        listed = self._listed.setdefault(kind, [])
        if len(listed) < _MAX_LISTED:
            listed.append(make())
        else:
            self._more[kind] += 1

    def all(self, more: Callable[[str, int], Each]) -> list[Each]:
        """The items kind by kind; `more` makes an item of a kind and the number of the others."""
        items = []
        for kind, listed in self._listed.items():
            items += listed
            if kind in self._more:
                items.append(more(kind, self._more[kind]))
        return items


class BadRows:
    """Count the bad rows of one file or split, and keep the first few. Any of them stops the run.

    Attributes:
        source: the file or split, as messages name it.
        problems: of the file as a whole, and of its broken lines. They stop the run in any case.
        count: number of bad rows.
        files: of the split, if it has several; the reader sets it.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems = Problems()
        self.count = 0
        self.files: Sequence[str] = ()
        self._offset = 0
        self._listed = _FirstFew[Problem]()
        self._remarks = _FirstFew[str]()

    def add_broken(self, line: int, code: str, read: object, **details: Any) -> None:
        """Add a row that cannot be read.

        Args:
            line: on which it begins, from 1; the row's number in parquet files and datasets.
            code: of the problem, as in `errors.toml`.
            read: the content, in a form that json can hold.
            details: of the problem.

        Raises:
            UserError: it is the fifth. A file of another kind would have millions.
        """
        self.count += 1
        self.cannot_read(line, code, **details)

    def add(self, line: int, code: str, read: object, **details: Any) -> None:
        """Add a row that was read and cannot be used; arguments as of `add_broken`."""
        self.count += 1
        self._listed.add(code, lambda: self._problem(line, code, details))

    def cannot_read(self, line: int, code: str, **details: Any) -> None:
        """Add a break of the file after which nobody knows where the next row begins.

        Raises:
            UserError: it is the fifth.
        """
        self.problems.append(self._problem(line, code, details))
        if len(self.problems) == _MAX_LISTED:
            file, _ = self._file_and_line(line)
            self.problems.append(problem("broken-lines", value=file, count=_MAX_LISTED))
            self.problems.raise_any()

    def remark(self, line: int, what: str, kind: str) -> None:
        """Note a good row that the user should look at; `kind` ends the sentence "3 more with <kind>"."""
        self._remarks.add(kind, lambda: f"{self.location(line)}: {what}")

    def notes(self) -> list[str]:
        """Sentences for the user."""
        return self._remarks.all(lambda kind, count: f"{self.source}: {count:,} more with {kind}.")

    def location(self, line: int) -> str:
        """Where a row stands, as `row_location` writes it."""
        return row_location(self.source, self._offset + line, self.files)

    @contextmanager
    def reading(self, number: int) -> Iterator[None]:
        """Take lines in the block as lines of one of `files`, given by its number from 0."""
        self._offset = number * LINES_PER_FILE
        try:
            yield
        finally:
            self._offset = 0

    def finish(self, good: int) -> None:
        """Check the bad rows once all rows were read.

        Args:
            good: number of usable rows.

        Raises:
            UserError: all problems.
        """
        self.problems += self._listed.all(
            lambda code, count: problem("more-bad-rows", value=self.source, count=count, like=code)
        )
        self.problems.raise_any()

    def _problem(self, line: int, code: str, details: dict[str, Any]) -> Problem:
        return Problem(code, "", self.location(line), details=details)

    def _file_and_line(self, line: int) -> tuple[str, int]:
        return _file_and_line(self.source, self._offset + line, self.files)


class Quarantine(BadRows):
    """Leave the bad rows of one file or split out as long as they are few.

    Args:
        source: as messages name it.
        max_fraction: share of bad rows that is allowed, from 0 up to, not including, 1.
        folder: gets the bad rows. They go to disk at once, because a file may have millions.
    """

    def __init__(self, source: str, max_fraction: float, folder: Path) -> None:
        super().__init__(source)
        self.max_fraction = max_fraction
        self._path = folder / REJECTED
        self._entries = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed with this object)
        self._lines = array("q")
        self._first: list[Problem] = []

    def add_broken(self, line: int, code: str, read: object, **details: Any) -> None:
        self.add(line, code, read, **details)

    def add(self, line: int, code: str, read: object, **details: Any) -> None:
        self.count += 1
        found = self._problem(line, code, details)
        if len(self._first) < _MAX_LISTED:
            self._first.append(found)
        self._lines.append(self._offset + line)
        reason = str(found).removeprefix(f"{found.value}: ")
        file, line = self._file_and_line(line)
        self._entries.write(_entry({"file": file, "line": line, "reason": reason, "read": read}))

    def finish(self, good: int) -> None:
        self.problems.raise_any()
        bad, rows = self.count, good + self.count
        if bad and bad / rows > self.max_fraction:
            self.problems += self._first
            counts: dict[str, Any] = {"bad": bad, "rows": rows, "share": bad / rows, "allowed": self.max_fraction}
            self.problems.append(problem("too-many-bad-rows", value=self.source, **counts))
            self.problems.raise_any()
        self._entries.seek(0)
        entries = sorted(zip(self._lines, self._entries, strict=True), key=lambda pair: pair[0])
        if entries:
            with self._path.open("ab") as file:
                file.writelines(entry for _, entry in entries)

    def notes(self) -> list[str]:
        if not self.count:
            return super().notes()
        left_out = f"{self.source}: {self.count:,} bad rows were left out; {REJECTED} has them, with reasons."
        return [*super().notes(), left_out]


def bad_rows(source: str, args: BadRowArguments, folder: Path) -> BadRows:
    """A collector of bad rows as `--bad_rows` asks for; `folder` gets the rows that are left out."""
    if args.bad_rows == "quarantine":
        return Quarantine(source, args.max_bad_fraction, folder)
    return BadRows(source)


def keep_rejected(prepared: Path, output_dir: Path, rank: int) -> None:
    """Copy the rejected rows to the model's folder on rank 0, and remove a file of an earlier run.

    Args:
        prepared: folder of the prepared rows.
        output_dir: of the run.
        rank: of this process.
    """
    if rank != 0:
        return
    if (prepared / REJECTED).exists():
        output_dir.mkdir(parents=True, exist_ok=True)
        copy_rejected(prepared, output_dir)
    else:
        (output_dir / REJECTED).unlink(missing_ok=True)


def copy_rejected(prepared: Path, folder: Path) -> None:
    """Copy the rejected rows, if there are any, to another folder."""
    if (prepared / REJECTED).exists():
        shutil.copyfile(prepared / REJECTED, folder / REJECTED)


def _entry(entry: dict[str, object]) -> bytes:
    """A line of json. Half of a surrogate pair, or a byte that is no UTF-8, is written as an escape."""
    try:
        return f"{json.dumps(entry, ensure_ascii=False, default=str)}\n".encode()
    except UnicodeEncodeError:
        return f"{json.dumps(entry, default=str)}\n".encode()

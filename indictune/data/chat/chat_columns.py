"""Give the columns of conversations the names of a form, and name the columns that training does not use."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, groupby, islice

from indictune.data.bad_rows import LINES_PER_FILE, BadRows
from indictune.data.chat.messages import FORMS, Row, RowError, forms_of, instances_of, unused_keys
from indictune.data.columns import shortened
from indictune.data.read.hub_datasets import SplitRows, split_records
from indictune.data.read.read_files import Record
from indictune.errors import Problem, Problems, UserError, problem

# What other files call the columns of a form, the most usual name first.
_ALIASES = {
    "messages": ("message", "conversation", "dialogue", "dialog", "chat", "turns"),
    "instruction": ("question", "query", "prompt", "task", "problem", "user", "human", "input"),
    "output": ("response", "answer", "completion", "target", "solution", "assistant", "reply", "outputs"),
}
_KNOWN = [*dict.fromkeys(key for form, others in FORMS.items() for key in (*form, *others)), "instances"]
_FIRST_ROWS = 1_000
_MAX_NAMED = 20


def parse_columns(columns: str | None) -> dict[str, str]:
    """`--columns` as column of a form -> column of the file: `instruction=question,input=context`, or a JSON object.

    Raises:
        UserError: `columns-malformed` or `columns-unknown`.
    """
    names: dict[str, str] = {}
    if columns is None:
        return names
    if columns.lstrip().startswith("{"):  # a mapping in a recipe
        try:
            names = json.loads(columns)
        except ValueError:
            raise UserError("columns-malformed", "--columns", columns) from None
    else:
        pairs = [pair.partition("=") for pair in columns.split(",")]
        names = {role.strip(): name.strip() for role, _, name in pairs}
    if not all(isinstance(name, str) and name for name in names.values()):
        raise UserError("columns-malformed", "--columns", columns)
    unknown = [role for role in names if role not in _KNOWN]
    if unknown:
        raise UserError("columns-unknown", "--columns", columns, role=shortened(unknown[0]), known=", ".join(_KNOWN))
    return names


def chat_records(rows: SplitRows, bad: BadRows, names: Mapping[str, str]) -> Iterator[Record]:
    """The rows of a split, one for each answer of an instruction, with the columns renamed.

    Args:
        rows: of the split.
        bad: gets the rows that cannot be read.
        names: column of a form -> column of the file.

    Raises:
        UserError: as `split_records`; or a file lacks a renamed column, or no row of it has the columns of a form.
    """
    records = split_records(rows, bad)
    problems = Problems()
    for _, of_file in groupby(records, lambda each: each[0] // LINES_PER_FILE):
        source = bad.files[-1] if bad.files else bad.source
        first = problems.attempt(_first_rows, of_file, source, names)
        for line, record in chain(first, of_file) if first else ():
            for row in instances_of(_renamed(record, names)):
                yield line, row
    problems.raise_any()


def _first_rows(records: Iterator[Record], source: str, names: Mapping[str, str]) -> list[Record]:
    """The rows up to the one that shows that the file has a form and the named columns: mostly one row.

    Raises:
        UserError: `columns-missing` or `form-unknown`.
    """
    read: list[Record] = []
    present: dict[str, None] = {}  # an ordered set, for the message
    has_form = False
    for line, record in islice(records, _FIRST_ROWS):
        read.append((line, record))
        present |= dict.fromkeys(record)
        has_form = has_form or any(map(forms_of, instances_of(_renamed(record, names))))
        if has_form and present.keys() >= set(names.values()):
            return read
    shown = ", ".join(map(shortened, list(present)[:_MAX_NAMED]))
    problems = Problems()
    for role, name in names.items():
        if read and name not in present:
            problems.append(problem("columns-missing", "--columns", f"{role}={name}", source=source, columns=shown))
    problems.raise_any()
    if read and not has_form:
        raise UserError("form-unknown", value=source, keys=shown, renaming=_renaming(_renamed(read[0][1], names)))
    return read


def _renamed(record: Row, names: Mapping[str, str]) -> Row:
    """The row with other names. A column whose name another one takes is kept under a name that no form uses."""
    taken = set(names.values())
    others = {f"{key} (replaced)" if key in names else key: record[key] for key in record if key not in taken}
    return others | {role: record.get(name) for role, name in names.items()}


def _renaming(row: Row) -> str:
    """The `--columns` that gives the row a form, with NAME where no column has a usual name."""
    by_name = {key.strip().lower(): key for key in reversed(row)}
    lists = [key for key in by_name if isinstance(row[by_name[key]], list)]
    chat = [by_name[key] for key in ("messages", "conversations", *_ALIASES["messages"]) if key in lists]
    if chat:
        return f"messages={chat[0]}"
    texts = {key: name for key, name in by_name.items() if isinstance(row[name], str)}
    pairs = []
    for role in ("instruction", "output"):
        name = next((texts[key] for key in (role, *_ALIASES[role]) if key in texts), "NAME")
        pairs += [f"{role}={name}"] if name != role else []
    unknown = any(pair.endswith("=NAME") for pair in pairs)
    return ",".join(pairs) + (", where NAME is the column of the file" if unknown else "")


class UnusedColumns:
    """Count the columns of one split that training does not use, and refuse those that an answer depends on."""

    def __init__(self) -> None:
        self._rows = 0
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._first: dict[str, tuple[int, RowError]] = {}

    def count(self, row: Row) -> None:
        """Add a usable row."""
        self._rows += 1
        self._counts.update(unused_keys(row))

    def refuse(self, line: int, error: RowError) -> None:
        """Add a row whose content would be dropped."""
        key = str(error.details["key"])
        self._refused[key] += 1
        self._first.setdefault(key, (line, error))

    def problems(self, bad: BadRows) -> list[Problem]:
        """One problem for each column that an answer depends on. They stop the run in any case."""
        return [
            Problem(error.code, "", bad.location(line), details={**error.details, "count": self._refused[key]})
            for key, (line, error) in self._first.items()
        ]

    def notes(self, source: str) -> list[str]:
        """A sentence that names the other columns, with the share of the rows that have each; none without any."""
        if not self._counts:
            return []
        most = self._counts.most_common(_MAX_NAMED)
        shares = ", ".join(f"{shortened(name)} {count / self._rows:.1%}" for name, count in most)
        more = f" and {len(self._counts) - _MAX_NAMED} more" if len(self._counts) > _MAX_NAMED else ""
        return [
            f"{source}: training does not use these columns (with the share of rows that have them): {shares}{more}."
        ]

"""Find the columns of a csv file or sheet by its header, and say what is wrong where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from indictune.data.bad_rows import BadRows
from indictune.data.columns import existing_columns, has_columns, shortened
from indictune.data.file_form import FileForm
from indictune.errors import UserError

_LONG_NAME = 30
_MANY_WORDS = 4


def without_given_names(
    path: str, sample: Sequence[Sequence[str]], form: FileForm, columns: Mapping[str, str], bad: BadRows
) -> FileForm:
    """The form without `--column_names` if the first row of the file has the wanted columns itself."""
    if not form.column_names or not sample or not has_columns(sample[0], columns):
        return form
    bad.remark(f"{path}: its first row has the column names, and --column_names is for files without.")
    return replace(form, column_names=())


def columns_of_header(
    path: str,
    header: Sequence[str],
    sample: Sequence[Sequence[str]],
    form: FileForm,
    columns: Mapping[str, str],
    optional: Mapping[str, str],
    bad: BadRows,
) -> dict[str, str]:
    """Role -> column, as of `existing_columns`, with usual names for absent columns.

    Args:
        path: the file.
        header: its column names, those of `form` included.
        sample: the first few rows, that of the header included.
        form: of the file.
        columns: as of `read_batches`, like `optional` and `bad`.

    Raises:
        UserError: a column is missing, the first row is no header, or the names or the delimiter do not fit the rows.
    """
    most = max(map(len, sample), default=0)
    shown = ", ".join(map(shortened, sample[0])) if sample else ""
    is_single = most == 1 and form.delimiter != "auto"
    if is_single and (form.column_names[1:] or not {*columns.values()} & {*header}):
        raise UserError("one-column", "", path, delimiter=form.delimiter, columns=shown)
    if form.column_names and sample and len(sample[0]) != len(header):
        raise UserError("column-names-count", "", path, count=len(header), fields=len(sample[0]), columns=shown)
    try:
        return existing_columns(path, header, columns, optional, bad)
    except UserError as error:
        is_missing = any(each.code == "column-missing" for each in error.problems)
        if form.column_names or not is_missing or not _looks_like_data(sample):
            raise
        names = ",".join(_likely_names(sample, [*columns.values()]))
        raise UserError("header-missing", "", path, columns=shown, names=names) from error


def _looks_like_data(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row holds a long text or a number, or what other rows have in that column too."""
    header, *others = [[field.strip() for field in row] for row in rows]
    repeated = any(name and name in {row[index] for row in others if row[index:]} for index, name in enumerate(header))
    return repeated or any(map(_is_no_name, header))


def _is_no_name(field: str) -> bool:
    return len(field) > _LONG_NAME or len(field.split()) >= _MANY_WORDS or field.removeprefix("-").isdecimal()


def _likely_names(rows: Sequence[Sequence[str]], wanted: Sequence[str]) -> list[str]:
    """A name for each column: the first of `wanted` for the longest fields, the second for the least varied others."""
    fields = [*zip(*(row for row in rows if len(row) == len(rows[0])), strict=True)]
    names = [f"column{number}" for number in range(1, len(fields) + 1)]
    longest = max(range(len(fields)), key=lambda index: sum(map(len, fields[index])))
    others = sorted(set(range(len(fields))) - {longest}, key=lambda index: len(set(fields[index])))
    for index, name in zip([longest, *others], wanted, strict=False):
        names[index] = name
    return names

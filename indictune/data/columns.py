"""Which columns of a file or split are read: check their names and types, and read their values as text."""

from __future__ import annotations

import csv
import difflib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from indictune.config.shared_arguments import FileFormArguments, RawTextForm, TextArguments, TextColumns
from indictune.data.bad_rows import BadRows, Batches
from indictune.errors import Problems, UserError, problem

SEPARATOR = "|"  # of the labels of one row
BETWEEN_TEXTS = "\x00"  # in the text of a row, between the two texts of a pair or the messages of a conversation
KEPT = "kept:"  # begins the role of a column that `predict` repeats in its output
FLAG_OF_LABEL = "label:"  # begins the role of a column of 0 and 1 that says which rows have a label
ON_OFF = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
_MAX_SHOWN = 30
_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
# Role, which is the default name of its column -> names that mean the same, without a plural's s.
_USUAL = {"text": ("text", "tweet", "sentence", "comment", "review"), "label": ("label", "sentiment", "category")}
_CHATS = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"}, {"question", "answer"})
_OF_CHATS = "These are columns of conversations. Use `indictune train llama`, or `indictune inspect --task chat`."
_WHOLE = re.compile(r"-?\d+\.0")
NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")
# What nobody sees in a label: format characters but for ZWJ and ZWNJ, and the selectors of a form of an emoji.
_UNSEEN = re.compile("[\xad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]")
_DASHES = r"\s_\-\u2010-\u2015"
_BETWEEN_DIGITS, _BETWEEN = (re.compile(rf"(?<=[{each}])[{_DASHES}]+(?=[{each}])") for each in (r"\d", f"^{_DASHES}"))


@dataclass(frozen=True)
class Wanted:
    """What is read of a file or split. The last four say how csv and tsv files, and sheets, are laid out.

    Attributes:
        required: role ("text", "text_pair", "label", "language") -> name of a column that must be there.
        optional: the same for columns that may be missing; their cells are then null.
        lists: roles of columns that may hold lists, which are joined as `a|b`.
        delimiter: one of `,`, `;`, `tab`, `|`, or `auto`.
        column_names: in their order, of files without a header; empty if there is a header.
        quoting: `standard`, or `none` if quotes are letters like others.
        sheet: the name of the sheet of a spreadsheet; None for the first one.
    """

    required: Mapping[str, str]
    optional: Mapping[str, str]
    lists: tuple[str, ...] = ()
    delimiter: str = "auto"
    column_names: tuple[str, ...] = ()
    quoting: str = "standard"
    sheet: str | None = None

    @property
    def roles(self) -> dict[str, str]:
        """Role -> column, of all columns."""
        return {**self.required, **self.optional}

    @property
    def labels(self) -> str:
        """The name of the label's column, or the names of several, for messages; empty for rows without labels."""
        return " ".join(column for role, column in self.required.items() if role.startswith("label"))

    @property
    def reading(self) -> dict[str, Any]:
        """Options of `csv.reader`, without the delimiter."""
        # Without strict=True, csv drops a stray quote from a text, or takes all rows up to the next one as one.
        return {"strict": True, "quoting": csv.QUOTE_NONE if self.quoting == "none" else csv.QUOTE_MINIMAL}

    def given_layout(self) -> list[str]:
        """The names of what the flags say about the layout."""
        names = ("delimiter", "column_names", "quoting", "sheet")
        return [name for name in names if getattr(self, name) != vars(Wanted)[name]]


def layout_of(args: FileFormArguments) -> dict[str, Any]:
    """What the flags say about the layout, for `Wanted`."""
    names = (name.strip() for word in args.column_names for name in word.split(","))
    given = {"delimiter": args.delimiter, "quoting": args.quoting, "sheet": args.sheet}
    return given | {"column_names": tuple(filter(None, names))}


def wanted_columns(args: TextArguments, *lists: str) -> Wanted:
    """The columns of labelled texts that the flags name."""
    named = args.label_column
    labels = {"label": named} if isinstance(named, str) else {f"{FLAG_OF_LABEL}{each}": each for each in named}
    pair = {} if args.text_pair_column is None else {"text_pair": args.text_pair_column}
    return _with_language(args, {"text": args.text_column, **labels, **pair}, lists)


def document_columns(args: RawTextForm) -> Wanted:
    """The columns of raw text that the flags name."""
    return _with_language(args, {"text": args.text_column})


def _with_language(args: TextColumns, required: dict[str, str], lists: tuple[str, ...] = ()) -> Wanted:
    if args.language_column is None:
        return Wanted(required, {"language": "language"}, lists, **layout_of(args))
    return Wanted(required | {"language": args.language_column}, {}, lists, **layout_of(args))


def normalise_label(label: str | None) -> str | None:
    """A label without what file types add to it, and without what nobody sees; None for an empty one.

    1, 1.0, "1" and the digit of another script are `1`; True and TRUE (pandas writes booleans so to csv) are `true`.
    Other labels keep their case and spelling in NFC. Their spaces are single plain ones, with none around them.
    """
    if label is None or not (label := seen(label)):
        return None
    if label.lower() in ("true", "false"):
        return label.lower()
    label = _plain_digits(label) if NUMBER.fullmatch(label) else label
    return label.removesuffix(".0") if _WHOLE.fullmatch(label) else label


def seen(label: str) -> str:
    """A label as it looks: in NFC, without zero-width spaces and their like, and with single plain spaces."""
    return unicodedata.normalize("NFC", " ".join(_UNSEEN.sub("", label).split()))


def label_key(label: str) -> str:
    """Equal for labels that differ in case, in spaces, underscores and hyphens inside, or in how characters are coded.

    Numbers stay as they are: -1 is not 1. So do hyphens around a label: A- is not A. 1-2 is not 12.
    """
    if NUMBER.fullmatch(label):
        return label
    plain = _plain_digits(unicodedata.normalize("NFKC", label)).casefold()
    return _BETWEEN.sub("", _BETWEEN_DIGITS.sub("\x00", re.sub("[\u200c\u200d]", "", plain)))


def _plain_digits(label: str) -> str:
    return "".join(str(unicodedata.decimal(each)) if each.isdecimal() else each for each in label)


def names_by_key(names: Iterable[str]) -> dict[str, str]:
    """The key of each name -> the name, without names that share a key."""
    keys = [(label_key(normalise_label(name) or name), name) for name in names]
    counts = Counter(key for key, _ in keys)
    return {key: name for key, name in keys if counts[key] == 1}


def with_labels_of_columns(batch: pa.RecordBatch, bad: BadRows) -> pa.RecordBatch:
    """The rows with a column `label` such as `joy|anger`, made of the columns of 0 and 1 of each label.

    A row whose cells are all empty has a null. `bad` gets rows with other cells.
    """
    names = [name.removeprefix(FLAG_OF_LABEL) for name in batch.schema.names if name.startswith(FLAG_OF_LABEL)]
    labels, is_good = list[object](), list[bool]()
    for index, cells in enumerate(zip(*(batch[f"{FLAG_OF_LABEL}{name}"].to_pylist() for name in names), strict=True)):
        values = [ON_OFF.get((cell or "").strip().lower()) for cell in cells]
        given = joined_list([name for name, is_on in zip(names, values, strict=True) if is_on])
        labels.append(given if any(cells) else None)
        is_good.append(None not in values or not any(cells))
        if not is_good[-1]:
            (row,), at = batch.slice(index, 1).to_pylist(), values.index(None)
            details = {"where": names[at], "held": shortened(cells[at] or "nothing"), "expected": "0 or 1"}
            bad.add(row.pop("line"), "value-of-wrong-type", row, **details)
    return batch.append_column("label", pa.array(labels, pa.string())).filter(pa.array(is_good, pa.bool_()))


def joined_list(value: object) -> object:
    """A list of labels as `a|b`, an empty one as `|`; anything else as it is."""
    if not isinstance(value, list) or any(isinstance(each, list | dict) for each in value):
        return value
    return SEPARATOR.join(map(str, value)) or SEPARATOR


def usual_columns(present: Sequence[str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Role -> the only column with a usual name for it, of each wanted column that is absent and has no own name."""
    found: dict[str, str] = {}
    for role, name in wanted.items():
        if name == role and name not in present:
            fitting = [each for each in present if each.strip().lower().removesuffix("s") in _USUAL.get(role, ())]
            found |= {role: fitting[0]} if len(fitting) == 1 else {}
    return found


def existing_columns(
    source: str, present: Sequence[str], wanted: Wanted, bad: BadRows | None = None, flags: Sequence[str] = ()
) -> dict[str, str]:
    """Role -> column of each required column, and of the optional ones that are present.

    `flags` are columns that seem to hold 0 and 1 alone, which are named where there is no label.
    `bad` gets a remark on columns that stand for absent ones by their usual names; None allows no such columns. Raises
    `UserError` for every column that is missing or duplicate.
    """
    guessed = {} if bad is None else usual_columns(present, wanted.roles)
    if bad is not None and guessed:
        read = " and ".join(f"column {shortened(name)} as the {role}" for role, name in guessed.items())
        bad.remark(f"{source}: reading {read} ({', '.join(f'--{role}_column' for role in guessed)}).")
    found = {role: name for role, name in wanted.optional.items() if name in present}
    names = {**wanted.required, **found, **guessed}
    problems = Problems()
    shown = ", ".join(map(shortened, present)) or "no columns"
    is_other = "label" in wanted.required and not {names[role] for role in wanted.required}.intersection(present)
    is_chat = is_other and any(form.issubset(present) for form in _CHATS)
    for role, name in names.items():
        problems.attempt(_check_unique, source, present, name)
        if name not in present:
            near = difflib.get_close_matches(name.lower(), [other.lower() for other in present], n=1)
            hint = next((f"Did you mean {shortened(other)}?" for other in present if other.lower() in near), None)
            if role == "label" and flags[1:]:
                hint = f"If each column of 0 and 1 is a label, use --label_column {' '.join(flags)}."
            hint = _OF_CHATS if is_chat else hint
            option = "--keep_columns" if role.startswith(KEPT) else f"--{role.partition(':')[0]}_column"
            details = {"column": shortened(name), "option": option, "columns": shown}
            problems.append(problem("column-missing", "", source, hint, **details))
    Problems(problems[:1] if is_chat else problems).raise_any()
    return names


def check_schema(source: str, schema: pa.Schema) -> None:
    """Raise `UserError` for every duplicate column, and every column of type JSON.

    A row keeps the last of two columns of one name. `datasets` 5 makes JSON columns of mixed values, with each text in
    quotes.
    """
    problems = Problems()
    for name in dict.fromkeys(schema.names):
        problems.attempt(_check_unique, source, schema.names, name)
    for field in schema:
        if "arrow.json" in str(field.type):
            problems.append(problem("column-json", value=source, column=shortened(field.name), type=field.type))
    problems.raise_any()


def _check_unique(source: str, names: Sequence[str], name: str) -> None:
    if (count := names.count(name)) > 1:
        raise UserError("column-duplicate", value=source, count=count, column=shortened(name))


def text_batches(batches: Iterable[pa.RecordBatch], names: Mapping[str, str], wanted: Wanted, source: str) -> Batches:
    """All arrow rows of a file or split, with the columns of `existing_columns`, in the form of `read_batches`.

    Raises `UserError` for every column that holds neither text, numbers nor booleans.
    """
    first_row = 1
    for read in batches:
        problems = Problems()
        arrays = dict.fromkeys((*names, *wanted.optional), pa.nulls(read.num_rows, pa.string()))
        for role, name in names.items():
            column = read.column(name)
            if role in wanted.lists and pa.types.is_nested(column.type):
                column = pa.array(map(joined_list, column.to_pylist()), pa.string())
            with problems.collecting():
                arrays[role] = _as_text(column, source, name)
        problems.raise_any()
        arrays["line"] = pa.array(range(first_row, first_row + read.num_rows), pa.int64())
        yield pa.record_batch(arrays)
        first_row += read.num_rows


def _as_text(column: pa.Array, source: str, name: str) -> pa.Array:
    """A column of strings, numbers or booleans, dictionary-encoded or not, as nullable strings; NaN becomes null."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_extension = isinstance(kind, pa.BaseExtensionType)  # such as JSON, with each text in quotes
    if is_extension or pa.types.is_nested(kind) or any(is_bytes(kind) for is_bytes in _BYTES):
        hint = "Or use --problem_type multi_label_classification." if pa.types.is_list(kind) else None
        raise UserError("column-type", value=source, way_out=hint, column=name, type=kind)
    try:
        column = column.cast(kind)
        if pa.types.is_floating(kind):
            column = pc.if_else(pc.is_nan(column), pa.scalar(None, kind), column)
        text = column.cast(pa.string())
        text.validate(full=True)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise UserError("column-unreadable", value=source, column=name, type=kind, reason=reason) from error
    return text


def with_language(item: Any, language: str | None) -> Any:
    """A batch, or a line and its record, with this language where a row has none."""
    if language is None:
        return item
    if isinstance(item, pa.RecordBatch):
        is_named = pc.fill_null(pc.not_equal(pc.utf8_trim_whitespace(item["language"]), ""), False)
        filled = pc.if_else(is_named, item["language"], language)
        return item.set_column(item.schema.get_field_index("language"), "language", filled)
    line, record = item
    return item if record.get("language") else (line, {**record, "language": language})


def shortened(name: str) -> str:
    """At most 30 characters for a message: without a header line, a tweet may stand for a column name."""
    return name if len(name) <= _MAX_SHOWN else name[: _MAX_SHOWN - 1] + "…"

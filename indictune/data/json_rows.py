"""Read the rows of json and jsonl files."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterator, Mapping

from indictune.data.bad_rows import BadRows
from indictune.data.columns import Fault, check_columns, joined_list, shortened
from indictune.data.text_lines import decoded_lines
from indictune.errors import UserError

_SPACE = re.compile(r"[ \t\n\r]*")
_LIST = re.compile(r'\s*(?:\{\s*(?:[^\[]*,\s*)?"data"\s*:\s*)?\[')
_BEGINNING_BYTES = 1 << 16
_NOT_TEXT = re.compile("[\udc80-\udcff]")  # as `decoded_lines` writes a byte that is not UTF-8
_TOO_DEEP = "nested too deeply"


class _Decoder:
    """Decode JSON. A number stays the text it is written as: 1e5 becomes "1e5".

    NaN becomes null: pandas writes it for a missing value.

    Attributes:
        fault: of the latest value, or None. JSON decoders silently drop one of two equal keys.
    """

    fault: Fault | None

    def __init__(self) -> None:
        self._decoder = json.JSONDecoder(
            parse_float=str,
            parse_int=str,
            parse_constant=lambda name: None if name == "NaN" else name,
            object_pairs_hook=self._object,
        )

    def decode(self, text: str) -> object:
        self.fault = None
        value: object = self._decoder.decode(text)
        return value

    def raw_decode(self, text: str, begin: int) -> tuple[object, int]:
        self.fault = None
        return self._decoder.raw_decode(text, begin)

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            duplicate = next(key for key in keys if keys.count(key) > 1)
            self.fault = "key-duplicate", {"key": shortened(ascii(duplicate))}
        return made


def holds_lines(path: str) -> bool:
    """Whether a .json file holds one object a line, as `datasets` and pandas write them, and no list."""
    with open(path, "rb") as file:
        beginning = file.read(_BEGINNING_BYTES).removeprefix(codecs.BOM_UTF8).decode(errors="replace")
    return beginning.lstrip().startswith("{") and _LIST.match(beginning) is None


def json_lines(path: str, bad: BadRows) -> Iterator[tuple[int, object]]:
    """The value on each line of a jsonl file, with its line number; blank lines are skipped."""
    decoder = _Decoder()
    undecodable: dict[int, str] = {}
    for number, line in enumerate(decoded_lines(path, undecodable), 1):
        if undecodable:
            bad.add_broken(number, "not-utf8", line, where="", byte=undecodable.pop(number))
            continue
        if line.isspace():
            continue
        try:
            # Without its end, a line cut short breaks in its last column, not in "column 1" of a next line.
            value = decoder.decode(line.rstrip("\r\n"))
        except json.JSONDecodeError as error:
            bad.add_broken(number, "invalid-json", line, reason=f"{error.msg} (column {error.colno})")
        except RecursionError:
            bad.add_broken(number, "invalid-json", line, reason=_TOO_DEEP)
        else:
            if decoder.fault:
                bad.add_broken(number, decoder.fault[0], line, **decoder.fault[1])
            else:
                _remark_half_emoji(line, value, number, bad)
                yield number, value


def json_elements(path: str, bad: BadRows) -> Iterator[tuple[int, object]]:
    """The elements of a JSON list, each with its first line. Memory holds the text of the file, not all elements.

    Raises:
        UserError: there is no list.
    """
    undecodable: dict[int, str] = {}
    text = "".join(decoded_lines(path, undecodable))
    opening = _LIST.match(text)
    if opening is None:
        raise UserError("json-list-missing", value=path)
    decoder = _Decoder()
    number, counted = 1, 0
    begin = _skip_space(text, opening.end())
    closed = text[begin : begin + 1] == "]"
    try:
        while not closed:
            number, counted = number + text.count("\n", counted, begin), begin
            value, end = decoder.raw_decode(text, begin)
            not_text = _NOT_TEXT.search(text, begin, end) if undecodable else None
            if not_text:
                line = number + text.count("\n", begin, not_text.start())
                bad.add_broken(line, "not-utf8", text[begin:end], where="", byte=undecodable[line])
            elif decoder.fault:
                bad.add_broken(number, decoder.fault[0], text[begin:end], **decoder.fault[1])
            else:
                _remark_half_emoji(text[begin:end], value, number, bad)
                yield number, value
            end = _skip_space(text, end)
            if text[end : end + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, end)
            closed = text[end] == "]"
            begin = end if closed else _skip_space(text, end + 1)
        around = decoder.decode(f"{text[: opening.end()]}{text[begin:]}")
    except json.JSONDecodeError as error:
        # The text around the list was decoded without the list: its positions are not those of the file.
        bad.cannot_read(error.lineno if error.doc is text else number, "invalid-json", reason=error.msg)
        return
    except RecursionError:
        bad.cannot_read(number, "invalid-json", reason=_TOO_DEEP)
        return
    if decoder.fault:
        bad.cannot_read(1, decoder.fault[0], **decoder.fault[1])
    outside = _NOT_TEXT.search(text, 0, opening.end()) or _NOT_TEXT.search(text, begin) if undecodable else None
    if outside:
        line = 1 + text.count("\n", 0, outside.start())
        bad.cannot_read(line, "not-utf8", where="", byte=undecodable[line])
    if isinstance(around, dict) and around.get("data") != []:
        raise UserError("json-list-missing", value=path)


def record_rows(
    path: str,
    records: Iterator[tuple[int, object]],
    columns: Mapping[str, str],
    optional: Mapping[str, str],
    bad: BadRows,
    lists: Collection[str] = (),
) -> Iterator[tuple[int, tuple[str | None, ...]]]:
    """The wanted values of JSON objects. A key that an object lacks is null, if another object has it.

    Args:
        path: of the file.
        records: its values, with their lines.
        columns: as of `read_batches`, like `optional`.
        bad: gets values that are no object, and objects with a list or object for a text.
        lists: names that may hold lists, which are joined by `joined_list`.
    """
    names = (*columns.values(), *optional.values())
    present: dict[str, None] = {}  # an ordered set, for the message
    for line, record in records:
        if not isinstance(record, dict):
            bad.add_broken(line, "not-an-object", record, held=kind_of(record))
            continue
        present.update(dict.fromkeys(record))
        values = [joined_list(record.get(name)) if name in lists else record.get(name) for name in names]
        nested = next(
            (name for name, value in zip(names, values, strict=True) if isinstance(value, dict | list)), None
        )
        if nested is not None:
            held, expected = kind_of(record[nested]), "text, a number or a boolean"
            bad.add_broken(line, "value-of-wrong-type", record, where=nested, held=held, expected=expected)
        else:
            yield line, tuple(map(_text, values))
    if present:
        with bad.problems.collecting():
            check_columns(path, present, columns)


def _remark_half_emoji(written: str, value: object, line: int, bad: BadRows) -> None:
    """Report half of a surrogate pair, which no text can hold: tweets are cut inside an emoji."""
    if r"\ud" not in written and r"\uD" not in written:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        what = "has half of an emoji (one \\ud800 to \\udfff alone), which is read as U+FFFD."
        bad.remark(line, what, "half of an emoji")


def kind_of(value: object) -> str:
    """The kind of a value, for a message; in json a number is a text."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", dict: "an object", list: "a list", str: "a text or a number"}
    return kinds.get(type(value), type(value).__name__)


def _text(value: object) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if value is None else str(value)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position

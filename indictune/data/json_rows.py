"""Rows of json and jsonl files."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from typing import NoReturn

from indictune.data.bad_rows import BadRows
from indictune.data.columns import check_columns, shortened
from indictune.data.text_lines import decoded_lines
from indictune.errors import UserError

_SPACE = re.compile(r"[ \t\n\r]*")
_LIST = re.compile(r'\s*(?:\{\s*(?:[^\[]*,\s*)?"data"\s*:\s*)?\[')
_BEGINNING = 1 << 16  # bytes, of which a file is told
_NO_TEXT = re.compile("[\udc80-\udcff]")  # what `decoded_lines` puts for a byte that is no text
_TOO_DEEP = "no valid JSON: nested too deeply."


class _Decoder:
    """Values of JSON. A number stays the text it was written as: 1e5 as a text is "1e5".

    NaN is what pandas writes for a missing value, and becomes null.

    Attributes:
        wrong: a complaint about the latest value, or None: of a key that is there twice, JSON keeps one in silence.
    """

    wrong: str | None

    def __init__(self) -> None:
        self._decoder = json.JSONDecoder(
            parse_float=str,
            parse_int=str,
            parse_constant=lambda name: None if name == "NaN" else name,
            object_pairs_hook=self._object,
        )

    def decode(self, text: str) -> object:
        self.wrong = None
        value: object = self._decoder.decode(text)
        return value

    def raw_decode(self, text: str, begin: int) -> tuple[object, int]:
        self.wrong = None
        return self._decoder.raw_decode(text, begin)

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        made = dict(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            self.wrong = f"an object has the key {shortened(ascii(twice))} twice; leave out one of them."
        return made


def holds_lines(path: str) -> bool:
    """Whether a file called .json holds one object a line, as `datasets` and pandas write them, and no list."""
    with open(path, "rb") as file:
        beginning = file.read(_BEGINNING).removeprefix(codecs.BOM_UTF8).decode(errors="replace")
    return beginning.lstrip().startswith("{") and _LIST.match(beginning) is None


def json_lines(path: str, bad: BadRows) -> Iterator[tuple[int, object]]:
    """The value on each line of a jsonl file, with its number; blank lines are skipped."""
    decoder = _Decoder()
    undecodable: dict[int, str] = {}
    for number, line in enumerate(decoded_lines(path, undecodable), 1):
        if undecodable:
            bad.add_broken(number, undecodable.pop(number), line)
            continue
        if line.isspace():
            continue
        try:
            value = decoder.decode(line.rstrip("\r\n"))  # else an object cut short breaks in "column 1" of a next line
        except json.JSONDecodeError as error:
            bad.add_broken(number, f"no valid JSON: {error.msg} (column {error.colno}).", line)
        except RecursionError:
            bad.add_broken(number, _TOO_DEEP, line)
        else:
            if decoder.wrong:
                bad.add_broken(number, decoder.wrong, line)
            else:
                _remark_halves(line, value, number, bad)
                yield number, value


def json_elements(path: str, bad: BadRows) -> Iterator[tuple[int, object]]:
    """The elements of a JSON list with the line on which each begins; only the text of the file is held as a whole.

    Raises:
        UserError: there is no list.
    """
    undecodable: dict[int, str] = {}
    text = "".join(decoded_lines(path, undecodable))
    opening = _LIST.match(text)
    if opening is None:
        _refuse(path)
    decoder = _Decoder()
    number, counted = 1, 0
    begin = _skip_space(text, opening.end())
    closed = text[begin : begin + 1] == "]"
    try:
        while not closed:
            number, counted = number + text.count("\n", counted, begin), begin
            value, end = decoder.raw_decode(text, begin)
            wrong = _NO_TEXT.search(text, begin, end) if undecodable else None
            if wrong:
                line = number + text.count("\n", begin, wrong.start())
                bad.add_broken(line, undecodable[line], text[begin:end])
            elif decoder.wrong:
                bad.add_broken(number, decoder.wrong, text[begin:end])
            else:
                _remark_halves(text[begin:end], value, number, bad)
                yield number, value
            end = _skip_space(text, end)
            if text[end : end + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, end)
            closed = text[end] == "]"
            begin = end if closed else _skip_space(text, end + 1)
        around = decoder.decode(f"{text[: opening.end()]}{text[begin:]}")
    except json.JSONDecodeError as error:
        # What stands around the list was decoded without the list, so only positions inside the list are of the file.
        bad.cannot_read(error.lineno if error.doc is text else number, f"no valid JSON: {error.msg}.")
        return
    except RecursionError:
        bad.cannot_read(number, _TOO_DEEP)
        return
    if decoder.wrong:
        bad.cannot_read(1, decoder.wrong)
    outside = _NO_TEXT.search(text, 0, opening.end()) or _NO_TEXT.search(text, begin) if undecodable else None
    if outside:
        line = 1 + text.count("\n", 0, outside.start())
        bad.cannot_read(line, undecodable[line])
    if isinstance(around, dict) and around.get("data") != []:
        _refuse(path)


def record_rows(
    path: str,
    records: Iterator[tuple[int, object]],
    columns: Mapping[str, str],
    optional: Mapping[str, str],
    bad: BadRows,
) -> Iterator[tuple[int, tuple[str | None, ...]]]:
    """The wanted values of JSON objects; a key that an object lacks is null, as long as another object has it.

    Args:
        path: of the file.
        records: its values, with their lines.
        columns: as of `read_batches`, like `optional`.
        bad: gets those that are no object, or hold lists or objects where a text is wanted.
    """
    names = (*columns.values(), *optional.values())
    present: dict[str, None] = {}  # an ordered set, for the message
    for line, record in records:
        if not isinstance(record, dict):
            wrong = f'holds {kind_of(record)}, expected an object such as {{"text": ..., "label": ...}}.'
            bad.add_broken(line, wrong, record)
            continue
        present.update(dict.fromkeys(record))
        values = [record.get(name) for name in names]
        nested = next(
            (name for name, value in zip(names, values, strict=True) if isinstance(value, dict | list)), None
        )
        if nested is not None:
            wrong = f"{nested} holds {kind_of(record[nested])}, expected text, a number or a boolean."
            bad.add_broken(line, wrong, record)
        else:
            yield line, tuple(map(_text, values))
    if present:
        with bad.problems.collecting():
            check_columns(path, present, columns)


def _remark_halves(written: str, value: object, line: int, bad: BadRows) -> None:
    """Tell of a value with half of a surrogate pair, which no text can hold: tweets are cut amid an emoji."""
    if r"\ud" not in written and r"\uD" not in written:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        what = "has half of an emoji (one \\ud800 to \\udfff alone), which is read as U+FFFD."
        bad.remark(line, what, "half of an emoji")


def kind_of(value: object) -> str:
    """What a value of a row is, for a message; in json a number is a text."""
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


def _refuse(path: str) -> NoReturn:
    raise UserError(
        f'{path}: expected a list of objects, [{{...}}, {{...}}, ...], or {{"data": [...]}}; '
        "a file with one object a line is read when it is called .jsonl."
    )

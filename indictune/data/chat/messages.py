"""Read the messages of a row in any of the usual forms, and give its columns the names of a form."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, cycle, groupby, islice

from indictune.data.bad_rows import LINES_PER_FILE, BadRows, Record
from indictune.data.columns import shortened
from indictune.data.read.read_files import kind_of
from indictune.data.read.row_sources import SplitRows
from indictune.errors import Problem, Problems, UserError, problem

Message = dict[str, str]
Row = dict[str, object]

Form = tuple[str, ...]

# The keys of each form, and the other keys that each uses.
_PROMPT, _ALPACA, _DOLLY = ("prompt", "completion"), ("instruction", "output"), ("instruction", "response")
_CHOSEN, _PAIRS = ("chosen",), ("interactions",)  # of two answers the better one; [user, assistant] pairs
SCORES = ("score_chosen", "score_rejected")  # of both answers of a pair
_PASSAGES = ("input", "context", "passage")
_INSTRUCTED = (*_PASSAGES, "history", "system", "language")
FORMS: dict[Form, Form] = {
    ("messages",): ("system", "language"),
    ("conversations",): ("system", "language"),
    _PROMPT: ("system", "language"),
    _ALPACA: _INSTRUCTED,
    _DOLLY: _INSTRUCTED,
    _CHOSEN: ("prompt", "system", "language", "rejected", *SCORES),
    _PAIRS: ("system", "language"),
}

# Keys without which an answer is no answer. A form that does not use them refuses them.
UNUSED_CONTENT = "content-ignored"
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_CONTENT = ("context", "passage", "documents", "history", "instances", "options", *_MEDIA)
_OF_MESSAGES = ("role", "content", "from", "value")

# A role as files name it, and as chat templates do.
_ROLES = {name: name for name in ("system", "user", "assistant")}
_ROLES |= {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}

# Keys that should change what is learned, and that training ignores. The first two kinds must be empty, the last 1.
_TOOLS = ("tools", "functions", "tool_calls", "function_call")
_THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details", "thinking")
_WEIGHTS = ("weight", "loss_weight", "train", "training", "trainable", "train_on_turn", "loss")
RATINGS, _REJECTED = ("kto_tag", "label"), ("false", "0", "0.0")
_COUNTS = ("none", "true", "1", "1.0")


class RowError(Exception):
    """A row that cannot be used, with the code and details of its problem, as in `errors.toml`."""

    def __init__(self, code: str, **details: object) -> None:
        super().__init__(code)
        self.code = code
        self.details = details


def is_prompt_text(row: Row) -> bool:
    """Whether a row is one prompt and one answer, both plain texts; raises `RowError` if it has no known form."""
    form = _form_of(row)
    return form in (_PROMPT, _CHOSEN) and not any(isinstance(row.get(key), list) for key in ("prompt", *form))


def messages_of(row: Row) -> list[Message]:
    """The messages of a row: an optional system message, then user and assistant by turns.

    Each has `role` and `content`. Texts stay as they are. A system message without text is left out.

    Raises `RowError` if a text is missing, empty or of the wrong type, or a role is unknown or out of order. Raises it
    too if the last message is not an answer, or training would ignore a key.
    """
    form = _form_of(row)
    # In a row of several answers, nobody knows whose thoughts these are.
    empty = (*_TOOLS, *_THOUGHTS) if form in (_PROMPT, _ALPACA, _DOLLY, _CHOSEN) else _TOOLS
    _check_keys(row, "the row", empty, ("weight",))
    _check_ratings(row, "the row")
    _check_content(row, form)
    if is_prompt_text(row):
        _check_keys(row, "the row", ("system",), ())
        messages = _turn(_text(row, "prompt"), _text(row, form[-1]))
    elif form in (_ALPACA, _DOLLY):
        asked = filter(str.strip, (_text(row, key) for key in ("instruction", *_PASSAGES)))
        messages = _pairs(row, "history") + _turn("\n\n".join(asked), _text(row, form[-1]))
    elif form == _PAIRS:
        messages = _pairs(row, *_PAIRS)
    elif form == _CHOSEN:
        messages = _chosen(row)
    else:
        messages = [message for key in form for message in _listed(row, key)]
    messages = [{"role": "system", "content": _text(row, "system")}, *messages]
    messages = [message for message in messages if message["role"] != "system" or message["content"].strip()]
    _check_turns(messages)
    return messages


def instances_of(row: Row) -> list[Row]:
    """The row itself, or one row for each of the `instances` of an instruction, as Self-Instruct writes them."""
    instances = row.get("instances")
    if not isinstance(instances, list) or "instruction" not in row or not all(isinstance(i, dict) for i in instances):
        return [row]
    others = {key: value for key, value in row.items() if key != "instances"}
    return [others | instance for instance in instances] or [row]


def unused_keys(row: Row) -> set[str]:
    """The filled keys of a usable row that training does not use; those of messages are written as `messages.id`."""
    form = _form_of(row)
    unused = {key for key in row.keys() - {*form, *FORMS[form]} if is_filled(row[key])}
    for key in form:
        messages = row[key]
        for message in messages if isinstance(messages, list) else []:
            named = message if isinstance(message, dict) else {}
            unused |= {f"{key}.{name}" for name in named.keys() - {*_OF_MESSAGES} if is_filled(named[name])}
    return unused


def forms_of(row: Row) -> list[Form]:
    """The forms whose keys all have values in the row."""
    filled = {key for key, value in row.items() if value is not None}
    if row.get("messages") == row.get("chosen"):  # UltraFeedback has the chosen conversation twice
        filled -= {"messages"}
    return [form for form in FORMS if filled.issuperset(form)]


def is_filled(value: object) -> bool:
    """Whether a value holds anything."""
    return value is not None and str(value).strip() not in ("", "[]", "{}")


def _form_of(row: Row) -> Form:
    """The keys of the form of a row. All of them have values."""
    forms = forms_of(row)
    if len(forms) == 1:
        return forms[0]
    filled = sorted(_shown(key) for key, value in row.items() if value is not None)
    raise RowError("unknown-form", keys=", ".join(filled[:_MAX_NAMED]) or "(none)")


def _check_content(row: Row, form: Form) -> None:
    """Refuse content that the form does not use, and a second passage."""
    lost = [key for key in _CONTENT if key not in FORMS[form] and is_filled(row.get(key))]
    passages = [key for key in _PASSAGES if key in FORMS[form] and is_filled(row.get(key))]
    lost += passages[1:]
    if not lost:
        return
    use = f"which the form of {' and '.join(form)} does not use"
    if lost[0] in passages:
        use = f"and {passages[0]} too, of which one is used"
    cure = "Write it into the other texts, or remove it."
    if form == _PROMPT and lost[0] in _INSTRUCTED:
        cure = "Give --columns instruction=prompt,output=completion, a form that uses it, or remove it."
    raise RowError(UNUSED_CONTENT, key=lost[0], use=use, cure=cure)


def _check_ratings(held: Row, where: str) -> None:
    for key in RATINGS:
        if str(held.get(key)).strip().lower() in _REJECTED:
            raise RowError("answer-rejected", where=where, key=key, held=_shown(held[key]))


def _check_keys(held: Row, where: str, empty: Iterable[str], one: Iterable[str]) -> None:
    """Refuse a value of a key that must be empty or 1."""
    filled = [key for key in empty if held.get(key) and str(held[key]).strip() not in ("", "[]")]
    weighted = [key for key in one if str(held.get(key)).strip().lower() not in _COUNTS]
    for key in filled + weighted:
        raise RowError("key-ignored", where=where, key=key, held=_shown(held[key]))


def _turn(prompt: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _pairs(row: Row, key: str) -> list[Message]:
    messages: list[Message] = []
    pairs = row.get(key) or []
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        if pair == []:  # as indic-align fills up
            continue
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise _wrong_type(key, pair, "a list of [user, assistant] pairs of texts")
        messages += _turn(*pair)
    return messages


def _chosen(row: Row) -> list[Message]:
    """The prompt and the chosen answer, as messages. `chosen` may hold the prompt too."""
    chosen, prompt = _listed(row, "chosen"), row.get("prompt")
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else []
    asked = asked if isinstance(prompt, str | None) else _listed(row, "prompt")
    if all(message in chosen for message in asked):
        return chosen
    if chosen and chosen[0]["role"] != "assistant":
        use = "and chosen holds another prompt"
        raise RowError(UNUSED_CONTENT, key="prompt", use=use, cure="Remove one of the two prompts.")
    return asked + chosen


def _text(row: Row, key: str) -> str:
    """A text, empty if it is missing."""
    value = row.get(key)
    if not isinstance(value, str | None):
        raise _wrong_type(key, value, "text")
    return value or ""


def _listed(row: Row, key: str) -> list[Message]:
    value = row[key]
    if not isinstance(value, list):
        raise _wrong_type(key, value, "a list of messages")
    return [_message(message, f"message {number} of {key}") for number, message in enumerate(value, 1)]


def _message(message: object, where: str) -> Message:
    """A message of `role` and `content`, or of `from` and `value`."""
    if not isinstance(message, dict):
        raise _wrong_type(where, message, "{role, content} or {from, value}")
    name, content = (
        message.get(other) if message.get(key) is None else message[key]
        for key, other in (("role", "from"), ("content", "value"))
    )
    role = _ROLES.get(str(name))
    if role is None:
        raise RowError("unknown-role", where=where, role=_shown(name), expected=", ".join(_ROLES))
    _check_keys(message, where, (*_TOOLS, *_THOUGHTS), _WEIGHTS if role == "assistant" else ())
    _check_ratings(message if role == "assistant" else {}, where)
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return {"role": role, "content": "".join(_part(part, f"{where}: content") for part in parts)}


def _part(part: object, where: str) -> str:
    """The text of a typed part; LLaMA-Factory writes it as `value`."""
    if isinstance(part, dict) and part.get("type") == "text":
        text = part.get("text", part.get("value"))
        if isinstance(text, str):
            return text
        raise _wrong_type(where, text, "text")
    raise _wrong_type(where, part, 'text, or a list of {"type": "text", "text": ...}')


def _check_turns(messages: list[Message]) -> None:
    """Refuse an order other than user and assistant by turns, and empty messages."""
    first = 1 if messages and messages[0]["role"] == "system" else 0
    roles = cycle(["user", "assistant"])
    for number, (message, expected) in enumerate(zip(messages[first:], roles, strict=False), first + 1):
        if message["role"] != expected:
            raise RowError("wrong-order", where=f"message {number}", role=message["role"], expected=expected)
        if not message["content"].strip():
            raise RowError("no-answer" if expected == "assistant" else "no-prompt", where=f"message {number}")
    if len(messages) == first or (len(messages) - first) % 2:
        raise RowError("answer-not-last")


def _wrong_type(where: str, value: object, expected: str) -> RowError:
    return RowError("value-of-wrong-type", where=where, held=kind_of(value), expected=expected)


def _shown(value: object) -> str:
    return shortened(str(value))


# What other files call the columns of a form, the most usual name first.
_ALIASES = {
    "messages": ("message", "conversation", "dialogue", "dialog", "chat", "turns"),
    "instruction": ("question", "query", "prompt", "task", "problem", "user", "human", "input"),
    "output": ("response", "answer", "completion", "target", "solution", "assistant", "reply", "outputs"),
}
PROMPT_NAMES = ("instruction", *_ALIASES["instruction"])
_KNOWN = [*dict.fromkeys(key for form, others in FORMS.items() for key in (*form, *others)), "instances"]
_FIRST_ROWS = 1_000
_MAX_NAMED = 20


def parse_columns(columns: str | None) -> dict[str, str]:
    """`--columns` as column of a form -> column of the file: `instruction=question,input=context`, or a JSON object.

    Raises `UserError` if it is malformed, or no form has such a column.
    """
    if columns is None:
        return {}
    names = {"": ""}  # malformed, unless they can be read
    if columns.lstrip().startswith("{"):  # a mapping in a recipe
        with suppress(ValueError, RecursionError):
            names = json.loads(columns)
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
    """The rows of a split, one for each answer of an instruction; `names` is column of a form -> column of the file.

    Raises `UserError` if the rows cannot be read, a file lacks a renamed column, or no row of it has a form.
    """
    problems = Problems()
    for _, of_file in groupby(rows.records(bad), lambda each: each[0] // LINES_PER_FILE):
        source = bad.files[-1] if bad.files else bad.source
        first = problems.attempt(_first_rows, of_file, source, names)
        for line, record in chain(first, of_file) if first else ():
            for row in instances_of(_renamed(record, names)):
                yield line, row
    problems.raise_any()


def _first_rows(records: Iterator[Record], source: str, names: Mapping[str, str]) -> list[Record]:
    """The rows up to the one that shows that the file has a form and the named columns: mostly one row."""
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
    lost = [f"{role}={name}" for role, name in names.items() if read and name not in present]
    Problems(problem("columns-missing", "--columns", each, source=source, columns=shown) for each in lost).raise_any()
    if read and not has_form:
        row = _renamed(read[0][1], names)
        code = "rows-of-raw-text" if isinstance(row.get("text"), str) else "form-unknown"
        raise UserError(code, value=source, keys=shown, renaming=_renaming(row))
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
    nested = [name for name, value in row.items() if isinstance(value, list) and isinstance([*value, ""][0], list)]
    if unknown and nested:
        return f"interactions={nested[0]}"
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
        self._counts.update(sorted(unused_keys(row)))

    def refuse(self, line: int, error: RowError) -> None:
        """Add a row whose content would be dropped."""
        key = str(error.details["key"])
        self._refused[key] += 1
        self._first.setdefault(key, (line, error))

    def problems(self, bad: BadRows) -> list[Problem]:
        """One problem for each column that an answer depends on. They stop the run in any case."""
        found = ((line, error, {"count": self._refused[key]}) for key, (line, error) in self._first.items())
        return [Problem(each.code, "", bad.location(line), details=each.details | more) for line, each, more in found]

    def notes(self, source: str) -> list[str]:
        """A sentence that names the other columns, with the share of the rows that have each; none without any."""
        if not self._counts:
            return []
        most = self._counts.most_common(_MAX_NAMED)
        shares = ", ".join(f"{shortened(name)} {count / self._rows:.1%}" for name, count in most)
        more = f" and {len(self._counts) - _MAX_NAMED} more" if len(self._counts) > _MAX_NAMED else ""
        columns = "these columns (with the share of rows that have them)"
        return [f"{source}: training does not use {columns}: {shares}{more}."]

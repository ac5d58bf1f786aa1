"""Read the messages of one row, in any of the usual forms."""

from __future__ import annotations

from indictune.data.columns import shortened
from indictune.data.json_rows import kind_of
from indictune.data.read_files import without_surrogates

MESSAGES = "messages"
CONVERSATIONS = "conversations"
PROMPT_TEXTS = "prompt and completion as texts"
PROMPT_LISTS = "prompt and completion as lists of messages"
INSTRUCTION = "instruction and output"

# The keys of each form. The values decide between the two forms of prompt and completion.
_FORM_KEYS = {
    MESSAGES: ("messages",),
    CONVERSATIONS: ("conversations",),
    PROMPT_TEXTS: ("prompt", "completion"),
    INSTRUCTION: ("instruction",),
}
_MAX_KEYS = 20

# A role as it is written -> as it is called in messages.
_ROLES = {"system": "system", "user": "user", "assistant": "assistant"}
_SHAREGPT_ROLES = _ROLES | {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
# A role, or None at the beginning -> those that may come next.
_NEXT: dict[str | None, tuple[str, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
}
_TEXT_KEYS = ("text", "value", "content")
_TOOL_KEYS = ("tools", "functions", "tool_calls", "function_call")
_NO_TOOLS: tuple[object, ...] = (None, [], "", "[]")
# Thoughts of an answer, as servers of models write them, and the weight of an answer in the loss, as OpenAI, axolotl,
# ms-swift, tinker and home-llm write it.
_THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details", "thinking")
_WEIGHTS = ("weight", "train", "training", "trainable", "train_on_turn", "loss")
_WEIGHT_ONE: tuple[object, ...] = (None, 1, "1", "1.0", "true")  # True is 1
_FALSE = ("false", "0", "0.0")  # also as pandas and spreadsheets write it

Message = dict[str, str]
Row = dict[str, object]


class RowError(Exception):
    """A row that cannot be used.

    Args:
        code: of the problem, as in `errors.toml`.
        details: of the problem.
    """

    def __init__(self, code: str, **details: object) -> None:
        super().__init__(code)
        self.code = code
        self.details = details


def form_of(row: Row) -> str:
    """The form of a row, recognised by its keys; a key without a value counts as absent.

    Raises:
        RowError: it has none of the forms, or two.
    """
    filled = {key for key, value in row.items() if value is not None}
    whole = [form for form, keys in _FORM_KEYS.items() if filled.issuperset(keys)]
    if len(whole) > 1:
        raise RowError("two-forms", keys=" and ".join(", ".join(_FORM_KEYS[form]) for form in whole))
    forms = whole or [form for form, keys in _FORM_KEYS.items() if not row.keys().isdisjoint(keys)]
    if len(forms) != 1:
        raise RowError("unknown-form", keys=_keys(filled))
    in_lists = isinstance(row.get("prompt"), list) or isinstance(row.get("completion"), list)
    return PROMPT_LISTS if forms == [PROMPT_TEXTS] and in_lists else forms[0]


def messages_of(row: Row, form: str) -> list[Message]:
    """The messages of a row, each with `role` (system, user, assistant) and `content`: user and assistant by turns.

    Texts stay as they are, except for halves of surrogate pairs. A system message without text is left out.

    Raises:
        RowError: a text or list is missing, empty or of the wrong type, a role is unknown or out of order, the last
            message is not an answer, or the row marks an answer in a way that training would ignore.
    """
    _check_accepted(row, form)
    for key in _TOOL_KEYS:
        if row.get(key) not in _NO_TOOLS:
            raise RowError("tool-calls", where="the row", key=key)
    _check_weight(row, ("weight",), "the row")
    if form not in (MESSAGES, CONVERSATIONS):  # with lists of messages, thoughts of the row belong to no one answer
        _check_thoughts(row, "the row")
    if form == PROMPT_TEXTS:
        messages = _turn(_filled(row, "prompt"), _filled(row, "completion"))
    elif form == PROMPT_LISTS:
        messages = _prompt_and_completion(row)
    elif form == INSTRUCTION:
        messages = _instruction_and_output(row)
    else:
        messages = _listed(row, form)
    _check_order(messages)
    _check_contents(messages)
    return _with_system(messages if messages[0]["content"].strip() else messages[1:], _text(row, "system"), form)


def _check_accepted(row: Row, form: str) -> None:
    """Refuse a rejected answer, as in data for KTO and of thumbs up and down."""
    for key in ("label", "kto_tag"):
        value = row.get(key)
        # With messages or an instruction, a label of 0 may be a class.
        marks_answer = value is False or key == "kto_tag" or form in (PROMPT_TEXTS, PROMPT_LISTS)
        if marks_answer and (written := str(value).strip().lower()) in _FALSE:
            raise RowError("rejected-answer", key=key, written=written)


def _with_system(messages: list[Message], system: str, form: str) -> list[Message]:
    """The messages, with the row's system message in front, if it has one."""
    if not system.strip():
        return messages
    if form == PROMPT_TEXTS:
        raise RowError("system-with-texts")
    if messages[0]["role"] == "system":
        raise RowError("two-systems")
    return [{"role": "system", "content": system}, *messages]


def _keys(keys: set[str]) -> str:
    shown = ", ".join(sorted(shortened(without_surrogates(key)) for key in keys)[:_MAX_KEYS])
    return f"the keys {shown}" if keys else "no key with a value"


def _turn(prompt: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _prompt_and_completion(row: Row) -> list[Message]:
    prompt, completion = _listed(row, "prompt"), _listed(row, "completion")
    first = completion[0]["role"]
    if first != "assistant":
        raise RowError("wrong-order", where="message 1 of completion", role=first, expected="assistant")
    return prompt + completion


def _instruction_and_output(row: Row) -> list[Message]:
    asked = [text for text in (_text(row, "instruction"), _text(row, "input")) if text.strip()]
    if not asked:
        raise RowError("no-prompt", where="instruction")
    messages: list[Message] = []
    history = row.get("history") or []
    pairs = history if isinstance(history, list) else [history]
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            expected = "a list of [user, assistant] pairs of texts"
            raise RowError("value-of-wrong-type", where="history", held=kind_of(pair), expected=expected)
        messages += _turn(*map(without_surrogates, pair))
    return messages + _turn("\n\n".join(asked), _filled(row, "output"))


def _text(row: Row, key: str) -> str:
    """A text, empty if it is missing."""
    value = row.get(key)
    if not isinstance(value, str | None):
        raise RowError("value-of-wrong-type", where=key, held=kind_of(value), expected="text")
    return without_surrogates(value or "")


def _filled(row: Row, key: str) -> str:
    text = _text(row, key)
    if not text.strip():
        raise _empty(row, key)
    return text


def _empty(row: Row, key: str) -> RowError:
    if key not in row:
        return RowError("no-key", key=key, keys=_keys(set(row)))
    code = {"prompt": "no-prompt", "completion": "no-answer", "output": "no-answer"}.get(key, "no-messages")
    return RowError(code, where=key)


def _listed(row: Row, key: str) -> list[Message]:
    """The messages in a list, at least one."""
    value = row.get(key)
    if value is None or value == []:
        raise _empty(row, key)
    if not isinstance(value, list):
        raise RowError("value-of-wrong-type", where=key, held=kind_of(value), expected="a list of messages")
    return [_message(message, key, f"message {number} of {key}") for number, message in enumerate(value, 1)]


def _message(message: object, key: str, where: str) -> Message:
    expected = "{from, value}" if key == CONVERSATIONS else "{role, content}"
    if not isinstance(message, dict):
        raise RowError("value-of-wrong-type", where=where, held=kind_of(message), expected=expected)
    roles, role_key, content_key = _ROLES, "role", "content"
    if key == CONVERSATIONS:
        roles = _SHAREGPT_ROLES
        if message.get("role") is None:
            role_key, content_key = "from", "value"
    role = message.get(role_key)
    if not isinstance(role, str):
        raise RowError("value-of-wrong-type", where=f"{where}: {role_key}", held=kind_of(role), expected="text")
    if role not in roles:
        name = shortened(without_surrogates(role))
        raise RowError("unknown-role", where=where, role=name, expected=", ".join(roles))
    _check_ignored_keys(message, roles[role], where)
    return {"role": roles[role], "content": _content(message.get(content_key), f"{where}: {content_key}")}


def _check_ignored_keys(message: Row, role: str, where: str) -> None:
    """Refuse keys of a message that change what should be learned, and that training would ignore."""
    for key in ("tool_calls", "function_call"):
        if message.get(key):
            raise RowError("tool-calls", where=where, key=key)
    _check_thoughts(message, where)
    if role == "assistant":
        _check_weight(message, _WEIGHTS, where)


def _check_thoughts(message: Row, where: str) -> None:
    for key in _THOUGHTS:
        thoughts = message.get(key)
        if thoughts.strip() if isinstance(thoughts, str) else thoughts:
            raise RowError("thoughts", where=where, key=key)


def _check_weight(message: Row, keys: tuple[str, ...], where: str) -> None:
    for key in keys:
        weight = message.get(key)
        if weight not in _WEIGHT_ONE:
            raise RowError("weighted-answer", where=where, key=key, weight=shortened(without_surrogates(str(weight))))


def _content(value: object, where: str) -> str:
    if isinstance(value, str):
        return without_surrogates(value)
    if not isinstance(value, list):
        raise RowError(
            "value-of-wrong-type", where=where, held=kind_of(value), expected="text or a list of parts with text"
        )
    return "".join(_part(part, f"{where}, part {number}") for number, part in enumerate(value, 1))


def _part(part: object, where: str) -> str:
    """The text of a typed part, `{"type": "text", "text": ...}`."""
    expected = '{"type": "text", "text": ...}'
    if not isinstance(part, dict):
        raise RowError("value-of-wrong-type", where=where, held=kind_of(part), expected=expected)
    if part.get("type") != "text":
        raise RowError("part-not-text", where=where, type=shortened(without_surrogates(str(part.get("type")))))
    for key in _TEXT_KEYS:
        if isinstance(text := part.get(key), str):
            return without_surrogates(text)
    raise RowError("value-of-wrong-type", where=where, held="no text", expected=expected)


def _check_order(messages: list[Message]) -> None:
    previous = None
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in _NEXT[previous]:
            expected = " or ".join(_NEXT[previous])
            raise RowError("wrong-order", where=f"message {number}", role=role, expected=expected)
        previous = role
    if previous != "assistant":
        raise RowError("answer-not-last", role=previous)


def _check_contents(messages: list[Message]) -> None:
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role != "system" and not message["content"].strip():
            raise RowError("no-answer" if role == "assistant" else "no-prompt", where=f"message {number} ({role})")

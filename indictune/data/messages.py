"""The messages of one row, whichever of the usual forms it is written in."""

from __future__ import annotations

from indictune.data.columns import shortened
from indictune.data.json_rows import kind_of
from indictune.data.read_files import without_halves

MESSAGES = "messages"
CONVERSATIONS = "conversations"
PROMPT_TEXTS = "prompt and completion as texts"
PROMPT_LISTS = "prompt and completion as lists of messages"
INSTRUCTION = "instruction and output"

# The keys that tell a form; the two of prompt and completion are told apart by what stands under the keys.
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
# What stands beside an answer's text in others' data: its thoughts, as servers of models give them, and how much it
# counts, as OpenAI, axolotl, ms-swift, tinker and home-llm write it.
_THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details", "thinking")
_WEIGHTS = ("weight", "train", "training", "trainable", "train_on_turn", "loss")
_COUNTS: tuple[object, ...] = (None, 1, "1", "1.0", "true")  # True is 1
_FALSE = ("false", "0", "0.0")  # as pandas and spreadsheets write it too

_NO_ANSWER = "no answer"
_NO_PROMPT = "an empty prompt"
_NO_MESSAGES = "no messages"
_WRONG_ORDER = "roles out of order"
_WRONG_ROLE = "an unknown role"
_WRONG_TYPE = "a value of the wrong type"
_NO_FORM = "an unknown form"
_TWO_FORMS = "two forms at once"
_TWO_SYSTEMS = "two system messages"
_NO_SYSTEM = "system beside plain texts"
_REJECTED = "a rejected answer"
_WEIGHTED = "an answer of another weight"
_CALLS = "a call of tools"
_THINKS = "thoughts beside an answer"

Message = dict[str, str]
Row = dict[str, object]


class RowError(Exception):
    """A row that cannot be used. The message says what is wrong with it, and what to do.

    Args:
        kind: as in "3 more with <kind>".
        what: the message.
    """

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


def form_of(row: Row) -> str:
    """The form that a row is written in, told from its keys; a key without a value counts as absent.

    Raises:
        RowError: it is in none of the forms, or in two at once.
    """
    filled = {key for key, value in row.items() if value is not None}
    whole = [form for form, keys in _FORM_KEYS.items() if filled.issuperset(keys)]
    if len(whole) > 1:
        keys = " and ".join(", ".join(_FORM_KEYS[form]) for form in whole)
        raise RowError(_TWO_FORMS, f"has both {keys}; leave out one of them.")
    forms = whole or [form for form, keys in _FORM_KEYS.items() if not row.keys().isdisjoint(keys)]
    if len(forms) != 1:
        expected = "messages, or conversations, or prompt and completion, or instruction and output"
        raise RowError(_NO_FORM, f"{_keys(filled)}; expected {expected}. Rename the keys.")
    in_lists = isinstance(row.get("prompt"), list) or isinstance(row.get("completion"), list)
    return PROMPT_LISTS if forms == [PROMPT_TEXTS] and in_lists else forms[0]


def messages_of(row: Row, form: str) -> list[Message]:
    """The messages of a row, each with `role` (system, user, assistant) and `content`: user and assistant by turns.

    Texts are as in the row, but for halves of surrogate pairs. A system message without text is left out.

    Raises:
        RowError: a text or list is missing, empty or of the wrong type, a role is unknown or not in its place, the
            last message is not an answer, or the row says of an answer what training would not heed.
    """
    _check_accepted(row, form)
    for key in _TOOL_KEYS:
        if row.get(key) not in _NO_TOOLS:
            raise RowError(_CALLS, f"has {key}, which no chat template is given; remove the row, or the key.")
    _check_weight(row, ("weight",), "the row")
    if form not in (MESSAGES, CONVERSATIONS):  # beside lists of messages they are of no one answer
        _check_thoughts(row, "the row")
    if form == PROMPT_TEXTS:
        messages = _turn(_filled(row, "prompt", _NO_PROMPT), _filled(row, "completion", _NO_ANSWER))
    elif form == PROMPT_LISTS:
        messages = _prompt_and_completion(row)
    elif form == INSTRUCTION:
        messages = _instruction_and_output(row)
    else:
        messages = _listed(row, form, _NO_MESSAGES)
    _check_order(messages)
    _check_contents(messages)
    return _with_system(messages if messages[0]["content"].strip() else messages[1:], _text(row, "system"), form)


def _check_accepted(row: Row, form: str) -> None:
    """Refuse an answer that was rejected, as data for KTO and of thumbs up and down has them."""
    for key in ("label", "kto_tag"):
        value = row.get(key)
        # Beside messages or an instruction a label of 0 may be a class.
        tells = value is False or key == "kto_tag" or form in (PROMPT_TEXTS, PROMPT_LISTS)
        if tells and (written := str(value).strip().lower()) in _FALSE:
            what = f"{key} is {written}, as of an answer that was rejected"
            raise RowError(_REJECTED, f"{what}; remove the row, or the key.")


def _with_system(messages: list[Message], system: str, form: str) -> list[Message]:
    """With the system message that stands beside them, if any."""
    if not system.strip():
        return messages
    if form == PROMPT_TEXTS:
        where = "beside prompt and completion as texts; write it into prompt, or give messages."
        raise RowError(_NO_SYSTEM, f"system has no place {where}")
    if messages[0]["role"] == "system":
        raise RowError(_TWO_SYSTEMS, "has both system and a message of system; leave out one of them.")
    return [{"role": "system", "content": system}, *messages]


def _keys(keys: set[str]) -> str:
    shown = ", ".join(sorted(shortened(without_halves(key)) for key in keys)[:_MAX_KEYS])
    return f"it has the keys {shown}" if keys else "it has no key with a value"


def _turn(prompt: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _prompt_and_completion(row: Row) -> list[Message]:
    prompt, completion = _listed(row, "prompt", _NO_PROMPT), _listed(row, "completion", _NO_ANSWER)
    first = completion[0]["role"]
    if first != "assistant":
        raise RowError(_WRONG_ORDER, f"completion begins with {first}; expected assistant.")
    return prompt + completion


def _instruction_and_output(row: Row) -> list[Message]:
    asked = [text for text in (_text(row, "instruction"), _text(row, "input")) if text.strip()]
    if not asked:
        raise RowError(_NO_PROMPT, "instruction and input are empty; fill one of them, or remove the row.")
    messages: list[Message] = []
    history = row.get("history") or []
    pairs = history if isinstance(history, list) else [history]
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise RowError(_WRONG_TYPE, "history: expected a list of [user, assistant] pairs of texts.")
        messages += _turn(*map(without_halves, pair))
    return messages + _turn("\n\n".join(asked), _filled(row, "output", _NO_ANSWER))


def _text(row: Row, key: str) -> str:
    """A text, empty where there is none."""
    value = row.get(key)
    if not isinstance(value, str | None):
        raise RowError(_WRONG_TYPE, f"{key} holds {kind_of(value)}, expected text.")
    return without_halves(value or "")


def _filled(row: Row, key: str, kind: str) -> str:
    text = _text(row, key)
    if not text.strip():
        raise RowError(kind, f"{_empty(row, key)}; give it a text, or remove the row.")
    return text


def _empty(row: Row, key: str) -> str:
    return f"{key} is empty" if key in row else f"there is no {key} ({_keys(set(row))})"


def _listed(row: Row, key: str, kind: str) -> list[Message]:
    """The messages in a list, at least one."""
    value = row.get(key)
    if value is None or value == []:
        raise RowError(kind, f"{_empty(row, key)}; give it messages, or remove the row.")
    if not isinstance(value, list):
        raise RowError(_WRONG_TYPE, f"{key} holds {kind_of(value)}, expected a list of messages.")
    return [_message(message, key, f"message {number} of {key}") for number, message in enumerate(value, 1)]


def _message(message: object, key: str, where: str) -> Message:
    expected = "{from, value}" if key == CONVERSATIONS else "{role, content}"
    if not isinstance(message, dict):
        raise RowError(_WRONG_TYPE, f"{where} is {kind_of(message)}, expected {expected}.")
    roles, role_key, content_key = _ROLES, "role", "content"
    if key == CONVERSATIONS:
        roles = _SHAREGPT_ROLES
        if message.get("role") is None:
            role_key, content_key = "from", "value"
    role = message.get(role_key)
    if not isinstance(role, str):
        raise RowError(_WRONG_TYPE, f"{where}: {role_key} holds {kind_of(role)}; expected {expected}.")
    if role not in roles:
        name = shortened(without_halves(role))
        known = ", ".join(roles)
        raise RowError(_WRONG_ROLE, f"{where} is of {name}; expected one of {known}. Rename it, or remove the row.")
    _check_heeded(message, roles[role], where)
    return {"role": roles[role], "content": _content(message.get(content_key), f"{where}: {content_key}")}


def _check_heeded(message: Row, role: str, where: str) -> None:
    """Refuse what is said of a message beside its text, and changes what is to be learned."""
    for key in ("tool_calls", "function_call"):
        if message.get(key):
            raise RowError(_CALLS, f"{where} has {key}, which is not trained; remove the row, or the key.")
    _check_thoughts(message, where)
    if role == "assistant":
        _check_weight(message, _WEIGHTS, where)


def _check_thoughts(message: Row, where: str) -> None:
    for key in _THOUGHTS:
        thoughts = message.get(key)
        if thoughts.strip() if isinstance(thoughts, str) else thoughts:
            way_out = "write them into the text, as the model writes its thoughts, or remove the row, or the key"
            raise RowError(_THINKS, f"{where} has {key}, which no chat template is given; {way_out}.")


def _check_weight(message: Row, keys: tuple[str, ...], where: str) -> None:
    for key in keys:
        weight = message.get(key)
        if weight not in _COUNTS:
            told = f"the {key} {shortened(without_halves(str(weight)))}, but every answer counts as 1"
            raise RowError(_WEIGHTED, f"{where} has {told}; remove the row, or the key.")


def _content(value: object, where: str) -> str:
    if isinstance(value, str):
        return without_halves(value)
    if not isinstance(value, list):
        raise RowError(_WRONG_TYPE, f"{where} holds {kind_of(value)}, expected text or a list of parts with text.")
    return "".join(_part(part, f"{where}, part {number}") for number, part in enumerate(value, 1))


def _part(part: object, where: str) -> str:
    """The text of a typed part, `{"type": "text", "text": ...}`."""
    if not isinstance(part, dict):
        raise RowError(_WRONG_TYPE, f'{where} is {kind_of(part)}, expected {{"type": "text", "text": ...}}.')
    if part.get("type") != "text":
        kind = shortened(without_halves(str(part.get("type"))))
        raise RowError(_WRONG_TYPE, f"{where} is of type {kind}; only text is read. Remove the part or the row.")
    for key in _TEXT_KEYS:
        if isinstance(text := part.get(key), str):
            return without_halves(text)
    raise RowError(_WRONG_TYPE, f"{where} has no text; expected it as {', '.join(_TEXT_KEYS)}.")


def _check_order(messages: list[Message]) -> None:
    previous = None
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role not in _NEXT[previous]:
            came = f"after {previous}" if previous else "first"
            expected = " or ".join(_NEXT[previous])
            raise RowError(_WRONG_ORDER, f"message {number} is of {role}, {came}; expected {expected}.")
        previous = role
    if previous != "assistant":
        raise RowError(_NO_ANSWER, f"the last message is of {previous}; add one of assistant, or remove the row.")


def _check_contents(messages: list[Message]) -> None:
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role != "system" and not message["content"].strip():
            kind = _NO_ANSWER if role == "assistant" else _NO_PROMPT
            raise RowError(kind, f"message {number}, of {role}, is empty; give it a text, or remove the row.")

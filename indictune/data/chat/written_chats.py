"""Write conversations out by a chat template, and find their answers in the text."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from indictune.data.chat.messages import Message, RowError

# Templates that write today's date get this day, so that a run resumed after midnight has the same rows. LLaMA 3's own
# templates fall back on it. It is a macro because transformers turns a function given to a template into text.
_DAY = datetime.datetime(2024, 7, 26)
_DIRECTIVES = ("%a", "%A", "%b", "%B", "%d", "%H", "%I", "%j", "%m", "%M", "%p", "%S", "%x", "%X", "%y", "%Y")
_FORMATTED = "".join(f"|replace('{each}', '{_DAY.strftime(each)}')" for each in _DIRECTIVES)
_TODAY = f"{{%- macro strftime_now(format) -%}}{{{{ format{_FORMATTED} }}}}{{%- endmacro -%}}"

_ANSWER_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THOUGHTS = re.compile(r"\s*<think>.*?(?:</think>|\Z)", re.DOTALL)
_OPEN, _CLOSE = "<think>", "</think>"
_OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")  # by a prompt
_SHOWN = 40  # characters of a difference

Span = tuple[int, int]
Written = tuple[str, list[Span]]


def marks_answers(template: str) -> bool:
    """Whether a template marks answers with `{% generation %}`."""
    return _ANSWER_MARK.search(template) is not None


def stand_in(number: int) -> str:
    """A content that no template writes by itself, another one for each number."""
    return f"0192837465-{number}-"


def apply_template(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    marked: bool,
    open_answer: bool = False,
) -> Written:
    """The text of a conversation, and with `marked` the start and end of each answer in it."""
    rendered: Any = render_jinja_template(
        [cast(list[dict[str, Any]], messages)],
        chat_template=_TODAY + template if "strftime_now" in template else template,
        return_assistant_tokens_mask=marked,
        add_generation_prompt=open_answer,
        **cast(dict[str, Any], tokenizer.special_tokens_map),
    )
    (text,), spans = rendered
    return text, spans[0] if marked else []


@dataclass
class ChatWriter:
    """Write conversations out, with the characters that the loss counts.

    These are what the template marks as answers, each of which must stand whole after its prompt. A template without
    marks writes each conversation turn by turn: what follows the prompt of an answer, to the first token that ends an
    answer, is the answer.

    Args:
        ends: texts of the tokens that end an answer.
        train_on_prompts: the loss counts all characters.
        train_on_thinking: the loss counts those from `<think>` to `</think>` too.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str
    ends: Sequence[str]
    train_on_prompts: bool
    train_on_thinking: bool = True
    _dropped: dict[tuple[str, ...], int | None] = field(default_factory=dict, init=False)

    def write(self, messages: Sequence[Message]) -> list[Written]:
        """The texts that a conversation is learned from. Each answer is counted in one of them.

        The last text is the whole conversation. An answer that the template writes otherwise there, such as one whose
        thoughts are left out once another message follows, has a text of its own before it, which ends with it.

        Raises:
            RowError: the template drops a message or thoughts, doubles their block, or does not begin an answered
                conversation as it writes its prompt.
            Exception: the template refuses the conversation.
        """
        self._check_dropped(messages)
        if self.train_on_prompts:
            text = self.text(messages)
            texts = [(text, [(0, len(text))])]
        elif marks_answers(self.template):
            texts = [self._by_marks(messages)]
        else:
            texts = self._by_turns(messages)
        if self.train_on_thinking:
            return texts
        return [(text, [part for span in spans for part in _without_thoughts(text, span)]) for text, spans in texts]

    def text(self, messages: Sequence[Message], open_answer: bool = False) -> str:
        """The text of messages, and with `open_answer` what opens the answer to them."""
        return apply_template(messages, self.tokenizer, self.template, marked=False, open_answer=open_answer)[0]

    def _by_marks(self, messages: Sequence[Message]) -> Written:
        whole, spans = apply_template(messages, self.tokenizer, self.template, marked=True)
        numbers = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant"]
        starts = [self._after_prompt(messages, number, whole) for number in numbers]
        for number, start, following in zip(numbers, starts, [*starts[1:], len(whole)], strict=True):
            end = max((end for _, end in spans if start < end <= following), default=following)
            _end_of_content(messages[number - 1]["content"], whole[:end], start, number)
        return whole, spans

    def _by_turns(self, messages: Sequence[Message]) -> list[Written]:
        whole = self.text(messages)
        of_whole: list[Span] = []
        alone: list[Written] = []
        for number, message in enumerate(messages, 1):
            if message["role"] != "assistant":
                continue
            text = whole if number == len(messages) else self.text(messages[:number])
            start = self._after_prompt(messages, number, text)
            after = _end_of_content(message["content"], text, start, number)
            ends = [text.find(end, after) + len(end) for end in self.ends if end in text[after:]]
            end = min(ends, default=len(text))
            if whole.startswith(text[:end]):
                of_whole.append((start, end))
            else:
                alone.append((text, [(start, end)]))
        return [*alone, (whole, of_whole)]

    def _after_prompt(self, messages: Sequence[Message], number: int, text: str) -> int:
        """Where a text that must begin with the prompt of the answer `number` goes on."""
        prompt = self.text(messages[: number - 1], open_answer=True)
        if not text.startswith(prompt):
            pairs = enumerate(zip(prompt, text, strict=False))
            at = next((index for index, (mine, other) in pairs if mine != other), len(text))
            shown = {"shorter": repr(prompt[at : at + _SHOWN]), "longer": repr(text[at : at + _SHOWN])}
            raise RowError("template-rewrites-prompt", number=number, at=at, **shown)
        return len(prompt)

    def _check_dropped(self, messages: Sequence[Message]) -> None:
        """Refuse a conversation of which the template drops a message: stand-ins for its messages show it."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._dropped:
            text = self.text([{"role": role, "content": stand_in(number)} for number, role in enumerate(roles)])
            lost = (number for number in range(len(roles)) if stand_in(number) not in text)
            self._dropped[roles] = next(lost, None)
        dropped = self._dropped[roles]
        if dropped is not None:
            raise RowError("template-drops-text", number=dropped + 1, role=roles[dropped])


def _end_of_content(content: str, text: str, start: int, number: int) -> int:
    """Where the content of an answer that begins at `start`, and with which the text ends, is written to its end."""
    opened = _OPENED.search(text, 0, start)
    written = text[opened.start() if opened else start :]
    for part in re.split(f"{_OPEN}|{_CLOSE}", content):
        found = text.find(part.strip(), start)
        if found < 0:
            raise RowError("template-drops-text", number=number, role="assistant")
        start = found + len(part.strip())
    if any(0 < content.count(each) < written.count(each) for each in (_OPEN, _CLOSE)):
        raise RowError("template-doubles-thoughts", number=number)
    return start


def _without_thoughts(text: str, span: Span) -> Iterator[Span]:
    """The parts of an answer outside its thinking blocks, of which the prompt may have opened the first."""
    first, last = span
    if text[:first].rstrip().endswith(_OPEN):
        closed = text.find(_CLOSE, first, last)
        first = last if closed < 0 else closed + len(_CLOSE)
    for start, end in [*(found.span() for found in _THOUGHTS.finditer(text, first, last)), (last, last)]:
        if first < start:
            yield first, start
        first = end

"""How the messages of a conversation are written out as one text."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from indictune.errors import Problems, UserError

_TEMPLATES = resources.files("indictune.data") / "chat_templates"
_ANSWER_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SPECIAL_TOKEN = re.compile(r"<\|[^\s<>|]+\|>")
_MARKS_IN_LETTERS = ("[INST]", "[/INST]")  # of LLaMA 2, whose tokenizer has no tokens for them
EXAMPLE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
JINJA_ERRORS = (Exception,)  # a template computes, and can go wrong in any way

# The day that a template writes as today's, so that a run goes on after midnight with the rows that it had. It is the
# one that LLaMA 3's own templates fall back on. transformers makes a text of a function that is given to a template.
_DAY = datetime.datetime(2024, 7, 26)
_DIRECTIVES = ("%a", "%A", "%b", "%B", "%d", "%H", "%I", "%j", "%m", "%M", "%p", "%S", "%x", "%X", "%y", "%Y")
_FORMATTED = "".join(f"|replace('{each}', '{_DAY.strftime(each)}')" for each in _DIRECTIVES)
_TODAY = f"{{%- macro strftime_now(format) -%}}{{{{ format{_FORMATTED} }}}}{{%- endmacro -%}}"

Message = dict[str, str]
Span = tuple[int, int]
Written = tuple[str, list[Span]]


def choose_template(
    tokenizer: PreTrainedTokenizerBase, name: str | None, as_written: bool, train_on_prompts: bool
) -> str:
    """The jinja text that writes out the messages of a run.

    Args:
        tokenizer: of the model.
        name: `--chat_template`: one of the package's own or a .jinja file. None takes the tokenizer's own, with the
            answers marked as TRL marks them where it does not mark them itself.
        as_written: the rows are prompt and completion texts; None then leaves them as they are.
        train_on_prompts: the answers need no marks, because the loss counts every token.

    Raises:
        UserError: there is no such template, its jinja fails, it does not mark the answers, or the tokenizer lacks
            special tokens that it writes.
    """
    if name is None and not as_written:
        origin = f"The chat template of {tokenizer.name_or_path}"
        template = _own_template(tokenizer, train_on_prompts)
    else:
        name = name or "plain"
        origin, template = f"--chat_template {name}", _named_template(name)
    _check_template(template, origin, tokenizer, train_on_prompts)
    return template


def marks_answers(template: str) -> bool:
    """Whether a template marks the answers that it writes."""
    return _ANSWER_MARK.search(template) is not None


def marks_of(template: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The marks that a template writes around texts; none of `plain`, which repeats none that they hold."""
    if template == _named_template("plain"):
        return ()
    text, _ = written_out(EXAMPLE, tokenizer, template, marked=False)
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(mark for mark in (*special, *_MARKS_IN_LETTERS) if mark in text)


def _own_template(tokenizer: PreTrainedTokenizerBase, train_on_prompts: bool) -> str:
    try:
        own = tokenizer.get_chat_template()
    except ValueError as error:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template; give --chat_template {_names()}, or a "
            ".jinja file."
        ) from error
    if train_on_prompts or marks_answers(own):
        return own
    from trl.chat_template_utils import get_training_chat_template

    try:
        return get_training_chat_template(tokenizer) or own
    except (ValueError, *JINJA_ERRORS):
        return own  # unknown to TRL; what is wrong with it is said later


def _named_template(name: str) -> str:
    path = _TEMPLATES / f"{name}.jinja" if name in _own_names() else Path(name)
    if not path.name.endswith(".jinja") or not path.is_file():
        raise UserError(f"--chat_template {name}: there is no such template; expected {_names()}, or a .jinja file.")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--chat_template {name}: cannot be read: {error}.") from error


def _own_names() -> list[str]:
    files = (file.name for file in _TEMPLATES.iterdir())
    return sorted(name.removesuffix(".jinja") for name in files if name.endswith(".jinja"))


def _names() -> str:
    *names, last = _own_names()
    return f"{', '.join(names)} or {last}"


def _check_template(template: str, origin: str, tokenizer: PreTrainedTokenizerBase, train_on_prompts: bool) -> None:
    """Write out a short conversation.

    Raises:
        UserError: that fails, marks no answer where one is needed, or needs special tokens that the tokenizer lacks.
    """
    marked = marks_answers(template)
    try:
        text, spans = written_out(EXAMPLE, tokenizer, template, marked)
    except JINJA_ERRORS as error:
        raise UserError(f"{origin}: its jinja fails: {' '.join(str(error).split())}.") from error
    problems = Problems()
    if not spans and not train_on_prompts:
        problems.append(
            f"{origin}: does not mark the answers; put {{% generation %}} and {{% endgeneration %}} around an answer "
            f"and its end-of-turn token, give --chat_template {_names()}, or --train_on_prompts true."
        )
    lacking = sorted(set(_SPECIAL_TOKEN.findall(text)) - set(tokenizer.get_added_vocab()))
    if tokenizer.eos_token is None and re.search(r"\beos_token\b", template):
        lacking.append("an end-of-text token (eos_token)")
    if lacking:
        problems.append(
            f"{origin}: writes {', '.join(lacking)}, which the tokenizer of {tokenizer.name_or_path} does not have "
            "and would cut to pieces; give --chat_template llama2 or plain, which need none but an end-of-text token."
        )
    problems.raise_any()


def written_out(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    marked: bool,
    open_answer: bool = False,
) -> Written:
    """The text of a conversation, and where `marked` says so the characters of its answers, from and up to."""
    texts, spans = cast(
        tuple[list[str], list[list[Span]]],
        render_jinja_template(
            [cast(list[dict[str, Any]], messages)],
            chat_template=_TODAY + template if "strftime_now" in template else template,
            return_assistant_tokens_mask=marked,
            add_generation_prompt=open_answer,
            **cast(dict[str, Any], tokenizer.special_tokens_map),
        ),
    )
    return texts[0], spans[0] if marked else []

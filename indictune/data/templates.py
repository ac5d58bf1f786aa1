"""Choose a chat template, and write the messages of a conversation as one text."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from indictune.errors import Problems, UserError, problem

_TEMPLATES = resources.files("indictune.data") / "chat_templates"
PLAIN = (_TEMPLATES / "plain.jinja").read_text(encoding="utf-8")
_ANSWER_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SPECIAL_TOKEN = re.compile(r"<\|[^\s<>|]+\|>")
EXAMPLE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

# Templates that write today's date get this day, so that a run resumed after midnight has the same rows. LLaMA 3's own
# templates fall back on it. It is a macro because transformers turns a function given to a template into text.
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
        name: `--chat_template`: a built-in template or a .jinja file. None takes the tokenizer's own, or TRL's
            version of that, which marks answers.
        as_written: the rows are prompt and completion texts; without a name, they stay as they are.
        train_on_prompts: answers need no marks, because the loss counts every token.

    Raises:
        UserError: there is no such template, its jinja fails, it does not mark answers, or the tokenizer lacks special
            tokens that it writes.
    """
    if name is None and not as_written:
        name, template = f"of {tokenizer.name_or_path}", _own_template(tokenizer, train_on_prompts)
    else:
        name, template = name or "plain", _named_template(name or "plain")
    _check_template(template, name, tokenizer, train_on_prompts)
    return template


def _own_template(tokenizer: PreTrainedTokenizerBase, train_on_prompts: bool) -> str:
    """The tokenizer's template, or TRL's version, which marks answers."""
    try:
        own = tokenizer.get_chat_template()
    except ValueError as error:
        raise UserError("chat-template-missing", "--chat_template", name=tokenizer.name_or_path) from error
    if train_on_prompts or _ANSWER_MARK.search(own):
        return own
    from trl.chat_template_utils import get_training_chat_template

    try:
        return get_training_chat_template(tokenizer) or own
    except Exception:  # unknown to TRL, or broken jinja; `_check_template` reports what is wrong
        return own


def _named_template(name: str) -> str:
    path = Path(name) if name.endswith(".jinja") else _TEMPLATES / f"{name}.jinja"
    if not path.is_file():
        raise UserError("chat-template-unknown", "--chat_template", name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("unreadable", "--chat_template", name, reason=error) from error


def _check_template(template: str, name: str, tokenizer: PreTrainedTokenizerBase, train_on_prompts: bool) -> None:
    """Write out a short conversation, and refuse what `choose_template` says."""
    try:
        text, spans = apply_template(EXAMPLE, tokenizer, template, marked=not train_on_prompts)
    except Exception as error:  # a template is a program: it can raise anything
        reason = " ".join(str(error).split())
        raise UserError("chat-template-fails", "--chat_template", name, reason=reason) from error
    problems = Problems()
    if not spans and not train_on_prompts:
        problems.append(problem("chat-template-without-marks", "--chat_template", name))
    lacking = sorted(set(_SPECIAL_TOKEN.findall(text)) - set(tokenizer.get_added_vocab()))
    if tokenizer.eos_token is None and re.search(r"\beos_token\b", template):
        lacking.append("an end-of-text token (eos_token)")
    if lacking:
        tokens = ", ".join(lacking)
        problems.append(
            problem("chat-template-tokens", "--chat_template", name, tokens=tokens, tokenizer=tokenizer.name_or_path)
        )
    problems.raise_any()


def apply_template(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    marked: bool,
    open_answer: bool = False,
) -> Written:
    """The text of a conversation, and with `marked` the start and end of each answer in it."""
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

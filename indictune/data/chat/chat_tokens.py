"""Turn conversations into tokens: choose the chat template, tokenise what it writes, cut, and mark the answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from indictune.data.bad_rows import BadRows
from indictune.data.cache import smaller_batches
from indictune.data.chat.messages import Message, RowError
from indictune.data.chat.written_chats import ChatWriter, Span, Written, apply_template, marks_answers, stand_in
from indictune.data.collation import IGNORED_LABEL
from indictune.errors import Problems, UserError, missing_extra, problem

_TEMPLATES = resources.files("indictune.data") / "chat_templates"
PLAIN = (_TEMPLATES / "plain.jinja").read_text(encoding="utf-8")
_MARKER = re.compile(r"(?<!<)<[^\s<>]+>(?!>)")  # of a turn, such as <start_of_turn>
_ANSWER = stand_in(0)
EXAMPLE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
_ANSWERED = [*EXAMPLE[:1], {"role": "assistant", "content": _ANSWER}]
_THINKING = [*EXAMPLE[:1], {"role": "assistant", "content": "<think>\nc\n</think>\n\nb"}]

# Before a template that opens a thinking block for every answer, unless it is asked not to.
NOT_THINKING = "{%- if enable_thinking is not defined %}{% set enable_thinking = false %}{% endif -%}\n"


def choose_template(
    tokenizer: PreTrainedTokenizerBase, name: str | None, as_written: bool, train_on_prompts: bool
) -> str:
    """The jinja text that writes out the messages of a run.

    Args:
        name: a built-in template or a .jinja file; None takes the tokenizer's own, or TRL's version, with marks.
        as_written: the rows are prompt and completion texts; without a name, they stay as they are.
        train_on_prompts: the loss counts every token, so answers need not be found.

    Raises:
        UserError: no such template, failing jinja, marks on no answer, an answer that does not follow its prompt, or
            special tokens that the tokenizer lacks.
    """
    if name is None and not as_written:
        name, template = f"of {tokenizer.name_or_path}", _own_template(tokenizer, train_on_prompts)
    else:
        name, template = name or "plain", _named_template(name or "plain")
    _check_template(template, name, tokenizer, train_on_prompts)
    try:
        return template if train_on_prompts else _following_prompts(template, tokenizer)
    except RowError as error:
        details: dict[str, Any] = error.details
        raise UserError(error.code, "--chat_template", name, **details) from error


def _own_template(tokenizer: PreTrainedTokenizerBase, train_on_prompts: bool) -> str:
    """The tokenizer's template, or TRL's version, which marks answers, if it writes at least the same."""
    try:
        own = tokenizer.get_chat_template()
    except ValueError as error:
        raise UserError("chat-template-missing", "--chat_template", name=tokenizer.name_or_path) from error
    if train_on_prompts or marks_answers(own):
        return own
    Problems(missing_extra("--chat_template", f"of {tokenizer.name_or_path}", "train", "trl")).raise_any()
    from trl.chat_template_utils import get_training_chat_template

    try:
        marked = get_training_chat_template(tokenizer) or own
        of_own, of_marked = (apply_template(EXAMPLE * 2, tokenizer, each, marked=False)[0] for each in (own, marked))
    except Exception:  # unknown to TRL, or broken jinja; `_check_template` reports what is wrong
        return own
    return marked if of_marked.startswith(of_own) else own


def _named_template(name: str) -> str:
    path = Path(name) if name.endswith(".jinja") else _TEMPLATES / f"{name}.jinja"
    if not path.is_file():
        known = "llama3, llama2, chatml, tulu and plain, or a .jinja file"
        raise UserError("no-such-name", "--chat_template", name, kind="template", known=known)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("unreadable", "--chat_template", name, reason=error) from error


def _following_prompts(template: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The template, or one that does not ask for thoughts, if an answer without thoughts only then follows its prompt.

    Raises `RowError` if an answer with thoughts follows its prompt neither. Broken jinja is left to others.
    """
    found = None
    for messages, each in ((EXAMPLE, template), (EXAMPLE, NOT_THINKING + template), (_THINKING, template)):
        try:
            ChatWriter(tokenizer, each, (), train_on_prompts=False).write(messages)
        except RowError as error:
            found = found or error
        except Exception:
            return template
        else:
            return each
    assert found is not None
    raise found


def _check_template(template: str, name: str, tokenizer: PreTrainedTokenizerBase, train_on_prompts: bool) -> None:
    """Write out a short conversation, and refuse what `choose_template` says."""
    marked = not train_on_prompts and marks_answers(template)
    try:
        text, spans = apply_template(EXAMPLE, tokenizer, template, marked)
    except Exception as error:  # a template is a program: it can raise anything
        reason = " ".join(str(error).split())
        raise UserError("chat-template-fails", "--chat_template", name, reason=reason) from error
    problems = Problems()
    if marked and not any(end > start for start, end in spans):
        problems.append(problem("chat-template-without-marks", "--chat_template", name))
    lacking = [] if _tokens_after_answer(tokenizer, template) else _markers_in_pieces(text, tokenizer)
    if tokenizer.eos_token is None and re.search(r"\beos_token\b", template):
        lacking.append("an end-of-text token (eos_token)")
    if lacking:
        details = {"tokens": ", ".join(lacking), "tokenizer": tokenizer.name_or_path}
        problems.append(problem("chat-template-tokens", "--chat_template", name, **details))
    problems.raise_any()


def _markers_in_pieces(text: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The markers in a text that are no tokens of the tokenizer, which cuts them to pieces."""
    return sorted(set(_MARKER.findall(text)) - set(tokenizer.get_added_vocab()))


def template_notes(tokenizer: PreTrainedTokenizerBase, template: str, train_on_prompts: bool) -> list[str]:
    """Sentences for the user on a template that `choose_template` took: what the model cannot learn of it."""
    marked = not train_on_prompts and marks_answers(template)
    text, spans = apply_template(_ANSWERED, tokenizer, template, marked)
    notes = []
    if template.startswith(NOT_THINKING):
        notes.append(
            "The chat template opens a thinking block before each answer. The run writes conversations with "
            "enable_thinking false, and saves that as the template's default."
        )
    if cut := _markers_in_pieces(text, tokenizer):
        notes.append(f"The tokenizer has no tokens for {', '.join(cut)} of the chat template: it cuts them to pieces.")
    if not (ends := _tokens_after_answer(tokenizer, template)):
        notes.append("The chat template writes no end token after an answer, so the model never learns to stop.")
    elif marked:
        end = str(tokenizer.added_tokens_decoder[ends[0]])
        position = text.index(end, text.index(_ANSWER))
        if not any(first <= position < last for first, last in spans):
            notes.append(
                f"The chat template writes {end} after an answer, but outside its marks, so the model never learns to "
                "stop. Move the token before {% endgeneration %}."
            )
    return notes


BATCH_ROWS = 500  # while it is tokenised, a long row takes megabytes

Ids = npt.NDArray[np.int32]

_LIST = pa.list_(pa.int32())
SCHEMA = pa.schema(
    {"input_ids": _LIST, "labels": _LIST, "length": pa.int32(), "full_length": pa.int32()}
    | {"language": pa.string(), "rows": _LIST}
)


def tokenised_chats(
    batches: Iterable[pa.RecordBatch],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    max_length: int,
    train_on_prompts: bool,
    bad: BadRows,
    positions: int | None = None,
    train_on_thinking: bool = True,
) -> Iterator[pa.RecordBatch]:
    """Write out, tokenise and cut the conversations of a table of `Conversations`.

    Args:
        max_length: rows keep their first tokens, this many.
        train_on_prompts, train_on_thinking: as of `ChatWriter`.
        bad: gets rows that `ChatWriter` refuses, and rows without an answer that counts, or with none left by the cut.
        positions: most tokens that the model reads; None for no limit.

    Yields:
        The columns of `SCHEMA`, in the order of the rows, with a row for each text of `ChatWriter.write`. `labels` has
        the tokens that the loss counts, and -100 for the others. The first token never counts, because nothing
        predicts it. `length` and `full_length` are the tokens after and before the cut. `rows` has the index of the
        conversation, in a list as packs have it.

    Raises:
        UserError: the tokenizer is not a fast one; after the last row, bad rows stop the run, or are too many.
    """
    writer = answer_writer(tokenizer, template, train_on_prompts, train_on_thinking)
    first = good = texts = lost = 0
    for batch in smaller_batches(batches, BATCH_ROWS):
        written = _write_out(batch, writer, bad)
        ids, labels = encode([text for _, text in written], tokenizer) if written else ([], [])
        rows = [row for row, _ in written]
        kept = [each for each in zip(rows, ids, labels, strict=True) if (each[2][:max_length] != IGNORED_LABEL).any()]
        usable = {row for row, *_ in kept}
        lengths = dict(zip(rows, map(len, ids), strict=True))  # of whole conversations, whose texts come last
        add_cut(bad, batch, {row: lengths[row] for row in lengths if row not in usable}, max_length, positions)
        if kept:
            yield _columns(batch, first, kept, max_length)
        first += batch.num_rows
        good += len(usable)
        texts += len(kept)
        lost += sum(row in usable for row in rows) - len(kept)
    if texts > good or lost:
        bad.remark(_remark_on_texts(bad.source, good, texts, lost))
    bad.finish(good)


def answer_writer(
    tokenizer: PreTrainedTokenizerBase, template: str, train_on_prompts: bool, train_on_thinking: bool
) -> ChatWriter:
    """Writes conversations out; raises `UserError` if the tokenizer is not a fast one."""
    if not tokenizer.is_fast:
        raise UserError("slow-tokenizer", "--model_name_or_path", tokenizer.name_or_path)
    ends = [str(tokenizer.convert_ids_to_tokens(token)) for token in answer_ends(tokenizer, template)]
    return ChatWriter(tokenizer, template, ends, train_on_prompts, train_on_thinking)


def _remark_on_texts(source: str, conversations: int, texts: int, lost: int) -> str:
    cut = f" {lost:,} more answers lie beyond --max_length, and are not learned." if lost else ""
    return (
        f"{source}: the chat template writes earlier answers otherwise than the last one, so each such answer is "
        f"learned in a row that ends with it: {conversations:,} conversations make {texts:,} rows.{cut}"
    )


def prompt_ids(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str) -> list[int]:
    """Tokens before the last answer, and those that open an answer."""
    text, _ = apply_template(messages[:-1], tokenizer, template, marked=False, open_answer=True)
    return cast(list[int], tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def answer_ends(tokenizer: PreTrainedTokenizerBase, template: str) -> list[int]:
    """Tokens that end an answer: the first added token that the template writes after one, and the end of a text."""
    return sorted({*_tokens_after_answer(tokenizer, template)[:1], tokenizer.eos_token_id} - {None})


def _tokens_after_answer(tokenizer: PreTrainedTokenizerBase, template: str) -> list[int]:
    """The added tokens that the template writes after the last answer."""
    text, _ = apply_template(_ANSWERED, tokenizer, template, marked=False)
    written = tokenizer(text.partition(_ANSWER)[2], add_special_tokens=False)["input_ids"]
    added = tokenizer.added_tokens_decoder.keys() - {tokenizer.unk_token_id}
    return [token for token in written if token in added]


def _write_out(batch: pa.RecordBatch, writer: ChatWriter, bad: BadRows) -> list[tuple[int, Written]]:
    """The texts of rows, and the characters that the loss counts, with the rows' indices in the batch."""
    written: list[tuple[int, Written]] = []
    for row, messages in enumerate(batch["messages"].to_pylist()):
        try:
            texts = writer.write(messages)
        except RowError as error:
            add_bad(bad, batch, row, error.code, **error.details)
        except Exception as error:  # a template is a program: it can raise anything
            add_bad(bad, batch, row, "template-refuses-row", reason=error)
        else:
            if any(end > start for _, spans in texts for start, end in spans):
                written += [(row, each) for each in texts]
            else:
                add_bad(bad, batch, row, "answer-unmarked")
    return written


def add_cut(
    bad: BadRows, batch: pa.RecordBatch, lengths: Mapping[int, int], max_length: int, positions: int | None
) -> None:
    """Add rows of a batch whose answers are cut away; `lengths` has the tokens of each."""
    for row, length in lengths.items():
        is_beyond = positions is not None and length > positions
        code = "answers-beyond-positions" if is_beyond else "answers-cut-off"
        add_bad(bad, batch, row, code, max_length=max_length, length=length, positions=positions)


def add_bad(bad: BadRows, batch: pa.RecordBatch, row: int, code: str, **details: object) -> None:
    """Add a row of a batch."""
    kept = [name for name in ("messages", "rejected", "is_good") if name in batch.schema.names]
    bad.add(batch["line"][row].as_py(), code, {name: batch[name][row].as_py() for name in kept}, **details)


def _columns(
    batch: pa.RecordBatch, first: int, kept: Sequence[tuple[int, Ids, Ids]], max_length: int
) -> pa.RecordBatch:
    """The columns of the rows that are kept: `kept` has the index in the batch, tokens and labels of each, uncut.

    `first` is the index of the batch's first row in the split.
    """
    rows, ids, labels = zip(*kept, strict=True)
    full_lengths = np.array([len(each) for each in ids], dtype=np.int32)
    lengths = np.minimum(full_lengths, np.int32(max_length))
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    tokens = (np.concatenate([each[:max_length] for each in column]) for column in (ids, labels))
    indices = pa.ListArray.from_arrays(np.arange(len(rows) + 1, dtype=np.int32), np.array(rows, np.int32) + first)
    lists = (pa.ListArray.from_arrays(ends, values) for values in tokens)
    columns = [*lists, pa.array(lengths), pa.array(full_lengths), batch["language"].take(pa.array(rows)), indices]
    return pa.record_batch(columns, schema=SCHEMA)


def encode(written: Sequence[Written], tokenizer: PreTrainedTokenizerBase) -> tuple[list[Ids], list[Ids]]:
    """Tokens and labels of some rows, uncut."""
    settings = {"add_special_tokens": False, "return_attention_mask": False, "return_offsets_mapping": True}
    encoded = tokenizer([text for text, _ in written], **settings, verbose=False)
    ids = [np.array(row, dtype=np.int32) for row in encoded["input_ids"]]
    offsets = cast(list[list[Span]], encoded["offset_mapping"])
    labels = [
        np.where(_overlap(row, spans), row_ids, IGNORED_LABEL).astype(np.int32)
        for row_ids, row, (_, spans) in zip(ids, offsets, written, strict=True)
    ]
    return ids, labels


def _overlap(offsets: Sequence[Span], spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Which tokens of a row hold characters of a span, bool [tokens]; the first token never counts.

    `apply_chat_template(return_assistant_tokens_mask=True)` ends a span at the first token of its last character. If
    that becomes several tokens, the others would not be trained (seen in transformers 5.23).
    """
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    overlap = np.zeros(len(starts), dtype=np.bool_)
    for first, end in spans:
        overlap |= (starts < end) & (ends > first)
    overlap[:1] = False
    return overlap

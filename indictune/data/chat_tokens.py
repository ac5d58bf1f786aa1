"""From conversations to tokens: written out by a chat template, cut, with the answers marked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from indictune.data.collation import IGNORED_LABEL
from indictune.data.conversations import Conversations
from indictune.data.preparation import all_cores
from indictune.data.progress import shown
from indictune.data.tables import smaller_batches
from indictune.data.templates import (
    EXAMPLE,
    JINJA_ERRORS,
    Message,
    Span,
    Written,
    marks_answers,
    marks_of,
    written_out,
)
from indictune.errors import Problems, UserError

_ANSWER = "0192837465"  # as no template writes it
_BATCH_ROWS = 500  # what the tokenizer makes of a long row takes megabytes for a while
_MAX_PLACES = 20
_TWICE = (
    "that already begin or end with marks which the chat template writes ({}) and would have twice (--chat_template "
    "plain leaves texts as they are)"
)

Ids = npt.NDArray[np.int32]

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("length", pa.int32()),
        ("answer_tokens", pa.int32()),
        ("language", pa.string()),
    ]
)


@dataclass(frozen=True)
class ChatTokens:
    """The tokens of the rows of one split.

    Attributes:
        dataset: columns `input_ids` and `labels` (the token where the loss counts it, -100 elsewhere, and at the first
            token, which nothing stands before to predict it from), `length` (tokens), `answer_tokens` (labels that
            count) and `language`, in the order of the rows.
        full_lengths: tokens of each row before it was cut, int32 [rows].
    """

    dataset: Dataset
    full_lengths: Ids


def tokenise_chats(
    rows: Conversations,
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    max_length: int,
    train_on_prompts: bool,
) -> ChatTokens:
    """Write out, tokenise and cut the rows of a split, in memory.

    Args:
        rows: each ends with an answer.
        tokenizer: a fast one.
        template: from `choose_template`.
        max_length: rows keep their first tokens, this many.
        train_on_prompts: the loss counts every token, not those of the answers alone.

    Raises:
        UserError: the tokenizer is not a fast one; the rows that the template refuses, whose answers it does not mark,
            or whose answers all lie behind `max_length`.
    """
    tokeniser = ChatTokeniser(rows, tokenizer, template, max_length, train_on_prompts)
    batches = shown(tokeniser.tokenised(rows.table.to_batches()), "tokenising", len(rows))
    return ChatTokens(Dataset(pa.Table.from_batches(batches, SCHEMA)), tokeniser.full_lengths())


class ChatTokeniser:
    """`tokenise_chats` for rows that come some at a time. Of those gone by it keeps a few numbers each.

    Args:
        rows: of the split, whose places messages name; the others as of `tokenise_chats`.

    Raises:
        UserError: the tokenizer is not a fast one.
    """

    def __init__(
        self,
        rows: Conversations,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        max_length: int,
        train_on_prompts: bool,
    ) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"--model_name_or_path {tokenizer.name_or_path}: its tokenizer does not say where in the text a token "
                "stands, so the answers cannot be marked; take a model with a tokenizer.json."
            )
        self._rows = rows
        self._tokenizer = tokenizer
        self._template = template
        self._max_length = max_length
        self._train_on_prompts = train_on_prompts
        self._marks = marks_of(template, tokenizer) if rows.as_written else ()
        self._full_lengths: list[Ids] = []
        self._answer_tokens: list[Ids] = []
        self._faults: dict[str, list[int]] = {}  # what is wrong -> indices of rows

    def full_lengths(self) -> Ids:
        """Tokens of each row gone by before it was cut, int32 [rows]."""
        return np.concatenate(self._full_lengths)

    def tokenised(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The tokens of all rows, in their order, with the columns of `SCHEMA`.

        Raises:
            UserError: as of `tokenise_chats`, after the last row. After one that the template refuses, the others are
                only looked through for more of them.
        """
        first = 0
        for batch in smaller_batches(batches, _BATCH_ROWS):
            written = self._write_out(batch["messages"].to_pylist(), first)
            first += batch.num_rows
            if not self._faults:
                ids, labels = _encode(written, self._tokenizer)
                yield self._cut(ids, labels, batch["language"])
        problems = Problems(
            f"{self._rows.origin}: {len(indices):,} rows {what}: {_places(self._rows, indices)}."
            for what, indices in self._faults.items()
        )
        problems.raise_any()
        _check_answers(self._rows, np.concatenate(self._answer_tokens), self.full_lengths(), self._max_length)

    def _write_out(self, chats: Sequence[Sequence[Message]], first: int) -> list[Written]:
        """The texts of some rows, the one with index `first` and the next, and the characters that the loss counts."""
        written: list[Written] = []
        marked = not self._train_on_prompts
        for index, messages in enumerate(chats, first):
            if _holds_marks(messages, self._marks):
                self._faults.setdefault(_TWICE.format(", ".join(self._marks)), []).append(index)
                continue
            try:
                text, spans = written_out(messages, self._tokenizer, self._template, marked)
            except JINJA_ERRORS as error:
                self._faults.setdefault(f"refused by the chat template ({error})", []).append(index)
                continue
            if not marked:
                spans = [(0, len(text))]
            if not any(end > start for start, end in spans):
                self._faults.setdefault("without an answer that the chat template marks", []).append(index)
            written.append((text, spans))
        return written

    def _cut(self, ids: Sequence[Ids], labels: Sequence[Ids], languages: pa.StringArray) -> pa.RecordBatch:
        """The columns of some rows; their numbers are kept."""
        kept_ids, kept_labels = ([row[: self._max_length] for row in column] for column in (ids, labels))
        lengths = np.array([len(row) for row in kept_ids], dtype=np.int32)
        answer_tokens = np.array([(row != IGNORED_LABEL).sum() for row in kept_labels], dtype=np.int32)
        self._full_lengths.append(np.array([len(row) for row in ids], dtype=np.int32))
        self._answer_tokens.append(answer_tokens)
        ends = np.cumsum([0, *lengths], dtype=np.int32)
        tokens = [pa.ListArray.from_arrays(ends, np.concatenate(column)) for column in (kept_ids, kept_labels)]
        return pa.record_batch([*tokens, pa.array(lengths), pa.array(answer_tokens), languages], schema=SCHEMA)


def truncation_notes(rows: Conversations, tokens: ChatTokens, max_length: int) -> list[str]:
    """A sentence that says how many of the rows were cut; none where none was."""
    lengths = tokens.full_lengths
    cut = int((lengths > max_length).sum())
    if not cut:
        return []
    return [
        f"{rows.origin} {rows.source}: {cut:,} of {len(lengths):,} rows "
        f"({cut / len(lengths):.1%}) are longer than --max_length {max_length} and lose their ends; "
        f"the longest has {lengths.max():,} tokens."
    ]


def prompt_ids(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str) -> list[int]:
    """Tokens of all that stands before the last answer, and of what opens an answer."""
    last_answer = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    text, _ = written_out(messages[:last_answer], tokenizer, template, marked=False, open_answer=True)
    return cast(list[int], tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def answer_ends(tokenizer: PreTrainedTokenizerBase, template: str) -> list[int]:
    """Tokens that end an answer: what the template writes at its end, and the tokenizer's end of text.

    Where the template marks no answers, as one need not with `--train_on_prompts`, it is the first of the added tokens
    that it writes after an answer.
    """
    if marks_answers(template):
        text, spans = written_out(EXAMPLE, tokenizer, template, marked=True)
        ends = _added_tokens("".join(text[start:end] for start, end in spans), tokenizer)
    else:
        messages = [*EXAMPLE[:1], {"role": "assistant", "content": _ANSWER}]
        text, _ = written_out(messages, tokenizer, template, marked=False)
        ends = _added_tokens(text.partition(_ANSWER)[2], tokenizer)[:1]
    return sorted({*ends, tokenizer.eos_token_id} - {None})


def _added_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    written = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [token for token in written if token in tokenizer.added_tokens_decoder]


def _holds_marks(messages: Sequence[Message], marks: tuple[str, ...]) -> bool:
    """Whether a prompt and a completion are a dialogue that is written out already."""
    prompt, completion = messages[0]["content"].lstrip(), messages[-1]["content"].rstrip()
    return prompt.startswith(marks) or completion.endswith(marks)


def _encode(written: Sequence[Written], tokenizer: PreTrainedTokenizerBase) -> tuple[list[Ids], list[Ids]]:
    """Tokens and labels of some rows, uncut."""
    with all_cores():
        encoded = tokenizer(
            [text for text, _ in written],
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
    ids = [np.array(row, dtype=np.int32) for row in encoded["input_ids"]]
    offsets = cast(list[list[Span]], encoded["offset_mapping"])
    labels = [
        np.where(_overlap(row, spans), row_ids, IGNORED_LABEL).astype(np.int32)
        for row_ids, row, (_, spans) in zip(ids, offsets, written, strict=True)
    ]
    return ids, labels


def _overlap(offsets: Sequence[Span], spans: Sequence[Span]) -> npt.NDArray[np.bool_]:
    """Which tokens of a row hold characters of a span, bool [tokens]; never the first token.

    `apply_chat_template(return_assistant_tokens_mask=True)` would end a span at the first token of its last character:
    where the character became several bytes, the others would not be trained (seen in transformers 5.23).
    """
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    overlap = np.zeros(len(starts), dtype=np.bool_)
    for first, end in spans:
        overlap |= (starts < end) & (ends > first)
    overlap[:1] = False
    return overlap


def _check_answers(rows: Conversations, answer_tokens: Ids, lengths: Ids, max_length: int) -> None:
    """Refuse rows of which nothing would be trained."""
    lost = np.flatnonzero(answer_tokens == 0).tolist()
    if lost:
        longest = lengths[lost].max()
        raise UserError(
            f"{rows.origin}: the answers of {len(lost):,} of {len(lengths):,} rows ({len(lost) / len(lengths):.1%}) "
            f"lie wholly behind --max_length {max_length}: "
            f"{_places(rows, lost)}. Give --max_length {longest}, which takes them whole, or leave them out."
        )


def _places(rows: Conversations, indices: Sequence[int]) -> str:
    more = f" and {len(indices) - _MAX_PLACES:,} more" if len(indices) > _MAX_PLACES else ""
    return ", ".join(rows.place(index) for index in indices[:_MAX_PLACES]) + more

"""Turn conversations into tokens: apply the chat template, cut, and mark the answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from indictune.data.arrow_tables import smaller_batches
from indictune.data.bad_rows import BadRows
from indictune.data.collation import IGNORED_LABEL
from indictune.data.conversations import Conversations
from indictune.data.progress_bar import with_progress
from indictune.data.templates import (
    EXAMPLE,
    JINJA_ERRORS,
    Message,
    Span,
    Written,
    apply_template,
    marks_answers,
    template_marks,
)
from indictune.data.tokenisation import all_cores
from indictune.data.unusable_chats import UnusableChats
from indictune.errors import UserError

_ANSWER = "0192837465"  # which no template writes
_BATCH_ROWS = 500  # while it is tokenised, a long row takes megabytes

Ids = npt.NDArray[np.int32]

_EMPTY: Ids = np.empty(0, dtype=np.int32)

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
    """The tokens of the usable rows of one split.

    Attributes:
        dataset: columns `input_ids`, `labels` (the token where the loss counts it, else -100; always -100 at the first
            token, which nothing predicts), `length` (tokens), `answer_tokens` (labels that count) and `language`, in
            the order of the rows.
        full_lengths: tokens of each row before it was cut, int32 [rows].
        notes: sentences for the user about rows that were left out.
    """

    dataset: Dataset
    full_lengths: Ids
    notes: list[str] = field(default_factory=list)


def tokenise_chats(
    rows: Conversations,
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    max_length: int,
    train_on_prompts: bool,
    bad: BadRows | None = None,
) -> ChatTokens:
    """Write out, tokenise and cut the rows of a split, in memory.

    Args:
        rows: each ends with an answer.
        tokenizer: a fast one.
        template: from `choose_template`.
        max_length: rows keep their first tokens, this many.
        train_on_prompts: the loss counts every token, not only those of answers.
        bad: gets unusable rows: the template refuses them, does not mark their answers or would repeat its marks, or
            all answers lie beyond `max_length`. Default: they stop the run.

    Raises:
        UserError: the tokenizer is not a fast one; unusable rows stop the run, or are too many.
    """
    tokeniser = ChatTokeniser(rows, tokenizer, template, max_length, train_on_prompts, bad)
    batches = with_progress(tokeniser.tokenised(rows.table.to_batches()), "tokenising", len(rows))
    dataset = Dataset(pa.Table.from_batches(batches, SCHEMA))
    return ChatTokens(dataset, tokeniser.full_lengths(), tokeniser.unusable.notes())


class ChatTokeniser:
    """`tokenise_chats` batch by batch. It keeps a few numbers of each row.

    Args:
        rows: of the split; the others as of `tokenise_chats`.

    Attributes:
        unusable: unusable rows so far.

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
        bad: BadRows | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise UserError("slow-tokenizer", "--model_name_or_path", tokenizer.name_or_path)
        self.unusable = UnusableChats(rows, max_length, BadRows(rows.source) if bad is None else bad)
        self._tokenizer = tokenizer
        self._template = template
        self._max_length = max_length
        self._train_on_prompts = train_on_prompts
        self._marks = template_marks(template, tokenizer) if rows.as_written else ()
        self._full_lengths: list[Ids] = []

    def full_lengths(self) -> Ids:
        """Tokens of each usable row so far, before it was cut, int32 [rows]."""
        return np.concatenate(self._full_lengths)

    def tokenised(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The tokens of all usable rows, in their order, with the columns of `SCHEMA`.

        After a row that cannot be written out and stops the run, the others are only searched for more such rows.

        Raises:
            UserError: as of `tokenise_chats`, after the last row.
        """
        first = 0
        for batch in smaller_batches(batches, _BATCH_ROWS):
            indices, written = self._write_out(batch["messages"].to_pylist(), first)
            if written and not self.unusable.stops:
                tokens = self._cut(first, indices, *_encode(written, self._tokenizer), batch["language"])
                if tokens.num_rows:
                    yield tokens
            first += batch.num_rows
        self.unusable.finish()

    def _write_out(self, chats: Sequence[Sequence[Message]], first: int) -> tuple[list[int], list[Written]]:
        """The texts of a batch's rows, and the characters that the loss counts.

        Args:
            chats: messages of each row.
            first: index of the first row in the split.

        Returns:
            The indices in the batch of the rows that can be written out, and what is written.
        """
        indices: list[int] = []
        written: list[Written] = []
        marked = not self._train_on_prompts
        for index, messages in enumerate(chats):
            if _holds_marks(messages, self._marks):
                self.unusable.add(first + index, "marks-repeated", marks=", ".join(self._marks))
                continue
            try:
                text, spans = apply_template(messages, self._tokenizer, self._template, marked)
            except JINJA_ERRORS as error:
                self.unusable.add(first + index, "template-refuses-row", reason=error)
                continue
            if not marked:
                spans = [(0, len(text))]
            if not any(end > start for start, end in spans):
                self.unusable.add(first + index, "answer-unmarked")
                continue
            indices.append(index)
            written.append((text, spans))
        return indices, written

    def _cut(
        self, first: int, indices: Sequence[int], ids: Sequence[Ids], labels: Sequence[Ids], languages: pa.StringArray
    ) -> pa.RecordBatch:
        """The columns of the rows that keep a part of an answer; notes their lengths.

        Args:
            first: index of the batch's first row in the split.
            indices: of the rows in the batch.
            ids: of each row, uncut.
            labels: of each row, uncut.
            languages: of the batch.
        """
        answer_tokens = np.array([(row[: self._max_length] != IGNORED_LABEL).sum() for row in labels], dtype=np.int32)
        for row in np.flatnonzero(answer_tokens == 0).tolist():
            self.unusable.add_cut_off(first + indices[row], len(ids[row]))
        kept = np.flatnonzero(answer_tokens).tolist()
        full_lengths = np.array([len(ids[row]) for row in kept], dtype=np.int32)
        self._full_lengths.append(full_lengths)
        lengths = np.minimum(full_lengths, np.int32(self._max_length))
        ends = np.cumsum([0, *lengths], dtype=np.int32)
        tokens = [
            pa.ListArray.from_arrays(
                ends, np.concatenate([_EMPTY, *(column[row][: self._max_length] for row in kept)])
            )
            for column in (ids, labels)
        ]
        of_rows = languages.take(pa.array([indices[row] for row in kept], pa.int64()))
        return pa.record_batch([*tokens, pa.array(lengths), pa.array(answer_tokens[kept]), of_rows], schema=SCHEMA)


def truncation_notes(rows: Conversations, tokens: ChatTokens, max_length: int) -> list[str]:
    """A sentence that says how many rows were cut, if any were."""
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
    """Tokens before the last answer, and those that open an answer."""
    last_answer = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    text, _ = apply_template(messages[:last_answer], tokenizer, template, marked=False, open_answer=True)
    return cast(list[int], tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def answer_ends(tokenizer: PreTrainedTokenizerBase, template: str) -> list[int]:
    """Tokens that end an answer: those that the template writes at its end, and the tokenizer's end of text.

    With `--train_on_prompts` a template need not mark answers. Then the first added token after an answer ends it.
    """
    if marks_answers(template):
        text, spans = apply_template(EXAMPLE, tokenizer, template, marked=True)
        ends = _added_tokens("".join(text[start:end] for start, end in spans), tokenizer)
    else:
        messages = [*EXAMPLE[:1], {"role": "assistant", "content": _ANSWER}]
        text, _ = apply_template(messages, tokenizer, template, marked=False)
        ends = _added_tokens(text.partition(_ANSWER)[2], tokenizer)[:1]
    return sorted({*ends, tokenizer.eos_token_id} - {None})


def _added_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    written = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [token for token in written if token in tokenizer.added_tokens_decoder]


def _holds_marks(messages: Sequence[Message], marks: tuple[str, ...]) -> bool:
    """Whether prompt and completion already have the template's marks."""
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

"""From conversations to tokens: written out by a chat template, cut, with the answers marked."""

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
from indictune.data.bad_rows import Quarantine
from indictune.data.collation import IGNORED_LABEL
from indictune.data.conversations import Conversations
from indictune.data.progress_bar import shown
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
from indictune.data.tokenisation import all_cores
from indictune.data.unusable_chats import UnusableChats
from indictune.errors import UserError

_ANSWER = "0192837465"  # as no template writes it
_BATCH_ROWS = 500  # what the tokenizer makes of a long row takes megabytes for a while
_TWICE = (
    "whose texts already begin or end with marks which the chat template writes ({}) and would have twice "
    "(--chat_template plain leaves texts as they are)"
)

Ids = npt.NDArray[np.int32]

_NONE: Ids = np.empty(0, dtype=np.int32)

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
    """The tokens of the rows of one split, but for those that were left out.

    Attributes:
        dataset: columns `input_ids` and `labels` (the token where the loss counts it, -100 elsewhere, and at the first
            token, which nothing stands before to predict it from), `length` (tokens), `answer_tokens` (labels that
            count) and `language`, in the order of the rows.
        full_lengths: tokens of each row before it was cut, int32 [rows].
        notes: of rows that were left out.
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
    quarantine: Quarantine | None = None,
) -> ChatTokens:
    """Write out, tokenise and cut the rows of a split, in memory.

    Args:
        rows: each ends with an answer.
        tokenizer: a fast one.
        template: from `choose_template`.
        max_length: rows keep their first tokens, this many.
        train_on_prompts: the loss counts every token, not those of the answers alone.
        quarantine: gets the rows that cannot be used: those that the template refuses, whose answers it does not mark,
            which would have its marks twice, or whose answers all lie behind `max_length`. None: they stop the run.

    Raises:
        UserError: the tokenizer is not a fast one; the rows that cannot be used, where they stop the run or are more
            than may be left out.
    """
    tokeniser = ChatTokeniser(rows, tokenizer, template, max_length, train_on_prompts, quarantine)
    batches = shown(tokeniser.tokenised(rows.table.to_batches()), "tokenising", len(rows))
    dataset = Dataset(pa.Table.from_batches(batches, SCHEMA))
    return ChatTokens(dataset, tokeniser.full_lengths(), tokeniser.unusable.notes())


class ChatTokeniser:
    """`tokenise_chats` for rows that come some at a time. Of those gone by it keeps a few numbers each.

    Args:
        rows: of the split, whose places messages name; the others as of `tokenise_chats`.

    Attributes:
        unusable: the rows gone by that cannot be used.

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
        quarantine: Quarantine | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path} does not say where in the text a token stands, so the "
                "answers cannot be marked; take a model with a tokenizer.json."
            )
        self.unusable = UnusableChats(rows, max_length, quarantine)
        self._tokenizer = tokenizer
        self._template = template
        self._max_length = max_length
        self._train_on_prompts = train_on_prompts
        self._marks = marks_of(template, tokenizer) if rows.as_written else ()
        self._full_lengths: list[Ids] = []

    def full_lengths(self) -> Ids:
        """Tokens of each row gone by that can be used, before it was cut, int32 [rows]."""
        return np.concatenate(self._full_lengths)

    def tokenised(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The tokens of all rows that can be used, in their order, with the columns of `SCHEMA`.

        Raises:
            UserError: as of `tokenise_chats`, after the last row. After one that cannot be written out and stops the
                run, the others are only looked through for more of them.
        """
        first = 0
        for batch in smaller_batches(batches, _BATCH_ROWS):
            places, written = self._write_out(batch["messages"].to_pylist(), first)
            if written and not self.unusable.stop:
                tokens = self._cut(first, places, *_encode(written, self._tokenizer), batch["language"])
                if tokens.num_rows:
                    yield tokens
            first += batch.num_rows
        self.unusable.finish()

    def _write_out(self, chats: Sequence[Sequence[Message]], first: int) -> tuple[list[int], list[Written]]:
        """The texts of those of some rows that can be written out, and the characters that the loss counts.

        Args:
            chats: of the row with index `first` and the next.
            first: of the split, counted from 0.

        Returns:
            Which of them, counted from 0; and what is written.
        """
        places: list[int] = []
        written: list[Written] = []
        marked = not self._train_on_prompts
        for place, messages in enumerate(chats):
            if _holds_marks(messages, self._marks):
                self.unusable.add(first + place, _TWICE.format(", ".join(self._marks)))
                continue
            try:
                text, spans = written_out(messages, self._tokenizer, self._template, marked)
            except JINJA_ERRORS as error:
                self.unusable.add(first + place, f"refused by the chat template ({error})")
                continue
            if not marked:
                spans = [(0, len(text))]
            if not any(end > start for start, end in spans):
                self.unusable.add(first + place, "without an answer that the chat template marks")
                continue
            places.append(place)
            written.append((text, spans))
        return places, written

    def _cut(
        self, first: int, places: Sequence[int], ids: Sequence[Ids], labels: Sequence[Ids], languages: pa.StringArray
    ) -> pa.RecordBatch:
        """The columns of those of some rows that keep a part of an answer; their lengths are noted.

        Args:
            first: index of the batch's first row.
            places: which of the batch these rows are.
            ids: of each, uncut.
            labels: likewise.
            languages: of the batch.
        """
        answer_tokens = np.array([(row[: self._max_length] != IGNORED_LABEL).sum() for row in labels], dtype=np.int32)
        for row in np.flatnonzero(answer_tokens == 0).tolist():
            self.unusable.add_cut_off(first + places[row], len(ids[row]))
        kept = np.flatnonzero(answer_tokens).tolist()
        full_lengths = np.array([len(ids[row]) for row in kept], dtype=np.int32)
        self._full_lengths.append(full_lengths)
        lengths = np.minimum(full_lengths, np.int32(self._max_length))
        ends = np.cumsum([0, *lengths], dtype=np.int32)
        tokens = [
            pa.ListArray.from_arrays(ends, np.concatenate([_NONE, *(column[row][: self._max_length] for row in kept)]))
            for column in (ids, labels)
        ]
        of_rows = languages.take(pa.array([places[row] for row in kept], pa.int64()))
        return pa.record_batch([*tokens, pa.array(lengths), pa.array(answer_tokens[kept]), of_rows], schema=SCHEMA)


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

"""Answers of which some are better: pairs of answers to one prompt, and answers marked good or bad."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from os.path import commonprefix
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from indictune.data.bad_rows import BadRows, Record
from indictune.data.cache import smaller_batches, text_keys
from indictune.data.chat import chat_tokens
from indictune.data.chat.chat_tokens import BATCH_ROWS, Ids, add_bad, add_cut, answer_writer, encode
from indictune.data.chat.conversations import SCHEMA, Conversations, is_pair
from indictune.data.chat.messages import (
    PROMPT_NAMES,
    RATINGS,
    SCORES,
    Message,
    Row,
    RowError,
    chat_records,
    is_prompt_text,
    messages_of,
)
from indictune.data.chat.written_chats import ChatWriter, Written
from indictune.data.collation import IGNORED_LABEL
from indictune.data.columns import BETWEEN_TEXTS
from indictune.data.health.findings import Finding, repeated_rows
from indictune.data.read.row_sources import SplitRows
from indictune.errors import UserError

_HH = re.compile(r"\n\n(Human|Assistant):")  # of Anthropic's hh-rlhf
_SUSPICIOUS = {
    "swapped_pairs": "have the answers of another row, swapped",
    "worse_scored": "have a chosen answer with the lower score",
    "longer_chosen": "have a longer chosen answer: length may be learned",
}
_MANY_LONGER = 0.65  # of pairs, whose better answer is the longer one
TOKENS = pa.schema([*chat_tokens.SCHEMA, pa.field("chosen_length", pa.int32())])
_OTHER = [pa.field(f"other_{name}", chat_tokens.SCHEMA.field(name).type) for name in ("input_ids", "labels")]
RATED_TOKENS = pa.schema([*chat_tokens.SCHEMA, *_OTHER, pa.field("is_good", pa.int8())])


class Pairs(Conversations):
    """The pairs of one split: conversations that end with the better answer.

    The table has two more columns: `rejected` (string), the worse answer, and `margin` (double), by how much the
    scores of the file prefer the better one; null if it has none.
    """

    kind: ClassVar[str] = "pairs"
    schema: ClassVar[pa.Schema] = pa.schema([*SCHEMA, ("rejected", pa.string()), ("margin", pa.float64())])

    @staticmethod
    def records(rows: SplitRows, bad: BadRows, names: Mapping[str, str]) -> Iterator[Record]:
        """With the prompt of texts that begin alike; raises `UserError` if the first row is no pair."""
        for number, (line, record) in enumerate(chat_records(rows, bad, names)):
            if number == 0 and not {"chosen", "rejected"} <= record.keys():
                raise UserError("rows-without-pairs", value=bad.location(line), keys=", ".join(map(str, record)))
            yield line, with_prompt(record)

    @staticmethod
    def columns_of(record: Row) -> dict[str, Any]:
        if not is_pair(record):
            raise RowError("answer-missing", keys=", ".join(map(str, record)))
        if (name := _other_prompt(record)) is not None:
            raise RowError("prompt-of-another-name", name=name)
        shared = {key: value for key, value in record.items() if key not in ("messages", *SCORES)}
        chosen, rejected = (messages_of(shared | {"chosen": record[side]}) for side in ("chosen", "rejected"))
        if chosen[:-1] != rejected[:-1]:
            raise RowError("prompts-differ")
        if chosen[-1] == rejected[-1]:
            raise RowError("answers-equal")
        better, worse = (_number(record.get(key)) for key in SCORES)
        margin = None if better is None or worse is None else better - worse
        columns = {"messages": chosen, "as_written": is_prompt_text(shared)}
        return columns | {"rejected": rejected[-1]["content"], "margin": margin}

    @staticmethod
    def findings(rows: Mapping[str, Pairs]) -> list[Finding]:
        """What is suspicious in pairs, by split. Raises `UserError` if the scores of a file prefer no answer."""
        texts = {name: list(split.answers()) for name, split in rows.items()}
        here = {name: text_keys(map(BETWEEN_TEXTS.join, each)) for name, each in texts.items()}
        found = [repeated_rows(split, here[name]) for name, split in rows.items()]
        everywhere = np.concatenate(list(here.values()))
        for name, split in rows.items():
            margins = split.table["margin"]
            if margins.null_count == 0 and pc.all(pc.equal(margins, 0)).as_py():
                raise UserError("scores-equal", split.origin, split.source)
            swapped = text_keys(BETWEEN_TEXTS.join((*prompt, other, better)) for *prompt, better, other in texts[name])
            longer = sum(len(each[-2]) > len(each[-1]) for each in texts[name])
            counts = {
                "swapped_pairs": int(np.isin(swapped, everywhere).sum()),
                "worse_scored": pc.sum(pc.less(margins, 0)).as_py() or 0,
                "longer_chosen": longer if longer > _MANY_LONGER * len(split) else 0,
            }
            for what, count in counts.items():
                share = f"{count:,} of {len(split):,} pairs ({count / len(split):.1%})"
                note = f"{split.origin} {split.source}: {share} {_SUSPICIOUS[what]}."
                found.append(Finding(what, count, len(split), note))
        return found

    def answers(self) -> Iterator[tuple[str, ...]]:
        """The contents of each row's messages, and the worse answer."""
        for chat, rejected in zip(self.table["messages"], self.table["rejected"], strict=True):
            yield (*(each["content"] for each in chat.as_py()), rejected.as_py())

    @property
    def texts(self) -> Iterator[str]:
        """`answers` with `BETWEEN_TEXTS` between them."""
        return map(BETWEEN_TEXTS.join, self.answers())


class Rated(Conversations):
    """The answers of one split that are marked good or bad: conversations with a column `is_good` (bool)."""

    kind: ClassVar[str] = "rated"
    schema: ClassVar[pa.Schema] = pa.schema([*SCHEMA, ("is_good", pa.bool_())])
    also_used: ClassVar[Sequence[str]] = RATINGS

    @staticmethod
    def records(rows: SplitRows, bad: BadRows, names: Mapping[str, str]) -> Iterator[Record]:
        """Raises `UserError` if the first row is not marked."""
        for number, (line, record) in enumerate(Conversations.records(rows, bad, names)):
            if number == 0 and not any(record.get(key) is not None for key in RATINGS):
                raise UserError("rows-without-marks", value=bad.location(line), keys=", ".join(map(str, record)))
            yield line, record

    @staticmethod
    def columns_of(record: Row) -> dict[str, Any]:
        mark = str(next((record[key] for key in RATINGS if record.get(key) is not None), None)).strip().lower()
        if mark not in _GOOD | _BAD:
            raise RowError("mark-missing", held=mark, keys=", ".join(map(str, record)))
        answer = {key: value for key, value in record.items() if key not in RATINGS}
        return Conversations.columns_of(answer) | {"is_good": mark in _GOOD}

    @staticmethod
    def findings(rows: Mapping[str, Rated]) -> list[Finding]:
        """Answers that are marked good and bad, by split. Raises `UserError` if all training rows are marked alike."""
        of_splits = {name: text_keys(split.texts) for name, split in rows.items()}
        found = [repeated_rows(split, of_splits[name]) for name, split in rows.items()]
        for name, split in rows.items():
            keys, good = of_splits[name], split.table["is_good"].to_numpy()
            if name == "train" and (good.all() or not good.any()):
                raise UserError("marks-equal", split.origin, split.source, mark="good" if good.all() else "bad")
            count = int(np.isin(keys, np.intersect1d(keys[good], keys[~good])).sum())
            note = f"{split.origin} {split.source}: {count:,} of {len(split):,} rows are also marked the other way."
            found.append(Finding("conflicting_marks", count, len(split), note))
        return found


_GOOD, _BAD = {"true", "1", "1.0"}, {"false", "0", "0.0"}


def _number(value: object) -> float | None:
    """A score, which files may hold as text; None for none."""
    try:
        return float(str(value))
    except ValueError:
        return None


def with_prompt(row: Row) -> Row:
    """The row; if it has no prompt, and texts as answers, with their common beginning, up to a space, as the prompt.

    Texts of hh-rlhf become messages.
    """
    sides = row.get("chosen"), row.get("rejected")
    if row.get("prompt") is not None or not all(isinstance(each, str) for each in sides) or _other_prompt(row):
        return row
    if all(_HH.match(str(each)) for each in sides):
        return row | {name: _turns(str(row[name])) for name in ("chosen", "rejected")}
    shared = commonprefix([str(each) for each in sides])  # noqa: RUF071, characters are meant
    end = max(shared.rfind(" "), shared.rfind("\n"), 0)
    return row | {"prompt": shared[:end], "chosen": str(sides[0])[end:], "rejected": str(sides[1])[end:]}


def _other_prompt(row: Row) -> str | None:
    """The column that seems to hold the prompt of a row without `prompt`; None without any."""
    held = [name for name in PROMPT_NAMES if isinstance(row.get(name), str) and str(row[name]).strip()]
    return None if row.get("prompt") is not None else next(iter(held), None)


def _turns(text: str) -> list[Message]:
    _, *parts = _HH.split(text)
    role = {"Human": "user", "Assistant": "assistant"}
    named = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": role[name], "content": content.strip()} for name, content in named]


def tokenised_pairs(
    batches: Iterable[pa.RecordBatch],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    max_length: int,
    train_on_prompts: bool,
    bad: BadRows,
    positions: int | None = None,
    train_on_thinking: bool = True,
    schema: pa.Schema = TOKENS,
) -> Iterator[pa.RecordBatch]:
    """Write out, tokenise and cut pairs; arguments as of `tokenised_chats`. `bad` also gets pairs that the cut equals.

    Yields:
        A row of `TOKENS` for each pair. `input_ids` has the conversation with the better answer, then the one with the
        worse, and `chosen_length` the tokens of the first. Only the last answer of each has labels.
    """
    writer, first, good = answer_writer(tokenizer, template, train_on_prompts, train_on_thinking), 0, 0
    for batch in smaller_batches(batches, BATCH_ROWS):
        written = _write_out(batch, writer, bad)
        texts = [text for sides in written.values() for text in sides]
        ids, labels = encode(texts, tokenizer) if texts else ([], [])
        kept = list[tuple[int, list[Ids], list[Ids], int]]()
        for number, row in enumerate(written):
            own = slice(2 * number, 2 * number + 2)
            full_length = max(map(len, ids[own][: 2 if schema is TOKENS else 1]))
            cut_ids, cut_labels = ([each[:max_length] for each in side[own]] for side in (ids, labels))
            if _is_usable(cut_ids, cut_labels, are_pairs=schema is TOKENS):
                kept.append((row, cut_ids, cut_labels, full_length))
            else:
                add_cut(bad, batch, {row: full_length}, max_length, positions)
        if kept:
            yield _columns(batch, first, kept, schema)
        first += batch.num_rows
        good += len(kept)
    bad.finish(good)


def _is_usable(ids: Sequence[Ids], labels: Sequence[Ids], are_pairs: bool) -> bool:
    """Whether something is left of the answers, and of a pair's different things."""
    has_answer = [bool((each != IGNORED_LABEL).any()) for each in labels]
    return all(has_answer) and not np.array_equal(ids[0], ids[1]) if are_pairs else has_answer[0]


def tokenised_rated(batches: Iterable[pa.RecordBatch], *of_pairs: Any) -> Iterator[pa.RecordBatch]:
    """As `tokenised_pairs`, in rows of `RATED_TOKENS`: an answer, and the same prompt with that to another one.

    The latter is the answer before it in the file. TRL (1.16) takes one of the same micro-batch.
    """
    return partial(tokenised_pairs, schema=RATED_TOKENS)(_with_other_answers(batches), *of_pairs)


def _with_other_answers(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Add a column `other`: the nearest earlier answer to another prompt; at the beginning, the first later one."""
    before, other = list[Message](), Message()
    for batch in batches:
        chats, others = batch["messages"].to_pylist(), []
        for *prompt, answer in chats:
            if not before:
                other = next((each[-1] for each in chats if each[:-1] != prompt), answer)
            elif before[:-1] != prompt:
                other = before[-1]
            before = [*prompt, answer]
            others.append(other["content"])
        yield batch.append_column("other", pa.array(others, pa.string()))


def _write_out(batch: pa.RecordBatch, writer: ChatWriter, bad: BadRows) -> dict[int, list[Written]]:
    """Row of the batch -> the texts of both conversations, with the characters of their last answer."""
    written = dict[int, list[Written]]()
    second = batch["other" if "other" in batch.schema.names else "rejected"]
    for row, (messages, answer) in enumerate(zip(batch["messages"].to_pylist(), second.to_pylist(), strict=True)):
        other = [*messages[:-1], {"role": "assistant", "content": answer}]
        try:
            sides = [_last_answer(writer, each) for each in (messages, other)]
        except RowError as error:
            add_bad(bad, batch, row, error.code, **error.details)
        except Exception as error:  # a template is a program: it can raise anything
            add_bad(bad, batch, row, "template-refuses-row", reason=error)
        else:
            if all(spans for _, spans in sides):
                written[row] = sides
            else:
                add_bad(bad, batch, row, "answer-unmarked")
    return written


def _last_answer(writer: ChatWriter, messages: Sequence[Message]) -> Written:
    text, spans = writer.write(messages)[-1]
    start = len(writer.text(messages[:-1], open_answer=True))
    return text, [(max(first, start), last) for first, last in spans if last > start]


def _columns(
    batch: pa.RecordBatch, first: int, kept: Sequence[tuple[int, list[Ids], list[Ids], int]], schema: pa.Schema
) -> pa.RecordBatch:
    numbers, ids, labels, full_lengths = zip(*kept, strict=True)
    rows = batch.take(pa.array(numbers))
    made: dict[str, Any] = {
        "full_length": full_lengths,
        "language": rows["language"],
        "rows": [[first + number] for number in numbers],
    }
    columns = {"input_ids": ids, "labels": labels}
    if schema is TOKENS:
        made |= {name: [np.concatenate(each) for each in column] for name, column in columns.items()}
        made["chosen_length"] = [len(chosen) for chosen, _ in ids]
    else:
        made |= {name: [own for own, _ in column] for name, column in columns.items()}
        made |= {f"other_{name}": [other for _, other in column] for name, column in columns.items()}
        made["is_good"] = rows["is_good"].cast(pa.int8())
    made["length"] = list(map(len, made["input_ids"]))
    return pa.record_batch([pa.array(made[field.name], field.type) for field in schema], schema=schema)

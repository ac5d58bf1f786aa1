"""The conversations of a run, tokenised and packed, with what the user should know of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from indictune.config.chat_arguments import ChatDataArguments
from indictune.data import packing
from indictune.data.arrow_tables import map_table, stored_batches, write_table
from indictune.data.bad_rows import go_on_with
from indictune.data.cache import made_once
from indictune.data.chat_tokens import SCHEMA, ChatTokeniser, ChatTokens, truncation_notes
from indictune.data.conversations import ChatSource, Conversations, ConversationSplits, is_as_written, leak_note
from indictune.data.packing import packed, packing_facts, stored_groups
from indictune.data.progress_bar import shown
from indictune.data.row_sources import SPLITS
from indictune.data.templates import choose_template
from indictune.data.tokenisation import mapped_dataset, tokenizer_parts
from indictune.data.tokenizer_health import health_table, tokenizer_health
from indictune.data.unusable_chats import quarantine_of
from indictune.errors import Problems

_FACTS = "facts.json"


def check_template(
    tokenizer: PreTrainedTokenizerBase, args: ChatDataArguments, sources: Mapping[str, ChatSource]
) -> None:
    """Check the chat template of a run as its first row will have it, before the others are read.

    Raises:
        UserError: there is no such template, it does not fit the tokenizer, or it does not mark the answers.
    """
    as_written = is_as_written(sources["train"]) if "train" in sources else None
    if args.chat_template is not None or as_written is not None:
        choose_template(tokenizer, args.chat_template, bool(as_written), args.train_on_prompts)


def set_template(tokenizer: PreTrainedTokenizerBase, splits: ConversationSplits, args: ChatDataArguments) -> str:
    """Choose the chat template of a run. A tokenizer that has another one gets it, and is saved with it.

    Raises:
        UserError: there is no such template, it does not fit the tokenizer, or it does not mark the answers.
    """
    as_written = splits.train.as_written
    template = choose_template(tokenizer, args.chat_template, as_written, args.train_on_prompts)
    if args.chat_template is not None or as_written:
        tokenizer.chat_template = template
    return template


@dataclass(frozen=True)
class Chats:
    """The rows of a run as a language model reads them.

    Attributes:
        train: columns `input_ids`, `labels`, `length`; packed, `seq_lengths` and `rows` too.
        validation: never packed, with `language`; or None.
        test: likewise.
        rows: the same before tokens, by split.
        folder: holds the rows that were left out, if any were.
        summary: what the tokenizer costs each language, as a table, and how rows were packed.
        notes: rows that were left out or cut.
    """

    train: Dataset
    validation: Dataset | None
    test: Dataset | None
    rows: Mapping[str, Conversations]
    folder: Path
    summary: str
    notes: list[str] = field(default_factory=list)

    @property
    def samples(self) -> Conversations:
        """Rows to show what the model answers: held-out ones, where there are some."""
        return next(self.rows[split] for split in (*SPLITS[1:], "train") if split in self.rows)

    def place(self, index: int) -> str:
        """Where training row `index` (from 0) stands in its source, or all rows of pack `index`."""
        if "rows" not in self.train.column_names:
            return self.rows["train"].place(index)
        return ", ".join(self.rows["train"].place(row) for row in self.train[index]["rows"])


def tokenise_splits(
    splits: ConversationSplits, tokenizer: PreTrainedTokenizerBase, template: str, args: ChatDataArguments
) -> Chats:
    """Tokenise all rows, and pack those that are trained on where `args.packing` says so; once, then from the cache.

    Args:
        splits: the rows.
        tokenizer: of the model.
        template: from `set_template`.
        args: say how rows are cut, which tokens the loss counts, and what becomes of rows that cannot be used.

    Raises:
        UserError: rows that cannot be used, of all splits at once.
    """
    given = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    loaded = {name: rows for name, rows in given.items() if rows is not None}
    parts = [
        *(tokenizer_parts(tokenizer), template, args.max_length, args.train_on_prompts, args.packing),
        splits.folder.name,
    ]
    make = partial(_prepare, splits.folder, loaded, tokenizer, template, args)
    folder = made_once("chats", parts, "The token ids", make)
    facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    datasets = {name: mapped_dataset(folder, name) for name in loaded}
    left = {name: _left(splits.folder, folder, name, rows) for name, rows in loaded.items()}
    return Chats(
        *(datasets["train"], datasets.get("validation"), datasets.get("test"), left, folder),
        *(facts["summary"], facts["notes"]),
    )


def _prepare(
    stored: Path,
    loaded: Mapping[str, Conversations],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    args: ChatDataArguments,
    folder: Path,
) -> None:
    """Write the tokens of all splits, and what there is to know of them.

    Args:
        stored: holds the rows as `<split>.arrow`.
        loaded: the same rows, by split.
        tokenizer: as of `tokenise_splits`, like the next two.
        folder: gets `<split>.arrow`, `facts.json` and the rows that are left out, beside those of `stored`; where a
            split loses some, the others as `<split>-rows.arrow`.

    Raises:
        UserError: rows that cannot be used, of all splits at once.
    """
    go_on_with(stored, folder)
    problems = Problems()
    notes: list[str] = []
    summary = ""
    for name, rows in loaded.items():
        with problems.collecting():
            tokens = _tokenise(stored / f"{name}.arrow", rows, tokenizer, template, args, folder)
            notes += [*tokens.notes, *truncation_notes(rows, tokens, args.max_length)]
            if name == "train":
                left = _left(stored, folder, name, rows)
                summary = health_table(tokenizer_health(left, tokens.full_lengths, tokenizer, args.max_length))
    problems.raise_any()
    notes += _leak_notes(stored, folder, loaded)
    if args.packing:
        _pack(folder / "train.arrow", args.max_length)
        summary += f"\n{packing_facts(mapped_dataset(folder, 'train'), args.max_length)}"
    (folder / _FACTS).write_text(json.dumps({"summary": summary, "notes": notes}), encoding="utf-8")


def _tokenise(
    stored: Path,
    rows: Conversations,
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    args: ChatDataArguments,
    folder: Path,
) -> ChatTokens:
    """As `_prepare`, of the split that is stored in one file."""
    name = stored.stem
    quarantine = quarantine_of(rows, args, folder)
    tokeniser = ChatTokeniser(rows, tokenizer, template, args.max_length, args.train_on_prompts, quarantine)
    batches = tokeniser.tokenised(stored_batches(stored))
    write_table(folder / stored.name, SCHEMA, shown(batches, f"tokenising the {name} rows", len(rows)))
    if tokeniser.unusable.left_out:
        left = tokeniser.unusable.without_them(stored_batches(stored))
        write_table(folder / f"{name}-rows.arrow", rows.table.schema, left)
    return ChatTokens(mapped_dataset(folder, name), tokeniser.full_lengths(), tokeniser.unusable.notes())


def _left(stored: Path, folder: Path, name: str, rows: Conversations) -> Conversations:
    """Those of a split that were not left out when they became tokens."""
    return replace(rows, table=map_table(_file_of_left(stored, folder, name)))


def _file_of_left(stored: Path, folder: Path, name: str) -> Path:
    left = folder / f"{name}-rows.arrow"
    return left if left.exists() else stored / f"{name}.arrow"


def _leak_notes(stored: Path, folder: Path, loaded: Mapping[str, Conversations]) -> Iterator[str]:
    """What there is to say of training rows that also stand in held-out rows, of those that are left of both."""
    left = {name: _left(stored, folder, name, rows) for name, rows in loaded.items()}
    for name in SPLITS[1:]:
        if name in left and (note := leak_note(left["train"], _file_of_left(stored, folder, "train"), left[name])):
            yield note


def _pack(path: Path, max_length: int) -> None:
    """Put packs of the rows of a table in its place."""
    groups = shown(stored_groups(path), "packing the train rows", map_table(path).num_rows)
    unfinished = path.with_suffix(".unfinished")
    write_table(unfinished, packing.SCHEMA, packed(groups, max_length))
    unfinished.rename(path)

"""Tokenise and pack the conversations of a run, and collect notes for the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from indictune.config.chat_arguments import ChatDataArguments
from indictune.data import packing
from indictune.data.arrow_tables import map_table, stored_batches, write_table
from indictune.data.bad_rows import copy_rejected
from indictune.data.cache import build_once
from indictune.data.chat_tokens import SCHEMA, ChatTokeniser, ChatTokens, truncation_notes
from indictune.data.conversations import ChatSource, Conversations, ConversationSplits, is_as_written, leak_note
from indictune.data.packing import packed, packing_facts, stored_groups
from indictune.data.progress_bar import with_progress
from indictune.data.row_sources import SPLITS
from indictune.data.rows import read_facts, write_facts
from indictune.data.templates import choose_template
from indictune.data.tokenisation import mapped_dataset, tokenizer_parts
from indictune.data.tokenizer_health import health_table, tokenizer_health
from indictune.data.unusable_chats import bad_chats
from indictune.errors import Problems


def check_template(
    tokenizer: PreTrainedTokenizerBase, args: ChatDataArguments, sources: Mapping[str, ChatSource]
) -> None:
    """Check the chat template with the form of the first row, before the others are read.

    Raises:
        UserError: there is no such template, it does not fit the tokenizer, or it does not mark the answers.
    """
    as_written = is_as_written(sources["train"]) if "train" in sources else None
    if args.chat_template is not None or as_written is not None:
        choose_template(tokenizer, args.chat_template, bool(as_written), args.train_on_prompts)


def set_template(tokenizer: PreTrainedTokenizerBase, splits: ConversationSplits, args: ChatDataArguments) -> str:
    """Choose the chat template of a run, and set it on the tokenizer, which is saved with it.

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
        test: never packed, with `language`; or None.
        rows: the usable conversations, by split.
        folder: holds the rejected rows, if there are any.
        summary: a table of what the tokenizer costs each language, and how rows were packed.
        notes: sentences for the user about rows that were left out or cut.
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
        """Rows for sample answers of the model: held-out rows if there are any."""
        return next(self.rows[split] for split in (*SPLITS[1:], "train") if split in self.rows)

    def location(self, index: int) -> str:
        """Where training row `index` (from 0), or each row of pack `index`, stands: `file:line`."""
        if "rows" not in self.train.column_names:
            return self.rows["train"].location(index)
        return ", ".join(self.rows["train"].location(row) for row in self.train[index]["rows"])


def tokenise_splits(
    splits: ConversationSplits, tokenizer: PreTrainedTokenizerBase, template: str, args: ChatDataArguments
) -> Chats:
    """Tokenise all rows, and with `args.packing` pack the training rows, or take them from the cache.

    Args:
        splits: the rows.
        tokenizer: of the model.
        template: from `set_template`.
        args: say how rows are cut, which tokens the loss counts, and what happens to unusable rows.

    Raises:
        UserError: unusable rows, of all splits at once.
    """
    given = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    loaded = {name: rows for name, rows in given.items() if rows is not None}
    parts = [
        *(tokenizer_parts(tokenizer), template, args.max_length, args.train_on_prompts, args.packing),
        splits.folder.name,
    ]
    make = partial(_prepare, splits.folder, loaded, tokenizer, template, args)
    folder = build_once("chats", parts, "The token ids", make)
    facts = read_facts(folder)
    datasets = {name: mapped_dataset(folder, name) for name in loaded}
    usable = {name: _usable(splits.folder, folder, name, rows) for name, rows in loaded.items()}
    return Chats(
        *(datasets["train"], datasets.get("validation"), datasets.get("test"), usable, folder),
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
    """Write the tokens of all splits, and facts about them.

    Args:
        stored: holds the rows as `<split>.arrow`.
        loaded: the same rows, by split.
        tokenizer: as of `tokenise_splits`, like the next two.
        folder: gets `<split>.arrow`, facts, and the rejected rows with those of `stored`. If a split loses rows, it
            gets the others as `<split>-rows.arrow`.

    Raises:
        UserError: unusable rows, of all splits at once.
    """
    copy_rejected(stored, folder)
    problems = Problems()
    notes: list[str] = []
    summary = ""
    for name, rows in loaded.items():
        with problems.collecting():
            tokens = _tokenise(stored / f"{name}.arrow", rows, tokenizer, template, args, folder)
            notes += [*tokens.notes, *truncation_notes(rows, tokens, args.max_length)]
            if name == "train":
                usable = _usable(stored, folder, name, rows)
                summary = health_table(tokenizer_health(usable, tokens.full_lengths, tokenizer, args.max_length))
    problems.raise_any()
    notes += _leak_notes(stored, folder, loaded)
    if args.packing:
        _pack(folder / "train.arrow", args.max_length)
        summary += f"\n{packing_facts(mapped_dataset(folder, 'train'), args.max_length)}"
    write_facts(folder, {"summary": summary, "notes": notes})


def _tokenise(
    stored: Path,
    rows: Conversations,
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    args: ChatDataArguments,
    folder: Path,
) -> ChatTokens:
    """Write the tokens of the split in one file; arguments as of `_prepare`."""
    name = stored.stem
    bad = bad_chats(rows, args, folder)
    tokeniser = ChatTokeniser(rows, tokenizer, template, args.max_length, args.train_on_prompts, bad)
    batches = tokeniser.tokenised(stored_batches(stored))
    write_table(folder / stored.name, SCHEMA, with_progress(batches, f"tokenising the {name} rows", len(rows)))
    if tokeniser.unusable.left_out:
        usable = tokeniser.unusable.usable(stored_batches(stored))
        write_table(folder / f"{name}-rows.arrow", rows.table.schema, usable)
    return ChatTokens(mapped_dataset(folder, name), tokeniser.full_lengths(), tokeniser.unusable.notes())


def _usable(stored: Path, folder: Path, name: str, rows: Conversations) -> Conversations:
    """The conversations of a split that became tokens."""
    return replace(rows, table=map_table(_usable_path(stored, folder, name)))


def _usable_path(stored: Path, folder: Path, name: str) -> Path:
    usable = folder / f"{name}-rows.arrow"
    return usable if usable.exists() else stored / f"{name}.arrow"


def _leak_notes(stored: Path, folder: Path, loaded: Mapping[str, Conversations]) -> Iterator[str]:
    """Notes about usable training rows that also stand in usable held-out rows."""
    usable = {name: _usable(stored, folder, name, rows) for name, rows in loaded.items()}
    for name in SPLITS[1:]:
        if name in usable and (
            note := leak_note(usable["train"], _usable_path(stored, folder, "train"), usable[name])
        ):
            yield note


def _pack(path: Path, max_length: int) -> None:
    """Replace the rows of a table by packs of them."""
    groups = with_progress(stored_groups(path), "packing the train rows", map_table(path).num_rows)
    unfinished = path.with_suffix(".unfinished")
    write_table(unfinished, packing.SCHEMA, packed(groups, max_length))
    unfinished.rename(path)

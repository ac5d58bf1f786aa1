"""The conversations of a run, tokenised and packed, with what the user should know of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from indictune.data import packing
from indictune.data.cache import made_once
from indictune.data.chat_tokens import SCHEMA, ChatTokeniser, ChatTokens, truncation_notes
from indictune.data.conversations import ChatSource, Conversations, ConversationSplits, is_as_written
from indictune.data.packing import packed, packing_facts, stored_groups
from indictune.data.preparation import mapped_dataset, tokenizer_parts
from indictune.data.progress import shown
from indictune.data.tables import map_table, stored_batches, write_table
from indictune.data.templates import choose_template
from indictune.data.tokenizer_health import health_table, tokenizer_health
from indictune.errors import Problems
from indictune.llama_arguments import ChatDataArguments

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
        rows: the training rows, for their places.
        summary: what the tokenizer costs each language, as a table, and how rows were packed.
        notes: rows that were cut.
    """

    train: Dataset
    validation: Dataset | None
    test: Dataset | None
    rows: Conversations
    summary: str
    notes: list[str] = field(default_factory=list)

    def place(self, index: int) -> str:
        """Where training row `index` (from 0) stands in its source, or all rows of pack `index`."""
        if "rows" not in self.train.column_names:
            return self.rows.place(index)
        return ", ".join(self.rows.place(row) for row in self.train[index]["rows"])


def tokenise_splits(
    splits: ConversationSplits, tokenizer: PreTrainedTokenizerBase, template: str, args: ChatDataArguments
) -> Chats:
    """Tokenise all rows, and pack those that are trained on where `args.packing` says so; once, then from the cache.

    Args:
        splits: the rows.
        tokenizer: of the model.
        template: from `set_template`.
        args: say how rows are cut, and which tokens the loss counts.

    Raises:
        UserError: rows whose answers all lie behind `--max_length`, of all splits at once.
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
    return Chats(
        *(datasets["train"], datasets.get("validation"), datasets.get("test"), splits.train),
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
        folder: gets `<split>.arrow` and `facts.json`.

    Raises:
        UserError: rows whose answers all lie behind `--max_length`, of all splits at once.
    """
    problems = Problems()
    notes: list[str] = []
    summary = ""
    for name, rows in loaded.items():
        with problems.collecting():
            tokeniser = ChatTokeniser(rows, tokenizer, template, args.max_length, args.train_on_prompts)
            batches = tokeniser.tokenised(stored_batches(stored / f"{name}.arrow"))
            what = f"tokenising the {name} rows"
            write_table(folder / f"{name}.arrow", SCHEMA, shown(batches, what, len(rows)))
            tokens = ChatTokens(mapped_dataset(folder, name), tokeniser.full_lengths())
            notes += truncation_notes(rows, tokens, args.max_length)
            if name == "train":
                summary = health_table(tokenizer_health(rows, tokens.full_lengths, tokenizer, args.max_length))
    problems.raise_any()
    if args.packing:
        _pack(folder / "train.arrow", args.max_length)
        summary += f"\n{packing_facts(mapped_dataset(folder, 'train'), args.max_length)}"
    (folder / _FACTS).write_text(json.dumps({"summary": summary, "notes": notes}), encoding="utf-8")


def _pack(path: Path, max_length: int) -> None:
    """Put packs of the rows of a table in its place."""
    groups = shown(stored_groups(path), "packing the train rows", map_table(path).num_rows)
    unfinished = path.with_suffix(".unfinished")
    write_table(unfinished, packing.SCHEMA, packed(groups, max_length))
    unfinished.rename(path)

"""Tokenise and pack the conversations of a run, and collect notes for the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from indictune.config.chat_arguments import ChatDataArguments
from indictune.config.shared_arguments import EvaluationArguments
from indictune.data.bad_rows import bad_rows, copy_rejected
from indictune.data.cache import build_with_facts, map_table, stored_batches, write_table
from indictune.data.chat import chat_tokens
from indictune.data.chat.chat_tokens import NOT_THINKING, choose_template, tokenised_chats
from indictune.data.chat.conversations import ChatSource, Conversations, are_as_written, is_as_written
from indictune.data.chat.messages import Message
from indictune.data.packing import TokenRows, pack_table
from indictune.data.read.row_sources import SPLITS
from indictune.data.row_choice import Splits
from indictune.data.text.tokenisation import mapped_dataset, tokenizer_parts
from indictune.errors import Problems, attributed_to

if TYPE_CHECKING:
    from datasets import Dataset


def check_template(
    tokenizer: PreTrainedTokenizerBase, args: ChatDataArguments, sources: Mapping[str, ChatSource]
) -> None:
    """Check the chat template with the form of the first row, before the others; raises as `choose_template`."""
    as_written = is_as_written(sources["train"]) if "train" in sources else None
    if args.chat_template is not None or as_written is not None:
        choose_template(tokenizer, args.chat_template, bool(as_written), args.train_on_prompts)


def set_template(
    tokenizer: PreTrainedTokenizerBase, rows: Mapping[str, Conversations], args: ChatDataArguments
) -> str:
    """Set the chat template of a run on the tokenizer, which is saved with it; raises as `choose_template`."""
    as_written = are_as_written(rows)
    template = choose_template(tokenizer, args.chat_template, as_written, args.train_on_prompts)
    if args.chat_template is not None or as_written or template.startswith(NOT_THINKING):
        tokenizer.chat_template = template
    return template


class Chats(TokenRows):
    """The conversations of a run as a language model reads them."""

    @property
    def sampled_split(self) -> str:
        """The split that samples come from: one that is not trained on, if there is any."""
        return next(split for split in (*SPLITS[1:], "train") if split in self.datasets)

    def samples(self, count: int) -> tuple[list[list[Message]], Dataset | None]:
        """Conversations of `sampled_split` at equal distances, and their rows if they are not trained on.

        Answers that are marked bad are left out, because they are not what the model should write.
        """
        split = self.sampled_split
        dataset, rows = self.datasets[split], self.rows[split]
        indices, first = np.unique(pc.list_flatten(dataset.data["rows"]).to_numpy(), return_index=True)
        if "is_good" in dataset.column_names:
            are_good = dataset.data["is_good"].to_numpy()[first] == 1
            indices, first = indices[are_good], first[are_good]
        chosen = np.linspace(0, len(indices) - 1, min(count, len(indices))).astype(np.int64)
        chats = [rows.table["messages"][index].as_py() for index in indices[chosen].tolist()]
        return chats, None if split == "train" else dataset.select(first[chosen])


def tokenise_chat_splits(
    splits: Splits[Conversations],
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    args: ChatDataArguments | EvaluationArguments,
    positions: int | None = None,
    tokenised: Callable[..., Iterator[pa.RecordBatch]] = tokenised_chats,
    schema: pa.Schema = chat_tokens.SCHEMA,
) -> Chats:
    """Tokenise all rows, and with `--packing` pack the training rows, or take them from the cache.

    `positions` is the most tokens that the model reads; None for no limit. `tokenised` makes rows of the schema; its
    arguments are those of `tokenised_chats`. Raises `UserError` for all unusable rows.
    """
    packing = isinstance(args, ChatDataArguments) and args.packing
    settings = args.max_length, args.train_on_prompts
    thinking = args.train_on_thinking

    def make(folder: Path) -> dict[str, Any]:
        copy_rejected(splits.folder, folder)
        problems, notes, summary, truncated = Problems(), list[str](), "", dict[str, float]()
        for split, rows in splits.rows.items():
            with problems.collecting(), attributed_to(rows.origin):
                bad = bad_rows(rows.source, args, folder)
                bad.files = list(rows.files)
                stored = stored_batches(splits.folder / f"{split}.arrow")
                tokens = tokenised(stored, tokenizer, template, *settings, bad, positions, thinking)
                path = folder / f"{split}.arrow"
                write_table(path, schema, tokens, f"tokenising the {split} rows", len(rows))
                lengths = map_table(path)["full_length"]
                of_split = [*bad.notes(), *_cut_rows(rows.source, lengths, args.max_length)]
                notes += [f"{rows.origin} {note}" for note in of_split]
        problems.raise_any()
        if "train" in splits.rows:
            tokens = map_table(folder / "train.arrow")
            is_cut = pc.greater(tokens["full_length"], args.max_length)
            by_language = pa.table([tokens["language"], is_cut], ["language", "cut"]).group_by("language")
            shares = by_language.aggregate([("cut", "mean")]).to_pylist()
            truncated = {each["language"]: each["cut_mean"] for each in shares}
        if packing:
            summary = pack_table(folder / "train.arrow", args.max_length)
        return {"summary": summary, "notes": notes, "truncated": truncated}

    parts = [tokenizer_parts(tokenizer), template, *settings, thinking, packing, positions]
    folder, facts = build_with_facts("chats", [*parts, splits.folder.name], "The token ids", make)
    datasets = {split: mapped_dataset(folder, split) for split in splits.rows}
    return Chats(datasets, splits.rows, folder, **facts)


def _cut_rows(source: str, lengths: pa.ChunkedArray, max_length: int) -> list[str]:
    """A sentence for the user on the rows that are cut, if there are any."""
    if not (cut := pc.sum(pc.greater(lengths, max_length)).as_py()):
        return []
    return [
        f"{source}: {cut:,} of {len(lengths):,} rows ({cut / len(lengths):.1%}) are longer than --max_length "
        f"{max_length} and lose their ends; the longest has {pc.max(lengths).as_py():,} tokens."
    ]

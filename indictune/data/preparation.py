"""From cleaned rows to token ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from indictune.data.loading import Rows, Splits

logger = logging.getLogger(__name__)


def tokenise(rows: Rows, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], max_length: int) -> Dataset:
    """Tokenise the rows of a split.

    Args:
        rows: each label is one of `labels`.
        tokenizer: of the model.
        labels: names, in the order of the class ids.
        max_length: texts are cut to this many tokens, special ones included.

    Returns:
        Columns `input_ids`, `labels` (class id), `length` (tokens) and `language`, in the order of the rows.
    """
    class_id = {label: index for index, label in enumerate(labels)}

    def encode(batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        input_ids = tokenizer(batch["text"], truncation=True, max_length=max_length)["input_ids"]
        return {
            "input_ids": input_ids,
            "labels": [class_id[label] for label in batch["label"]],
            "length": [len(ids) for ids in input_ids],
        }

    return Dataset(rows.table).map(encode, batched=True, remove_columns=["text", "label", "line"], desc="tokenising")


def tokenise_splits(
    splits: Splits, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str], max_length: int
) -> tuple[Dataset, Dataset | None, Dataset | None]:
    """`tokenise` for the training, validation and test rows; None for those there are not."""
    loaded = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    counts = ", ".join(f"{len(rows):,} {name}" for name, rows in loaded.items() if rows is not None)
    logger.info("rows: %s; labels: %s", counts, ", ".join(labels))
    train = tokenise(splits.train, tokenizer, labels, max_length)
    validation, test = (
        None if rows is None else tokenise(rows, tokenizer, labels, max_length)
        for rows in (splits.validation, splits.test)
    )
    return train, validation, test

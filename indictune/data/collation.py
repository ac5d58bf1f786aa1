"""From tokenised rows to the padded tensors of one micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset

from indictune.data.batching import NO_ROW

IGNORED_LABEL = -100  # torch's cross-entropy and the Trainer's row count both leave it out

Row = dict[str, Any]


class IndexedRows(torch.utils.data.Dataset[Row]):
    """A tokenised dataset whose rows know their number, and which has a row for `NO_ROW` that nobody counts.

    Args:
        dataset: columns `input_ids` and `labels` (a class id, or one label a token); packed, `seq_lengths` too.
    """

    def __init__(self, dataset: Dataset) -> None:
        columns = ("input_ids", "labels", "seq_lengths")
        self._dataset = dataset.select_columns([name for name in columns if name in dataset.column_names])

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        if index == NO_ROW:
            return self._row_for_nothing()
        return {**self._dataset[index], "row": index}

    def _row_for_nothing(self) -> Row:
        """Two tokens are enough to let any model run; a row of the dataset would cost what its text costs."""
        first = self._dataset[0]
        tokens = first["input_ids"][:2]
        labels = [IGNORED_LABEL] * len(tokens) if isinstance(first["labels"], list) else IGNORED_LABEL
        return {"input_ids": tokens, "labels": labels, "seq_lengths": [len(tokens)], "row": NO_ROW}


class PadToLongest:
    """Pad the rows of a micro-batch to its longest.

    Args:
        pad_token_id: fills the places after (or before) a row's tokens.
        padding_side: `right`, or `left` for decoders.
        with_row_numbers: add `row_numbers`, int64 [rows], for evaluation.
    """

    def __init__(self, pad_token_id: int, padding_side: str, with_row_numbers: bool = False) -> None:
        self.pad_token_id = pad_token_id
        self.padding_side = padding_side
        self.with_row_numbers = with_row_numbers

    def __call__(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Tensors `input_ids` and `attention_mask` [rows, longest], `labels` [rows] of class ids or [rows, longest] of
        labels for each token, all int64."""
        tokens = [torch.tensor(row["input_ids"]) for row in rows]
        labels = [torch.tensor(row["labels"]) for row in rows]
        batch = {
            "input_ids": self._pad(tokens, self.pad_token_id),
            "attention_mask": self._pad([torch.ones_like(ids) for ids in tokens], 0),
            "labels": self._pad(labels, IGNORED_LABEL) if labels[0].dim() else torch.stack(labels),
        }
        if self.with_row_numbers:
            batch["row_numbers"] = torch.tensor([row["row"] for row in rows])
        return batch

    def _pad(self, sequences: list[torch.Tensor], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            sequences, batch_first=True, padding_value=value, padding_side=self.padding_side
        )


class JoinDocuments:
    """Join the packs of a micro-batch into one sequence. Positions that begin again tell its documents apart."""

    def __call__(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Tensors `input_ids`, `labels` and `position_ids`, all int64 [1, tokens of all documents].

        There is no attention mask: transformers reads where documents begin from `position_ids` only without one.
        """
        documents = [length for row in rows for length in row["seq_lengths"]]
        return {
            "input_ids": torch.tensor([[token for row in rows for token in row["input_ids"]]]),
            "labels": torch.tensor([[label for row in rows for label in row["labels"]]]),
            "position_ids": torch.cat([torch.arange(length) for length in documents])[None],
        }

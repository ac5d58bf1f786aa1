"""Turn tokenised rows into the tensors of one micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from indictune.data.batching import NO_ROW, TrainingBatches, lengths_of, lengths_of_sides
from indictune.data.cache import forget_mapped

if TYPE_CHECKING:
    from datasets import Dataset

_ROWS_IN_MEMORY = 250  # each maps 64 kB of each column's file (Linux, `fault_around_bytes`)
_READ = ["input_ids", "labels", "seq_lengths", "token_type_ids"]
_READ += ["chosen_length", "other_input_ids", "other_labels", "is_good"]
IGNORED_LABEL = -100  # torch's cross-entropy and the Trainer's row count both leave it out

Row = dict[str, Any]


def text_lengths(dataset: Dataset) -> torch.Tensor:
    """Tokens of each text or window, int64 [texts]. A packed row has several, and a pair of answers two."""
    if "chosen_length" in dataset.column_names:
        return lengths_of_sides(dataset).flatten()
    if "seq_lengths" not in dataset.column_names:
        return lengths_of(dataset)
    texts = pc.list_flatten(dataset.with_format("arrow")[:]["seq_lengths"])
    return torch.from_numpy(texts.to_numpy().astype(np.int64))


class IndexedRows(torch.utils.data.Dataset[Row]):
    """A tokenised dataset that gives each row with its number. `NO_ROW` gives a dummy row that does not count.

    Args:
        dataset: columns `input_ids` and `labels` (a number, a list of one length in all rows, or one label a token);
            packed, `seq_lengths` too; of pairs of texts, `token_type_ids`, if the model reads them; of
            pairs of answers, `chosen_length`; of marked ones, `is_good`, `other_input_ids` and `other_labels`.
        batches: of a training, whose rows have the number of the `epoch` too.
    """

    def __init__(self, dataset: Dataset, batches: TrainingBatches | None = None) -> None:
        self._batches, self._read = batches, 0
        table = dataset.with_format("arrow")[:]
        self._length = len(table)
        columns = {name: table[name] for name in table.column_names if name in _READ}
        self._lists = {name: column for name, column in columns.items() if pa.types.is_list(column.type)}
        self._arrays = {name: _matrix(column) for name, column in columns.items() if name not in self._lists}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        """`input_ids` and `seq_lengths` (of the row's documents; packed or not) int [tokens] and [documents], `labels`
        a number, int [labels] or int [tokens], and `row`, the index."""
        if index == NO_ROW:
            return self._dummy_row()
        self._read += 1
        if self._read % _ROWS_IN_MEMORY == 0:
            forget_mapped()
        row: Row = {name: column[index].values.to_numpy() for name, column in self._lists.items()}  # without copies
        row |= {name: array[index] for name, array in self._arrays.items()}
        more = {"row": index} if self._batches is None else {"row": index, "epoch": self._batches.epoch}
        return {"seq_lengths": np.array([len(row["input_ids"])]), **row, **more}

    def _dummy_row(self) -> Row:
        """A row of two tokens, the least that every model can run."""
        first = self[0]
        row: Row = {name: first[name][:2] for name in first.keys() & {"input_ids", "token_type_ids"}}
        label = first["labels"][:2] if "labels" in self._lists else first["labels"]
        labels = np.full_like(label, IGNORED_LABEL, subok=False)
        return row | {"labels": labels, "seq_lengths": np.array([len(row["input_ids"])]), "row": NO_ROW}


class PadToLongest:
    """Pad the rows of a micro-batch to its longest; for evaluation, add `row_numbers`, int64 [rows].

    A row in several windows (`seq_lengths`) takes as many rows of the tensors. In training, `labels` has its label at
    its first window, and `IGNORED_LABEL` at the others. For evaluation, `windows`, int64 [rows], has their numbers.
    """

    def __init__(self, pad_token_id: int, padding_side: str, with_row_numbers: bool = False) -> None:
        self.pad_token_id = pad_token_id
        self.padding_side = padding_side
        self.with_row_numbers = with_row_numbers

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Tensors `input_ids`, `attention_mask` and, if rows have them, `token_type_ids`, int64 [rows, longest]; and
        `labels`: int64 class ids or float32 numbers [rows], int64 or float32 [rows, labels], or int64 [rows, longest]
        for each token."""
        tokens = [window for row in rows for window in _windows(row)]
        labels = [row["labels"] for row in rows]
        counts = [len(row.get("seq_lengths", "1")) for row in rows]
        if not self.with_row_numbers:
            labels = _at_first_windows(labels, counts)
        is_padded = np.ndim(labels[0]) and labels[0].dtype != np.float32  # soft labels are of one length
        batch = {
            "input_ids": self._pad(tokens, self.pad_token_id),
            "attention_mask": self._pad([np.ones_like(ids) for ids in tokens], 0),
            "labels": self._pad(labels, IGNORED_LABEL) if is_padded else _stacked(labels),
        }
        if "token_type_ids" in rows[0]:  # of pairs, which are in no windows
            batch["token_type_ids"] = self._pad([row["token_type_ids"] for row in rows], 0)
        if self.with_row_numbers:
            batch["row_numbers"] = torch.tensor([row["row"] for row in rows])
            if len(tokens) > len(rows):
                batch["windows"] = torch.tensor(counts)
        return batch

    def _pad(self, sequences: list[np.ndarray], value: int) -> torch.Tensor:
        longest = max(map(len, sequences))
        padded = np.full((len(sequences), longest), value)
        for row, sequence in zip(padded, sequences, strict=True):
            start = 0 if self.padding_side == "right" else longest - len(sequence)
            row[start : start + len(sequence)] = sequence
        return torch.from_numpy(padded)


class JoinRows:
    """Join the rows of a micro-batch in one sequence, without padding.

    Positions restart with each document: a row, each of the rows in a pack, or each window of a row. Labels of rows in
    windows are those of `PadToLongest`.

    Args:
        uncounted_token: RoBERTa's padding token. Its position is its own id; other tokens count from the next number.
            None counts all tokens from 0.
        labels_of_tokens: whether a list of labels has one for each token; else the row has several.
    """

    def __init__(self, uncounted_token: int | None = None, labels_of_tokens: bool = True) -> None:
        self.uncounted_token = uncounted_token
        self.labels_of_tokens = labels_of_tokens

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """A packed batch, as models expect it.

        `input_ids`, `position_ids` and, if rows have them, `token_type_ids`, int64 [1, tokens of all rows]; `labels`,
        those of the rows as `PadToLongest` makes them, or int64 [1, tokens]; `cu_seq_lens_q` and `cu_seq_lens_k`,
        int32 [documents + 1], the start of each document and the end of the last; `max_length_q` and `max_length_k`,
        the longest document's tokens.

        There is no attention mask: the models of transformers look for documents only without one.
        """
        lengths = np.concatenate([row["seq_lengths"] for row in rows])
        ends = np.cumsum(lengths)
        names = [name for name in ("input_ids", "token_type_ids") if name in rows[0]]
        joined = {name: _joined([row[name] for row in rows]) for name in names}
        boundaries = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))
        longest = int(lengths.max())
        labels = [row["labels"] for row in rows]
        of_tokens = bool(np.ndim(labels[0])) and self.labels_of_tokens
        counts = [len(row["seq_lengths"]) for row in rows]
        return joined | {
            "position_ids": self._positions(joined["input_ids"][0].numpy(), lengths),
            "labels": _joined(labels) if of_tokens else _stacked(_at_first_windows(labels, counts)),
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def _positions(self, input_ids: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        if self.uncounted_token is None:
            return torch.from_numpy(np.arange(len(input_ids)) - starts)[None]
        counts = (input_ids != self.uncounted_token).astype(np.int64)
        counted_before = np.cumsum(counts) - counts
        numbers = counted_before - counted_before[starts] + 1
        return torch.from_numpy(numbers * counts + self.uncounted_token)[None]


class PairRows:
    """Collate both answers of each pair as two rows, the better one first, by a collator of rows.

    Args:
        keeps_apart: whether the second answers are in a batch of their own, `others`.
    """

    def __init__(self, collator: PadToLongest | JoinRows, keeps_apart: bool = False) -> None:
        self.collator, self.keeps_apart = collator, keeps_apart

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The batch of the collator, whose `labels` are named `answer_labels`.

        Its own `labels`, int64 [pairs, 2], are `IGNORED_LABEL` and 1, or 0 for an answer marked bad, or twice the
        former for a dummy: the Trainer (5.23) counts pairs by them, with the first column or without. `row_numbers` is
        int64 [pairs].
        """
        numbers = torch.tensor([row["row"] for row in rows])
        ignored = torch.full_like(numbers, IGNORED_LABEL)
        marks = torch.tensor([int(row.get("is_good", 1)) for row in rows])
        shared = {"labels": torch.stack([ignored, ignored.where(numbers == NO_ROW, marks)], 1), "row_numbers": numbers}
        sides = list(map(_sides, rows))
        if self.keeps_apart:
            own, others = (self._answers(each) | shared for each in zip(*sides, strict=True))
            return own | {"others": others}
        return self._answers([side for both in sides for side in both]) | shared

    def _answers(self, rows: Sequence[Row]) -> dict[str, Any]:
        batch = self.collator(rows)
        batch["answer_labels"] = batch.pop("labels")
        return batch


def _sides(row: Row) -> tuple[Row, Row]:
    """Both conversations of a pair, or of a marked answer; a dummy row is both."""
    if row["row"] == NO_ROW:
        return row, row
    names = "input_ids", "labels"
    if "other_labels" in row:
        return row, row | {name: row[f"other_{name}"] for name in names} | _length(row["other_labels"])
    end = int(row["chosen_length"])
    parts = ({name: row[name][part] for name in names} for part in (slice(end), slice(end, None)))
    chosen, rejected = (each | _length(each["labels"]) for each in parts)
    return chosen, rejected


def _length(labels: np.ndarray) -> Row:
    return {"seq_lengths": np.array([len(labels)])}


def _windows(row: Row) -> list[np.ndarray]:
    """The token ids of each window of a row."""
    ends = np.cumsum(row.get("seq_lengths", [len(row["input_ids"])]))
    return np.split(row["input_ids"], ends[:-1])


def _at_first_windows(labels: list[Any], counts: Sequence[int]) -> list[Any]:
    """A label for each window: the row's at its first one, and `IGNORED_LABEL` at the others."""
    if max(counts) == 1:
        return labels
    placed = []
    for label, count in zip(labels, counts, strict=True):
        placed += [label, *[np.full_like(label, IGNORED_LABEL, subok=False)] * (count - 1)]
    return placed


def _joined(sequences: list[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(sequences).astype(np.int64))[None]


def _stacked(labels: list[Any]) -> torch.Tensor:
    stacked = np.stack(labels)
    return torch.from_numpy(stacked if stacked.dtype == np.float32 else stacked.astype(np.int64))


def _matrix(column: pa.ChunkedArray) -> np.ndarray:
    """A column of numbers [rows], or of lists of one length [rows, length]."""
    is_flat = not pa.types.is_fixed_size_list(column.type)
    numbers: np.ndarray = column.to_numpy() if is_flat else column.combine_chunks().flatten().to_numpy()
    return numbers if is_flat else numbers.reshape(len(column), -1)


def in_order(row_numbers: np.ndarray, gathered: Iterable[np.ndarray], num_rows: int) -> list[np.ndarray]:
    """The gathered results of each row, in the dataset's order, without dummy rows.

    `row_numbers` is int64 [gathered], and each result [gathered, ...]. Raises `RuntimeError` if a row is missing or
    duplicate.
    """
    real = row_numbers != NO_ROW
    order = np.argsort(row_numbers[real])
    if not np.array_equal(row_numbers[real][order], np.arange(num_rows)):
        raise RuntimeError(f"The evaluation gathered {real.sum()} rows, not each of {num_rows} rows once.")
    return [values[real][order] for values in gathered]

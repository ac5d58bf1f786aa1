"""Conversations that turn out unusable when they become tokens: they stop the run, or are left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from indictune.config.arguments import BadRowArguments
from indictune.data.bad_rows import Quarantine
from indictune.data.conversations import Conversations
from indictune.errors import Problems, UserError

_MAX_PLACES = 20


def quarantine_of(rows: Conversations, args: BadRowArguments, folder: Path) -> Quarantine | None:
    """Where those of a split go that are left out, `folder` in the end; None where they stop the run."""
    if args.bad_rows == "stop":
        return None
    quarantine = Quarantine(rows.source, args.max_bad_fraction, folder, rows.left_out)
    quarantine.files = rows.files
    return quarantine


class UnusableChats:
    """Those of one split.

    Args:
        rows: of the split.
        max_length: tokens that a row keeps.
        quarantine: from `quarantine_of`.

    Attributes:
        left_out: indices of those that were left out.
    """

    def __init__(self, rows: Conversations, max_length: int, quarantine: Quarantine | None) -> None:
        self._rows = rows
        self._max_length = max_length
        self._quarantine = quarantine
        self.left_out: list[int] = []
        # Where they stop the run:
        self._faults: dict[str, list[int]] = {}  # what is wrong -> indices of rows
        self._cut_off: list[int] = []
        self._longest = 0

    @property
    def stop(self) -> bool:
        """Whether one was found that cannot be written out, and stops the run."""
        return bool(self._faults)

    def add(self, index: int, what: str) -> None:
        """One that cannot be written out, with `what` as in "3 rows <what>"."""
        if self._quarantine is None:
            self._faults.setdefault(what, []).append(index)
        else:
            self._leave_out(self._quarantine, index, f"a row {what}.")

    def add_cut_off(self, index: int, length: int) -> None:
        """One of `length` tokens, whose answers all lie behind those that it keeps."""
        if self._quarantine is None:
            self._cut_off.append(index)
            self._longest = max(self._longest, length)
        else:
            behind = f"its answers lie wholly behind --max_length {self._max_length}"
            self._leave_out(self._quarantine, index, f"{behind}; --max_length {length} takes it whole.")

    def finish(self) -> None:
        """All rows have gone by.

        Raises:
            UserError: there are some, and they stop the run, or are too many to be left out.
        """
        origin = self._rows.origin
        if self._quarantine is not None:
            try:
                self._quarantine.finish(len(self._rows) - self._quarantine.count)
            except UserError as error:
                raise UserError([f"{origin} {problem}" for problem in error.problems]) from error
        problems = Problems(
            f"{origin}: {len(indices):,} rows {what}: {self._places(indices)}."
            for what, indices in self._faults.items()
        )
        problems.raise_any()
        if self._cut_off:
            count, total = len(self._cut_off), len(self._rows)
            raise UserError(
                f"{origin}: the answers of {count:,} of {total:,} rows ({count / total:.1%}) lie wholly behind "
                f"--max_length {self._max_length}: {self._places(self._cut_off)}. Give --max_length {self._longest}, "
                "which takes them whole, or leave them out (--bad_rows quarantine)."
            )

    def notes(self) -> list[str]:
        """What the user should know of those that were left out."""
        return [] if self._quarantine is None else [f"{self._rows.origin} {each}" for each in self._quarantine.notes()]

    def without_them(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of the split but for those that were left out."""
        kept = np.ones(len(self._rows), dtype=np.bool_)
        kept[self.left_out] = False
        first = 0
        for batch in batches:
            yield batch.filter(pa.array(kept[first : first + batch.num_rows]))
            first += batch.num_rows

    def _leave_out(self, quarantine: Quarantine, index: int, reason: str) -> None:
        messages, line = (self._rows.table[name][index].as_py() for name in ("messages", "line"))
        quarantine.add(line, reason, {"messages": messages}, reason)
        self.left_out.append(index)

    def _places(self, indices: Sequence[int]) -> str:
        more = f" and {len(indices) - _MAX_PLACES:,} more" if len(indices) > _MAX_PLACES else ""
        return ", ".join(self._rows.place(index) for index in indices[:_MAX_PLACES]) + more

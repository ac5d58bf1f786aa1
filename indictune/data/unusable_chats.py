"""Conversations that turn out unusable when they become tokens: they stop the run, or are left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from indictune.config.arguments import BadRowArguments
from indictune.data.bad_rows import BadRows, Quarantine, bad_rows
from indictune.data.conversations import Conversations
from indictune.errors import attributed_to, problem


def bad_chats(rows: Conversations, args: BadRowArguments, folder: Path) -> BadRows:
    """A collector for the unusable rows of a split; `folder` gets the rows that are left out."""
    bad = bad_rows(rows.source, args, folder, rows.left_out)
    bad.files = rows.files
    return bad


class UnusableChats:
    """The unusable conversations of one split.

    Args:
        rows: of the split.
        max_length: tokens that a row keeps.
        bad: from `bad_chats`.

    Attributes:
        left_out: indices of the unusable rows.
        stops: whether a row was found that cannot be written out, and that stops the run.
    """

    def __init__(self, rows: Conversations, max_length: int, bad: BadRows) -> None:
        self._rows = rows
        self._max_length = max_length
        self._bad = bad
        self._is_quarantine = isinstance(bad, Quarantine)
        self._cut_off = 0
        self._longest = 0
        self.left_out: list[int] = []
        self.stops = False

    def add(self, index: int, code: str, **details: Any) -> None:
        """Add a row that cannot be written out, by its index; code and details are those of the problem."""
        self.stops = not self._is_quarantine
        self._add(index, code, details)

    def add_cut_off(self, index: int, length: int) -> None:
        """Add a row of `length` tokens that keeps no token of an answer."""
        self._cut_off += 1
        self._longest = max(self._longest, length)
        self._add(index, "answers-cut-off", {"max_length": self._max_length, "length": length})

    def finish(self) -> None:
        """Check the unusable rows once all rows were tokenised.

        Raises:
            UserError: they stop the run, or are too many.
        """
        if self._cut_off and not self._is_quarantine:
            counts: dict[str, Any] = {
                "count": self._cut_off,
                "rows": len(self._rows),
                "share": self._cut_off / len(self._rows),
            }
            lengths: dict[str, Any] = {"max_length": self._max_length, "longest": self._longest}
            self._bad.problems.append(problem("answers-beyond-limit", value=self._rows.source, **counts, **lengths))
        with attributed_to(self._rows.origin):
            self._bad.finish(len(self._rows) - self._bad.count)

    def notes(self) -> list[str]:
        """Sentences for the user about rows that were left out."""
        return [f"{self._rows.origin} {note}" for note in self._bad.notes()]

    def usable(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of the split without the unusable ones."""
        kept = np.ones(len(self._rows), dtype=np.bool_)
        kept[self.left_out] = False
        first = 0
        for batch in batches:
            yield batch.filter(pa.array(kept[first : first + batch.num_rows]))
            first += batch.num_rows

    def _add(self, index: int, code: str, details: dict[str, Any]) -> None:
        messages, line = (self._rows.table[name][index].as_py() for name in ("messages", "line"))
        self._bad.add(line, code, {"messages": messages}, **details)
        self.left_out.append(index)

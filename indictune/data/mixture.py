"""Decide how often each training row comes in an epoch: by the weight of its files, and by its language."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from indictune.config.plan import RunPlan
from indictune.console_text import table
from indictune.data.arrow_tables import map_table, stored_batches, write_table
from indictune.data.weighted_files import Entry, entry_numbers

logger = logging.getLogger(__name__)

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """How languages are balanced.

    Attributes:
        alpha: a language with n rows gets a share of an epoch in proportion to n ** alpha. 1 changes nothing; 0 gives
            every language the same share.
        seed: draws the rows that come once more than others, or not at all.
    """

    alpha: float
    seed: int

    def apply(self, path: Path, entries: Sequence[Entry], labels: pa.ChunkedArray | None) -> list[list[str]]:
        """Write the training rows at `path` again, each as often as it comes in an epoch.

        Args:
            path: of a table with columns `line` and `language`.
            entries: of `--train_files`; none for other rows.
            labels: of each row: each label keeps a row. None without labels.

        Returns:
            The rows of the table that `announce` shows; none if nothing changes.
        """
        rows = map_table(path)
        whole = entries or [Entry("all rows")]
        entry = entry_numbers(rows["line"], whole) if entries else np.zeros(len(rows), np.int64)
        languages = sorted(rows["language"].unique().to_pylist())
        language = np.asarray(pc.index_in(rows["language"], value_set=pa.array(languages))).astype(np.int64)
        group = entry * len(languages) + language
        present = np.bincount(group, minlength=len(whole) * len(languages))
        wanted = self.wanted(present.reshape(len(whole), -1), [each.weight for each in whole]).ravel()
        if np.array_equal(present, wanted):
            return []
        repeats = _dealt(group, wanted, np.random.default_rng(self.seed))
        if labels is not None:
            _keep_a_row_each(repeats, labels)
        _repeat(path, repeats)
        after = np.bincount(group, weights=repeats, minlength=len(present)).astype(int)
        cells = [(int(number), int(present[number]), int(after[number])) for number in np.flatnonzero(present)]
        return [
            [*_names(number, whole, languages), f"{before:,}", f"{now:,}", f"{now / after.sum():.1%}"]
            for number, before, now in cells
        ]

    def wanted(self, present: Counts, weights: Sequence[float]) -> Counts:
        """Rows of an epoch, int64 [entries, languages], of those present; the weights are those of the entries.

        Languages only share out the rows that the weights give: their sum stays, but for rounding.
        """
        weighted = present * np.asarray(weights)[:, None]
        by_language = weighted.sum(0)
        powers = np.where(by_language > 0, by_language**self.alpha, 0)
        target = powers / powers.sum() * by_language.sum()
        rows: Counts = np.rint(weighted * target / np.maximum(by_language, 1e-9)).astype(np.int64)
        return rows


def announce(mix: Sequence[Sequence[str]]) -> None:
    """Show how many rows of each file and language come in an epoch."""
    if mix:
        for line in table(["mix of an epoch", "language", "rows", "in an epoch", "share"], mix).split("\n"):
            logger.info(line)


def mixture_of(plan: RunPlan[Any, Any]) -> Mixture | None:
    """The mixture of a run; None if its rows stay as they are."""
    training = plan.training
    if plan.data.language_sampling_alpha == 1 and not plan.data.train_files:
        return None
    seed = training.seed if training.data_seed is None else training.data_seed
    return Mixture(plan.data.language_sampling_alpha, seed)


def _names(group: int, entries: Sequence[Entry], languages: Sequence[str]) -> tuple[str, str]:
    entry, language = divmod(group, len(languages))
    return entries[entry].path, languages[language]


def _dealt(group: Counts, wanted: Counts, generator: np.random.Generator) -> Counts:
    """How often each row comes. Those of a group come equally often, and drawn ones once more, as the group wants."""
    repeats = np.zeros(len(group), np.int64)
    order = np.argsort(group, kind="stable")
    ends = np.cumsum(np.bincount(group, minlength=len(wanted)))
    for number, members in enumerate(np.split(order, ends[:-1])):
        if len(members):
            repeats[members], more = divmod(int(wanted[number]), len(members))
            repeats[generator.permutation(members)[:more]] += 1
    return repeats


def _keep_a_row_each(repeats: Counts, labels: pa.ChunkedArray) -> None:
    """Let the first row of each label come once, if no row of it would come."""
    names = labels.unique()
    codes = np.asarray(pc.index_in(labels, value_set=names)).astype(np.int64)
    first = np.unique(codes, return_index=True)[1]
    lost = np.bincount(codes, weights=repeats, minlength=len(names)) == 0
    repeats[first[lost]] = 1


def _repeat(path: Path, repeats: Counts) -> None:
    """Write a table again with each row as often as said."""

    def repeated() -> Iterator[pa.RecordBatch]:
        start = 0
        for batch in stored_batches(path):
            counts = repeats[start : start + batch.num_rows]
            yield batch.take(pa.array(np.repeat(np.arange(batch.num_rows), counts)))
            start += batch.num_rows

    unfinished = path.with_suffix(".unfinished")
    write_table(unfinished, map_table(path).schema, repeated())
    unfinished.rename(path)

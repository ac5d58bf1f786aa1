"""Hold out training rows to evaluate on, where a run names no validation rows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from indictune.config.arguments import VALIDATION_SHARE
from indictune.config.plan import RunPlan
from indictune.data.row_sources import Source
from indictune.data.rows import StoredRows, text_keys

logger = logging.getLogger(__name__)

Rows = TypeVar("Rows", bound=StoredRows)


@dataclass(frozen=True)
class ValidationSplit:
    """Which share of the training rows is held out.

    Attributes:
        share: of the rows, above 0 and below 1.
        seed: another one holds out other rows.
    """

    share: float
    seed: int

    def choose(
        self, texts: Iterable[str], strata: pa.Array | pa.ChunkedArray, labels: pa.ListArray | None = None
    ) -> npt.NDArray[np.bool_]:
        """Which rows are held out, bool [rows]; the choice depends on the rows alone, not on their order.

        Rows with one text stay together. A text with more rows than half of the share is trained on. So is one text of
        each label: without it, the model would not know the label.

        Args:
            texts: of the rows.
            strata: a string for each row; rows with equal ones are held out in proportion.
            labels: of each row, a list of strings; None if rows have none.
        """
        keys = text_keys(texts, str(self.seed))
        _, first, text_of, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        wanted = round(self.share * len(keys))
        may_go = counts <= max(1, wanted / 2)
        if labels is not None:
            label_of = _codes(labels.flatten())
            kept = np.full(label_of.max(initial=-1) + 1, len(first))
            np.minimum.at(kept, label_of, text_of[labels.value_parent_indices().to_numpy()])
            may_go[kept] = False
        # Keys are hashes: texts in the order of their keys are shuffled.
        ordered = np.argsort(_codes(strata)[first], kind="stable")
        ordered = ordered[may_go[ordered]]
        rate = wanted / max(wanted, counts[ordered].sum(), 1)
        passed = np.floor(np.arange(len(ordered) + 1) * rate + 0.5)
        is_chosen = np.zeros(len(first), np.bool_)
        is_chosen[ordered] = np.diff(passed) > 0
        return is_chosen[text_of]

    def divided(self, train: Rows, left: pa.Table, held_out: pa.Table) -> dict[str, Rows]:
        """The rows of both splits, given by their tables; those held out are named after this flag."""
        origin = f"--validation_split {self.share:g}"
        return {"train": replace(train, table=left), "validation": replace(train, table=held_out, origin=origin)}

    def announce(self, rows: Mapping[str, StoredRows]) -> None:
        """Tell the user how many rows are held out of the splits, in one line."""
        if "validation" in rows:
            held_out = len(rows["validation"])
            logger.info(
                "no --validation_file: %s of %s rows are held out to evaluate on (--validation_split %g)",
                *(f"{held_out:,}", f"{held_out + len(rows['train']):,}", self.share),
            )


def split_of(plan: RunPlan[Any, Any]) -> ValidationSplit | None:
    """The split of a run; None if it has a validation file, or asks for none."""
    share, training = plan.configuration.get("validation_split"), plan.training  # an evaluation has no such flag
    if not share or plan.data.validation_file is not None:
        return None
    return ValidationSplit(share, training.seed if training.data_seed is None else training.data_seed)


def used_split(
    split: ValidationSplit | None, sources: Mapping[str, Source[Any]]
) -> tuple[ValidationSplit | None, list[str]]:
    """The split, unless the sources have validation rows, and a warning if a given share is ignored."""
    if split is None or "validation" not in sources:
        return split, []
    origin = sources["validation"].origin
    note = f"Ignoring --validation_split {split.share:g}: {origin} has validation rows."
    return None, [] if split.share == VALIDATION_SHARE else [note]


def _codes(values: pa.Array | pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """The rank of each string among all, in alphabetical order, int64 [values]."""
    distinct = values.unique().sort()
    return np.asarray(pc.index_in(values, value_set=distinct)).astype(np.int64)

"""Warn of labels that few training rows have: a typing error, or too few to learn."""

from __future__ import annotations

import difflib

from indictune.data.columns import shortened
from indictune.data.labels import REGRESSION, first_location, label_counts
from indictune.data.rows import StoredRows

_FEW_ROWS = 20
_FEW_SHARE = 0.005
_MAX_LISTED = 5


def rare_labels(train: StoredRows, problem_type: str | None) -> list[str]:
    """A sentence for each of the first few rare labels, and one for the others.

    A label is rare below 0.5% of the rows, or below 20 rows. In a small set, where no label has 20, only the share
    counts.
    """
    if problem_type == REGRESSION:
        return []
    counts = label_counts(train, problem_type)
    limit = _FEW_SHARE * len(train)
    if max(counts.values()) >= _FEW_ROWS:
        limit = max(limit, _FEW_ROWS)
    rare = sorted((label for label, count in counts.items() if count < limit), key=lambda label: counts[label])
    usual = {label: count for label, count in counts.items() if count >= limit}
    notes = []
    for label in rare[:_MAX_LISTED]:
        rows = f"{counts[label]} of {len(train):,} rows have label {shortened(label)}"
        near = difflib.get_close_matches(label, usual, n=1)
        meant = f"; is it {shortened(near[0])} ({usual[near[0]]:,} rows)?" if near else "; they teach little."
        notes.append(
            f"{train.origin} {train.source}: {rows}, first {first_location(train, label, problem_type)}{meant}"
        )
    if len(rare) > _MAX_LISTED:
        notes.append(f"{train.origin} {train.source}: {len(rare) - _MAX_LISTED} more labels are as rare.")
    return notes

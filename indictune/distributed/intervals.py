"""Spans of time: their union, intersection and length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]  # begin and end, in any unit


def union(spans: Iterable[Interval]) -> list[Interval]:
    """The times that are in at least one span, as sorted spans that do not touch."""
    merged: list[Interval] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif begin < end:
            merged.append((begin, end))
    return merged


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The times that are in both. Each comes from `union`."""
    common, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            common.append((begin, end))
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(spans: Iterable[Interval]) -> float:
    """The time in spans that do not overlap."""
    return sum(end - begin for begin, end in spans)

"""Unions and intersections of spans of time."""

from __future__ import annotations

from indictune.distributed.trace_times import intersection, total_length, union


def test_a_union_merges_what_overlaps_or_touches() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (1, 1.5), (7, 7)]) == [(0, 4), (5, 6)]
    assert union([]) == []


def test_an_intersection_is_what_both_have() -> None:
    one, other = [(0.0, 4.0), (5.0, 6.0), (8.0, 9.0)], [(1.0, 2.0), (3.0, 5.5), (9.0, 10.0)]
    assert intersection(one, other) == intersection(other, one) == [(1, 2), (3, 4), (5, 5.5)]
    assert intersection(one, []) == []


def test_the_length_of_a_union_is_that_of_both_less_what_they_share() -> None:
    one, other = union([(0, 3), (4, 8)]), union([(2, 5), (7, 11)])
    assert (
        total_length(union([*one, *other]))
        == total_length(one) + total_length(other) - total_length(intersection(one, other))
        == 11
    )

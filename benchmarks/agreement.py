"""Whether two curves of losses agree, and show anything."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

LEARNED = 0.9  # of the first steps' loss
AIM = 1e-4  # how far apart losses in fp32 may be


def has_learned(losses: Sequence[float]) -> bool:
    """Whether a curve has fallen: a model that stays where it began has this loss whatever computes it."""
    first, last = first_and_last(losses)
    return last <= LEARNED * first


def first_and_last(losses: Sequence[float]) -> tuple[float, float]:
    """The mean loss of the first three steps, and of the last three."""
    return statistics.mean(losses[:3]), statistics.mean(losses[-3:])


def tell_fall(losses: Sequence[float]) -> str:
    """What is wrong with a curve that has not learned."""
    first, last = first_and_last(losses)
    return f"The loss fell from {first:.3f} to {last:.3f} only: such a curve compares little."


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """How far apart two curves are at most; no number where one of them is none somewhere."""
    return float(np.abs(np.subtract(losses, others)).max())


def tell_distance(largest: float) -> str:
    """What is wrong with curves that are so far apart."""
    return f"The losses in fp32 are {largest:.1e} apart, not {AIM:.0e} or less."

"""95% intervals by the percentile bootstrap: rows are drawn again, with replacement, a thousand times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

RESAMPLES = 1_000
BLOCKS = 1_000
_PERCENTILES = (2.5, 97.5)
_SEED = 0
_CELLS_AT_ONCE = 4_000_000  # 32 MB of counts


@dataclass(frozen=True)
class Estimate:
    """A score with its 95% interval, NaN to NaN where none was asked for."""

    value: float
    low: float
    high: float


def estimate(value: float, drawn: np.ndarray) -> Estimate:
    """A score with the interval of its values in drawn rows, [draws]."""
    return estimates(np.array([value]), drawn[:, None])[0]


def estimates(values: np.ndarray, drawn: np.ndarray) -> list[Estimate]:
    """Scores [scores], with the intervals of their values in drawn rows, [draws, scores]."""
    no_interval = np.full((2, len(values)), np.nan)
    bounds = np.percentile(drawn, _PERCENTILES, axis=0) if len(drawn) else no_interval
    return [Estimate(*each) for each in np.stack([values, *bounds], 1).tolist()]


def ratio_of_sums(above: np.ndarray, below: np.ndarray, draws: int = RESAMPLES) -> Estimate:
    """The sum of one column [rows] by that of another; 0 where the latter is 0."""
    drawn = resampled_sums([above, below], draws)
    return estimate(float(ratio(above.sum(), below.sum())), ratio(drawn[:, 0], drawn[:, 1]))


def resampled_counts(counts: np.ndarray, draws: int = RESAMPLES) -> Iterator[np.ndarray]:
    """Counts of rows in cells, as resampled rows have them: they are multinomial. A million rows cost as a hundred.

    Args:
        counts: of rows in each cell, int64 [cells], with one row at least.
        draws: how often all rows are drawn.

    Yields:
        int64 [some of the draws, cells], the same each time. Without draws a single array, [0, cells].
    """
    random, rows = np.random.default_rng(_SEED), int(counts.sum())
    at_once = max(1, _CELLS_AT_ONCE // len(counts))
    for start in range(0, max(draws, 1), at_once):
        yield random.multinomial(rows, counts / rows, size=min(at_once, draws - start))


def resampled_sums(columns: Sequence[np.ndarray], draws: int = RESAMPLES) -> np.ndarray:
    """Sums over resampled rows, of scores that follow from sums.

    More than 1,000 rows are first summed in 1,000 random blocks of equal size (but for one row), which are then drawn.

    Args:
        columns: each [rows], with one row at least.
        draws: how often all rows are drawn.

    Returns:
        float64 [draws, columns], the same each time.
    """
    if not draws:
        return np.zeros((0, len(columns)))
    rows = len(columns[0])
    blocks = min(rows, BLOCKS)
    block_of_row = np.random.default_rng(_SEED).permutation(rows) % blocks
    sums = np.stack([np.bincount(block_of_row, each, blocks) for each in columns], 1)
    summed: np.ndarray = _times_drawn(blocks, draws) @ sums
    return summed


@lru_cache(maxsize=8)
def _times_drawn(blocks: int, draws: int) -> np.ndarray:
    """How often each block is drawn, float64 [draws, blocks]."""
    random = np.random.default_rng(_SEED)
    drawn: np.ndarray = random.multinomial(blocks, np.full(blocks, 1 / blocks), size=draws)
    return drawn.astype(np.float64)


def ratio(above: np.ndarray | float, below: np.ndarray | float) -> np.ndarray:
    """`above / below`, and 0 where `below` is 0."""
    above, below = np.asarray(above, np.float64), np.asarray(below, np.float64)
    quotients: np.ndarray = np.zeros(np.broadcast_shapes(above.shape, below.shape))
    np.divide(above, below, out=quotients, where=below != 0)
    return quotients

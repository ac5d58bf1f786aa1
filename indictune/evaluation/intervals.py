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
    """A score with its 95% interval."""

    value: float
    low: float
    high: float


def estimate(value: float, samples: np.ndarray) -> Estimate:
    """A score with the interval of its values in resampled rows, [RESAMPLES]."""
    low, high = np.percentile(samples, _PERCENTILES)
    return Estimate(float(value), float(low), float(high))


def resampled_counts(counts: np.ndarray) -> Iterator[np.ndarray]:
    """Counts of rows in cells, as resampled rows have them: they are multinomial. A million rows cost as a hundred.

    Args:
        counts: of rows in each cell, int64 [cells], with one row at least.

    Yields:
        int64 [some of RESAMPLES, cells], the same each time.
    """
    random, rows = np.random.default_rng(_SEED), int(counts.sum())
    at_once = max(1, _CELLS_AT_ONCE // len(counts))
    for start in range(0, RESAMPLES, at_once):
        yield random.multinomial(rows, counts / rows, size=min(at_once, RESAMPLES - start))


def resampled_sums(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Sums over resampled rows, of scores that follow from sums.

    More than 1,000 rows are first summed in 1,000 random blocks of equal size (but for one row), which are then drawn.

    Args:
        columns: each [rows], with one row at least.

    Returns:
        float64 [RESAMPLES, columns], the same each time.
    """
    rows = len(columns[0])
    blocks = min(rows, BLOCKS)
    block_of_row = np.random.default_rng(_SEED).permutation(rows) % blocks
    sums = np.stack([np.bincount(block_of_row, each, blocks) for each in columns], 1)
    summed: np.ndarray = _times_drawn(blocks) @ sums
    return summed


@lru_cache(maxsize=8)
def _times_drawn(blocks: int) -> np.ndarray:
    """How often each block is drawn, float64 [RESAMPLES, blocks]."""
    random = np.random.default_rng(_SEED)
    drawn: np.ndarray = random.multinomial(blocks, np.full(blocks, 1 / blocks), size=RESAMPLES)
    return drawn.astype(np.float64)


def ratio(above: np.ndarray | float, below: np.ndarray | float) -> np.ndarray:
    """`above / below`, and 0 where `below` is 0."""
    above, below = np.asarray(above, np.float64), np.asarray(below, np.float64)
    quotients: np.ndarray = np.zeros(np.broadcast_shapes(above.shape, below.shape))
    np.divide(above, below, out=quotients, where=below != 0)
    return quotients

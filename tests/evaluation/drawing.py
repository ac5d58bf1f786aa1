"""Labels that are drawn, and predictions of them."""

from __future__ import annotations

import numpy as np

LABELS = ["negative", "neutral", "positive"]


def drawn(rows: int, seed: int, right: float = 0.7) -> tuple[np.ndarray, np.ndarray]:
    """Labels, and predictions that are right as often as this or by luck, int [rows] each."""
    random = np.random.default_rng(seed)
    references = random.choice(3, rows, p=[0.5, 0.3, 0.2])
    guessed = random.integers(0, 3, rows)
    return references, np.where(random.random(rows) < right, references, guessed)

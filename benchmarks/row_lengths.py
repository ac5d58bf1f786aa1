"""How long real rows are, so that machines without the data measure on rows like them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PERCENT = (0, 1, *range(5, 100, 5), 99, 100)

# Tokens at each of these percentiles. 25,540 tweets in Hindi-English and Marathi, cut by a vocabulary of 4,000 pieces
# learned from them, special tokens included: 30 on average.
TWEETS = (2, 7, 11, 14, 16, 19, 21, 22, 24, 26, 28, 30, 32, 34, 35, 37, 38, 40, 42, 44, 47, 54, 128)
# 999 rows of alpaca in English, cut by LLaMA 2's tokenizer: 22 tokens of instruction and input and 169 of answer on
# average, without what a chat template adds.
PROMPTS = (6, 7, 9, 10, 11, 12, 13, 14, 14, 15, 16, 17, 18, 19, 21, 23, 24, 27, 31, 36, 46, 92, 173)
ANSWERS = (1, 4, 8, 12, 15, 21, 28, 37, 52, 70, 91, 119, 149, 178, 211, 250, 289, 324, 365, 404, 458, 562, 662)


def draw_lengths(percentiles: Sequence[int], count: int, generator: np.random.Generator) -> np.ndarray:
    """Lengths in tokens, int64 [count], drawn from the distribution that has these percentiles."""
    drawn: np.ndarray = np.interp(100 * generator.random(count), PERCENT, percentiles).round().astype(np.int64)
    return drawn

"""Do two loss curves agree, and has the model learned, so that agreement means something?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

LEARNED = 0.9  # largest ratio of the last loss to the first
AIM = 1e-4  # largest difference of losses in fp32


def judge(losses: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """The largest difference of two curves in fp32, whether they agree, and whether the first fell."""
    largest = float(np.abs(np.subtract(losses, others)).max())
    learned = statistics.mean(losses[-3:]) <= LEARNED * statistics.mean(losses[:3])
    return {"largest": largest, "agrees": largest <= AIM, "learned": learned}  # NaN agrees with nothing


def problems(judged: dict[str, Any]) -> list[str]:
    """What is wrong with a judged pair of curves."""
    found = [] if judged["agrees"] else [f"the losses in fp32 differ by {judged['largest']:.1e}, more than {AIM:.0e}"]
    return found if judged["learned"] else [*found, "the loss did not fall, so the comparison shows nothing"]

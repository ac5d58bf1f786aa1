"""Warn of a logged loss or gradient norm that stands out."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)

_KEPT_VALUES = 100
_FEWEST_VALUES = 20
# Median absolute deviations above the median. Under a normal distribution, 10 are 6.7 standard deviations.
_DEVIATIONS = 10
_LEAST_DEVIATION = 0.01  # of the median, in case the last values are nearly equal
_NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


class WarnOfSpikes(TrainerCallback):
    """Compares each logged loss and gradient norm with the last ones, earlier starts of the run included."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = {key: deque(maxlen=_KEPT_VALUES) for key in _NAMES}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        for key, seen in self._seen.items():
            seen.extend(entry[key] for entry in state.log_history if math.isfinite(entry.get(key, math.nan)))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        for key, seen in self._seen.items():
            value = (logs or {}).get(key, math.nan)
            if math.isfinite(value):  # `StepFlags` reports the others
                if len(seen) >= _FEWEST_VALUES and _stands_out(value, seen):
                    median = statistics.median(seen)
                    logger.warning(
                        "the %s of step %d is %.4g; before, it was %.4g", _NAMES[key], state.global_step, value, median
                    )
                seen.append(value)


def _stands_out(value: float, seen: deque[float]) -> bool:
    median = statistics.median(seen)
    deviation = statistics.median(abs(each - median) for each in seen)
    return value - median > _DEVIATIONS * max(deviation, _LEAST_DEVIATION * abs(median))

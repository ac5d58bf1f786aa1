"""Warns of a loss or a gradient that stands out."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)

_SEEN = 100
_ENOUGH = 20
# Median absolute deviations above the median; of a normal distribution, 10 are 6.7 standard deviations.
_DEVIATIONS = 10
_LEAST_DEVIATION = 0.01  # of the median, where the last values were nearly alike
WATCHED = {"loss": "loss", "grad_norm": "gradient norm"}


class WarnOfSpikes(TrainerCallback):
    """Compares each logged loss and gradient norm with those logged before, by their median and deviation from it."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = {name: deque(maxlen=_SEEN) for name in WATCHED}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        for name, seen in self._seen.items():  # what was logged until the checkpoint that the run goes on from
            seen.extend(entry[name] for entry in state.log_history if name in entry)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        for name, title in WATCHED.items():
            value = (logs or {}).get(name)
            if value is None:
                continue
            seen = self._seen[name]
            if len(seen) >= _ENOUGH and stands_out(value, seen):
                median = statistics.median(seen)
                logger.warning(
                    "the %s of step %d is %.4g; before, it was %.4g", title, state.global_step, value, median
                )
            seen.append(value)


def stands_out(value: float, seen: deque[float]) -> bool:
    """Whether a value lies far above those before it."""
    median = statistics.median(seen)
    deviation = statistics.median(abs(each - median) for each in seen)
    return value - median > _DEVIATIONS * max(deviation, _LEAST_DEVIATION * abs(median))

"""Warns of a loss or a gradient that stands out."""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)

_SEEN = 100
_ENOUGH = 20
# Median absolute deviations above the median; of a normal distribution, 10 are 6.7 standard deviations.
_DEVIATIONS = 10
_LEAST_DEVIATION = 0.01  # of the median, where the last values were nearly alike
WATCHED = {"loss": "loss", "grad_norm": "gradient norm"}


class WarnOfSpikes(TrainerCallback):
    """Compares each logged loss, and each step's gradient norm, with those before, by their median and deviation from
    it. Norms stay on the device until the next log, which waits for it anyway; the largest that stands out is told.

    Args:
        grad_norm: gives that of the step that has ended.
    """

    def __init__(self, grad_norm: Callable[[], torch.Tensor | float]) -> None:
        self.grad_norm = grad_norm
        self._seen: dict[str, deque[float]] = {name: deque(maxlen=_SEEN) for name in WATCHED}
        self._norms: dict[int, torch.Tensor | float] = {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        for name, seen in self._seen.items():  # what was logged until the checkpoint that the run goes on from
            seen.extend(entry[name] for entry in state.log_history if math.isfinite(entry.get(name, math.nan)))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._norms[state.global_step] = self.grad_norm()
        if len(self._norms) == _SEEN:  # a run that logs less often waits once in so many steps
            self._look_at_norms()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            self._look_at("loss", {state.global_step: logs["loss"]})
            self._look_at_norms()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._look_at_norms()

    def _look_at_norms(self) -> None:
        """Read what the steps have left. All ranks must call it: each may hold a part of a norm."""
        norms, self._norms = self._norms, {}
        if norms:
            self._look_at("grad_norm", dict(zip(norms, _numbers(norms.values()), strict=True)))

    def _look_at(self, name: str, values: Mapping[int, float]) -> None:
        """Warn of the largest of some steps' values that stand out. NaN and infinity are told elsewhere."""
        seen, found = self._seen[name], []
        for step, value in values.items():
            if math.isfinite(value):
                if len(seen) >= _ENOUGH and stands_out(value, seen):
                    found.append((value, step, statistics.median(seen)))
                seen.append(value)
        if found:
            value, step, median = max(found)
            more = f"; it is the largest of {len(found)} that stand out" if len(found) > 1 else ""
            logger.warning(
                "the %s of step %d is %.4g; before, it was %.4g%s", WATCHED[name], step, value, median, more
            )


def _numbers(norms: Iterable[torch.Tensor | float]) -> list[float]:
    """Of all at once, so that the device is waited for once."""
    whole = [each.full_tensor() if isinstance(each, DTensor) else torch.as_tensor(each) for each in norms]
    numbers: list[float] = torch.stack(whole).tolist()
    return numbers


def stands_out(value: float, seen: deque[float]) -> bool:
    """Whether a value lies far above those before it."""
    median = statistics.median(seen)
    deviation = statistics.median(abs(each - median) for each in seen)
    return value - median > _DEVIATIONS * max(deviation, _LEAST_DEVIATION * abs(median))

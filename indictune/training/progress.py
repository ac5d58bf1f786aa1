"""How far this rank has come within its steps, so that the one that holds up the others can be named."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

Each = TypeVar("Each")


class Progress(TrainerCallback):
    """Counts the places that all ranks pass in the same order, those above all after which they wait for each other.

    Where nothing moves any more, the rank with the lowest count is the one that all others wait for.

    Attributes:
        step: the last that has ended.
        count: of the places passed so far.
        place: the last of them.
    """

    def __init__(self) -> None:
        self.step = 0
        self.count = 0
        self.place = "the start"
        self._last = time.monotonic()

    def passed(self, place: str) -> None:
        """This rank has come there."""
        self.count += 1
        self.place = place
        self._last = time.monotonic()

    def passing(self, place: str, them: Iterable[Each]) -> Iterator[Each]:
        """Each of them; with each, this rank has come there."""
        for each in them:
            self.passed(place)
            yield each

    @property
    def still_s(self) -> float:
        """Seconds since this rank has passed a place."""
        return time.monotonic() - self._last

    def _moved(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.step = state.global_step
        self.passed("ending a step, a micro-batch or a checkpoint")

    on_step_end = on_substep_end = on_prediction_step = on_save = _moved

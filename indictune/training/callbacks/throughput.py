"""Count the rows and tokens that a run trains on per second, and the padding."""

from __future__ import annotations

import logging
import time
from typing import Any

import psutil
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.data.batching import TrainingBatches

logger = logging.getLogger(__name__)


class Throughput(TrainerCallback):
    """Counts the rows and tokens of every global batch from its row numbers, so that no tensor is read.

    Attributes:
        rows: trained on, earlier starts of the run included.
        tokens: likewise.
        seconds_before: of training in earlier starts, up to the checkpoint that the run resumes from.
        seconds_to_first_step: from the start of the process, imports included, to the end of the run's first step;
            None before.
    """

    def __init__(self, batches: TrainingBatches) -> None:
        self.batches = batches
        self.rows = self.tokens = self.tokens_with_padding = 0
        self.seconds_before = 0.0
        self.seconds_to_first_step: float | None = None
        self._has_stepped = False  # in this process
        self._began = 0.0
        self._last_lap = (0.0, 0, 0)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()
        self._last_lap = (self._began, self.rows, self.tokens)

    def counted(self) -> dict[str, Any]:
        """The counts until now, for a checkpoint."""
        return {
            "seconds": self.seconds_before + time.perf_counter() - self._began,
            "rows": self.rows,
            "tokens": self.tokens,
            "tokens_with_padding": self.tokens_with_padding,
            "seconds_to_first_step": self.seconds_to_first_step,
        }

    def count_on(self, counted: dict[str, Any]) -> None:
        """Continue from what `counted` gave to a checkpoint; empty if it holds no counts."""
        if counted:
            self.seconds_before, self.rows, self.tokens = (counted[name] for name in ("seconds", "rows", "tokens"))
            self.tokens_with_padding = counted["tokens_with_padding"]
            self.seconds_to_first_step = counted["seconds_to_first_step"]
            self._last_lap = (self._last_lap[0], self.rows, self.tokens)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            seconds = time.time() - psutil.Process().create_time()
            logger.debug("first step after %.1f s", seconds)
            self.seconds_to_first_step = seconds if self.seconds_to_first_step is None else self.seconds_to_first_step
        epoch, step = divmod(state.global_step - 1, self.batches.steps_per_epoch)
        rows, tokens, tokens_with_padding = self.batches.counts(epoch, step)
        self.rows += rows
        self.tokens += tokens
        self.tokens_with_padding += tokens_with_padding

    @property
    def padding_fraction(self) -> float:
        """Share of the computed tokens that is padding."""
        return 1 - self.tokens / self.tokens_with_padding if self.tokens_with_padding else 0.0

    def lap(self) -> dict[str, float]:
        """`samples_per_second` and `tokens_per_second`, over all ranks, since the last call."""
        then, rows, tokens = self._last_lap
        now = time.perf_counter()
        self._last_lap = (now, self.rows, self.tokens)
        return _rates(self.rows - rows, self.tokens - tokens, now - then)

    def totals(self, seconds: float) -> dict[str, Any]:
        """Time, rates and padding over all starts of the run, of which this one took `seconds`."""
        seconds += self.seconds_before
        return {
            "runtime_s": seconds,
            "time_to_first_step_s": self.seconds_to_first_step,
            **_rates(self.rows, self.tokens, seconds),
            "padding_fraction": self.padding_fraction,
        }


def _rates(rows: int, tokens: int, seconds: float) -> dict[str, float]:
    return {"samples_per_second": rows / seconds, "tokens_per_second": tokens / seconds}

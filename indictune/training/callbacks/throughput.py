"""How many rows and tokens a second a run trains on, and how much of it is padding."""

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

    Args:
        batches: deals the rows.

    Attributes:
        seconds_to_first_step: from the start of this process, imports included, to the end of its first optimizer
            step; None before.
    """

    seconds_to_first_step: float | None = None

    def __init__(self, batches: TrainingBatches) -> None:
        self.batches = batches
        self.rows = self.tokens = self.tokens_with_padding = 0
        self._since = (0.0, 0, 0)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._since = (time.perf_counter(), 0, 0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.seconds_to_first_step is None:
            self.seconds_to_first_step = time.time() - psutil.Process().create_time()
            logger.info("first step after %.1f s", self.seconds_to_first_step)
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
        then, rows, tokens = self._since
        now = time.perf_counter()
        self._since = (now, self.rows, self.tokens)
        return {
            "samples_per_second": (self.rows - rows) / (now - then),
            "tokens_per_second": (self.tokens - tokens) / (now - then),
        }

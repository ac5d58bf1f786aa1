"""Shuffle each epoch anew."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.data.batching import TrainingBatches


class EpochShuffle(TrainerCallback):
    """Tells the batches which epoch begins.

    The Trainer (5.23) does not tell a batch sampler that has no sampler inside: every epoch would repeat the first
    one's order.
    """

    def __init__(self, batches: TrainingBatches) -> None:
        self.batches = batches

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.batches.set_epoch(state.global_step // self.batches.steps_per_epoch)

"""Each epoch its own shuffle."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.data.batching import TrainingBatches


class EpochShuffle(TrainerCallback):
    """Tells the batches which epoch begins.

    The Trainer (transformers 5.23) tells a loader and what lies within its batch sampler, and not that itself: every
    epoch would repeat the first one's order. Ours is told of one epoch alone, that in whose middle a run goes on:
    accelerate (1.15) puts a SkipBatchSampler around it.

    Args:
        batches: of the Trainer.
    """

    def __init__(self, batches: TrainingBatches) -> None:
        self.batches = batches

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.batches.set_epoch(state.global_step // self.batches.steps_per_epoch)

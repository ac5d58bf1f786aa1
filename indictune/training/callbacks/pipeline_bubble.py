"""Log how long the stages of a pipeline wait for each other."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.distributed.pipeline.engine import Pipeline


class PipelineBubble(TrainerCallback):
    """Adds `bubble`, the share of the last step in which ranks waited, and `bubble_formula` to what is logged."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            logs |= self.pipeline.waiting(args.gradient_accumulation_steps)

"""What tells how far this rank has come within its steps."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.progress import HERE


class Places(TrainerCallback):
    """Tells the run's `Progress` what the Trainer passes."""

    def _passed(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        HERE.step = state.global_step
        HERE.passed("ending a step, a micro-batch or a checkpoint")

    on_step_end = on_substep_end = on_prediction_step = on_save = _passed

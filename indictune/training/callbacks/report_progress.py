"""Report the progress within a step to the watchdog."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.progress import OWN_PROGRESS


class ReportProgress(TrainerCallback):
    """Records which step has ended, and that this rank still moves."""

    def _passed(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        OWN_PROGRESS.step = state.global_step
        OWN_PROGRESS.passed("ending a step, a micro-batch or a checkpoint")

    on_step_end = on_substep_end = on_prediction_step = on_save = _passed

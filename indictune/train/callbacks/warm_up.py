"""Warns of a run that ends before its learning rate has risen to what was asked for."""

from __future__ import annotations

import logging
from typing import Any

from transformers import SchedulerType, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)


class WarnOfWarmUp(TrainerCallback):
    """Compares the steps of the warm-up with those of the run, which are known when it begins."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        steps: int = args.get_warmup_steps(state.max_steps)
        if args.lr_scheduler_type != SchedulerType.CONSTANT and steps >= state.max_steps > 0:
            logger.warning(
                "--warmup_steps %g warms up for %d step(s), and the run has %d: it ends before its learning rate has "
                "risen to --learning_rate %g. Below 1, --warmup_steps is a share of the run.",
                *(args.warmup_steps, steps, state.max_steps, args.learning_rate),
            )

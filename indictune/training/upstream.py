"""Private names of the Trainer, TRL, accelerate and torch that training reads or writes.

tests/training/test_contract.py holds every name, and says what to do when one goes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:  # slow, and a run of an encoder does without TRL
    import torch
    from accelerate import Accelerator
    from transformers import Trainer
    from transformers.trainer_utils import TrainOutput
    from trl.trainer.sft_trainer import SFTTrainer


def unlogged_loss_of(trainer: Trainer) -> tuple[float, int]:
    """This rank's sum of losses since the last logged step, and that step (transformers 5.23). Waits for the device.

    Our checkpoints keep both; the Trainer's own do not.
    """
    return float(trainer._tr_loss.item()), int(trainer._globalstep_last_logged)


def carry_loss(trainer: Trainer, loss: float, since_step: int, mean_of_ranks: float) -> None:
    """Begin with the sum of losses that a checkpoint had not logged yet (transformers 5.23).

    Args:
        trainer: before its first step.
        loss: this rank's sum.
        since_step: the last logged step.
        mean_of_ranks: of `loss`. The mean of the whole training leaves it out: it is of this start's steps alone.
    """
    trainer._tr_loss += loss
    trainer._total_loss_scalar -= mean_of_ranks
    trainer._globalstep_last_logged = since_step


def forget_nan_loss(trainer: Trainer) -> None:
    """Sum the losses anew after a NaN was logged. The Trainer (5.23) subtracts the sum from itself."""
    trainer._tr_loss.nan_to_num_(0.0, 0.0, 0.0)


def evaluate_as_in_training(trainer: Trainer) -> None:
    """Evaluate, tell callbacks and schedule, and compare with the best so far (transformers 5.23).

    The public `evaluate` leaves out what follows from the score.
    """
    metrics = trainer._evaluate(None, None)
    trainer._determine_best_metric(metrics, None)


def end_training(trainer: Trainer) -> TrainOutput:
    """End a training without a step: load the best weights, and call `on_train_end` (transformers 5.23)."""
    return cast("TrainOutput", trainer._finalize_training(None, 0, time.time()))  # type: ignore[no-untyped-call]


def has_prepared_model(accelerator: Accelerator) -> bool:
    """Whether accelerate (1.15) has prepared a model."""
    return bool(accelerator._models)


def loss_scale(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """The scale of fp16's losses, on the device; None before the first. `get_scale` waits for it (torch 2.13)."""
    return scaler._scale


def means_of_log(trainer: SFTTrainer) -> dict[str, list[float]]:
    """What TRL (1.16) logs the means of: numbers of each micro-batch since the last logged step, by name."""
    means: dict[str, list[float]] = trainer._metrics["train"]
    return means


def trained_tokens(trainer: SFTTrainer) -> int:
    """Tokens of all steps so far, which TRL (1.16) logs as `num_tokens`."""
    tokens: int = trainer._total_train_tokens
    return tokens


def set_trained_tokens(trainer: SFTTrainer, tokens: int) -> None:
    """Go on counting from the tokens of a checkpoint."""
    trainer._total_train_tokens = tokens


def count_tokens_once(trainer: SFTTrainer, ranks_of_a_row: int) -> None:
    """Make TRL (1.16) count a row's tokens once, though several ranks have the row.

    It reads their number from accelerate's `parallelism_config`, which knows no matrices that are split without FSDP2.
    """
    trainer._tp_size = ranks_of_a_row

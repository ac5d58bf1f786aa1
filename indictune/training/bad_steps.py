"""What is done about a step whose loss or gradient is NaN or infinite, and the record of such steps."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from indictune.data.batching import NO_ROW, TrainingBatches
from indictune.strategy import sharding
from indictune.training import checkpoints, saving
from indictune.training.nonfinite import NonFiniteLossError

if TYPE_CHECKING:
    from indictune.training.exact import ExactTrainer

logger = logging.getLogger(__name__)

FILE = "nonfinite.jsonl"


class BadSteps:
    """Bad steps and their rows, told to the user and written to `nonfinite.jsonl`.

    Args:
        batches: tells the rows of a step.
        place: tells where a training row stands (`file:line`).
        path: of the record; None on ranks that write none.
    """

    def __init__(self, batches: TrainingBatches, place: Callable[[int], str], path: Path | None) -> None:
        self.batches = batches
        self.place = place
        self.path = path
        self.count = 0

    def note(self, step: int, action: str) -> str:
        """Record a step and what is done about it: `stop`, `skip` or `rollback`; returns the places of its rows."""
        self.count += 1
        epoch, step_of_epoch = divmod(step - 1, self.batches.steps_per_epoch)
        micro_batches = self.batches.micro_batches(epoch, step_of_epoch)
        rows = [row for micro_batch in micro_batches for row in micro_batch if row != NO_ROW]
        places = [self.place(row) for row in rows]
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                noted = {"step": step, "action": action, "rows": rows, "places": places}
                file.write(json.dumps(noted, ensure_ascii=False) + "\n")
        return ", ".join(places)

    def stop(self, step: int) -> NonFiniteLossError:
        """The end of a run."""
        return NonFiniteLossError(
            f"The loss or the gradient of step {step} is NaN or infinite; training has stopped and nothing was saved "
            "since. Lower --learning_rate, use bf16 in place of fp16, look at the rows of that batch, or leave such "
            f"steps out (--on_nonfinite skip): {self.note(step, 'stop')}."
        )


def drop_if_bad(trainer: ExactTrainer) -> None:
    """Leave a bad step out, before the optimizer takes it: all ranks look, and wait for each other.

    `skip` drops its gradient. `rollback` does so too, and takes weights and optimizer states back to the last
    checkpoint; the rows go on, and so does the schedule of the learning rate.

    Raises:
        NonFiniteLossError: there were more than `--max_nonfinite_steps`, or there is no checkpoint to go back to.
    """
    flag = trainer.nonfinite.take()
    if flag is None:
        return
    bad = flag.to(trainer.args.device, torch.int32)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX)
    if not bad.item():
        return
    saving.finish(trainer)  # it was begun before that step
    step, action = trainer.state.global_step + 1, trainer.args.on_nonfinite
    if trainer.bad_steps.count >= trainer.args.max_nonfinite_steps:
        raise trainer.bad_steps.stop(step)
    trainer.model_wrapped.zero_grad()
    if action == "rollback":
        _roll_back(trainer, step)
    places = trainer.bad_steps.note(step, action)
    logger.warning("the loss or the gradient of step %d is NaN or infinite: %s; its rows: %s", step, action, places)


def _roll_back(trainer: ExactTrainer, step: int) -> None:
    whole = [
        path
        for path in checkpoints.listed(Path(str(trainer.args.output_dir)))
        if checkpoints.step_of(path) <= trainer.state.global_step and not checkpoints.damage(path, thorough=False)
    ]
    if not whole:
        raise trainer.bad_steps.stop(step)
    assert trainer.lr_scheduler is not None
    schedule = trainer.lr_scheduler.state_dict()
    sharding.load_in_place(trainer, str(whole[0]))
    trainer.lr_scheduler.load_state_dict(schedule)

"""Leaves out steps whose loss or gradient is NaN or infinite."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from indictune.checkpoint import resume, store
from indictune.checkpoint.save import planned
from indictune.distributed.deepspeed_config import has_found_no_scale
from indictune.train.bad_steps import of_all_ranks
from indictune.train.task_trainer import TaskTrainer

logger = logging.getLogger(__name__)


def scaled(trainer: TaskTrainer, step: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The loss of a micro-batch's step, in which DeepSpeed scales fp16's loss, and may have found no scale.

    Raises:
        NonFiniteLossError: it has found none; on all ranks.
    """
    try:
        return step()
    except Exception as error:
        if not has_found_no_scale(error):
            raise
        before, last = trainer.nonfinite.loss, trainer.nonfinite.last
        loss = of_all_ranks(last if before is None or last is None else before + last)
        raise trainer.bad_steps.stop_without_scale(trainer.state.global_step + 1, loss) from None


def drop_if_bad(trainer: TaskTrainer) -> None:
    """Leave a bad step out, before the optimizer takes it: all ranks look, and wait for each other.

    `skip` drops its gradient. `rollback` does so too, and takes weights and optimizer states back to the last
    checkpoint that the run saved by its own plan, or began with from another folder: it would not have that of a stop
    if it had not been stopped. The rows go on, and so does the schedule of the learning rate.

    Raises:
        NonFiniteLossError: there were more than `--max_nonfinite_steps`, or there is no checkpoint to go back to.
        UserError: others may have written that checkpoint.
    """
    loss_here, flag = trainer.nonfinite.loss, trainer.nonfinite.take()
    if flag is None:
        return
    bad = flag.to(trainer.args.device, torch.int32)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX)
    if not bad.item():
        trainer.nonfinite.loss = loss_here  # `StepFlags` tells it where fp16 has found no scale
        return
    trainer.checkpoints.finish()  # it was begun before that step
    step, action = trainer.state.global_step + 1, trainer.args.on_nonfinite
    loss = of_all_ranks(loss_here)
    count, limit = trainer.bad_steps.count, trainer.args.max_nonfinite_steps
    if count >= limit:
        why = f"{count} such steps were left out before it, and --max_nonfinite_steps is {limit}."
        raise trainer.bad_steps.stop(step, loss, why)
    trainer.model_wrapped.zero_grad()
    if action == "rollback":
        _roll_back(trainer, step, loss)
    places = trainer.bad_steps.note(step, action, loss)
    told = "the loss or the gradient of step %d is NaN or infinite: %s; its loss was %.4g; its rows: %s"
    logger.warning(told, step, action, loss, places)


def _roll_back(trainer: TaskTrainer, step: int, loss: float) -> None:
    output_dir = Path(str(trainer.args.output_dir))
    found = [path for path in planned(output_dir) if store.step_of(path) < step]
    whole = resume.to_roll_back_to(found, trainer.args, trainer.trusts_checkpoint)
    if whole is None:
        why = (
            "--on_nonfinite rollback finds no whole checkpoint before it that the run saved by its own plan, and not "
            "because it was stopped: save more often (--save_steps)."
        )
        raise trainer.bad_steps.stop(step, loss, why)
    resume.check_trusted(whole, output_dir, trainer.trusts_checkpoint, "--on_nonfinite rollback to")
    assert trainer.lr_scheduler is not None
    assert trainer.optimizer is not None
    schedule = trainer.lr_scheduler.state_dict()
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    trainer.checkpoints.state.model.restore(whole)
    trainer.lr_scheduler.load_state_dict(schedule)
    for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):  # some schedules only change it
        group["lr"] = rate

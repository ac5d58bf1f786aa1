"""Leave out steps whose loss or gradient is NaN or infinite."""

from __future__ import annotations

import logging
from pathlib import Path

from indictune.checkpoint import store
from indictune.checkpoint.resume import AllRanksReader, newest_whole
from indictune.checkpoint.save import planned
from indictune.checkpoint.trust import check_trusted
from indictune.training.bad_steps import mean_over_ranks
from indictune.training.collective_flags import CollectiveFlags
from indictune.training.task_trainer import TaskTrainer

logger = logging.getLogger(__name__)


def drop_if_bad(trainer: TaskTrainer) -> None:
    """Leave a bad step out before the optimizer takes it. All ranks must call it, and wait for each other.

    Both `skip` and `rollback` drop its gradient. `rollback` also restores weights and optimizer states from the last
    checkpoint before it that the run saved by its own plan: a stop must not change the result. Rows and the schedule
    of the learning rate continue.

    Raises:
        NonFiniteLossError: there were more than `--max_nonfinite_steps`, or no checkpoint to roll back to.
        UserError: others may have written that checkpoint.
    """
    loss_here, flag = trainer.nonfinite.loss, trainer.nonfinite.take()
    if flag is None:
        return
    if not CollectiveFlags(flag.to(trainer.args.device), device=trainer.args.device).read()[0]:
        trainer.nonfinite.loss = loss_here  # `StepFlags` reports it where fp16 has found no scale
        return
    trainer.checkpoints.finish()  # it was begun before that step
    step, action = trainer.state.global_step + 1, trainer.args.on_nonfinite
    loss = mean_over_ranks(loss_here)
    count, limit = trainer.bad_steps.count, trainer.args.max_nonfinite_steps
    if count >= limit:
        raise trainer.bad_steps.stop("too-many-nonfinite-steps", step, loss, count=count, limit=limit)
    trainer.model_wrapped.zero_grad()
    if action == "rollback":
        _roll_back(trainer, step, loss)
    rows = trainer.bad_steps.note(step, action, loss)
    logger.warning(
        "the loss or the gradient of step %d is NaN or infinite: %s; its loss was %.4g; its rows: %s",
        *(step, action, loss, rows),
    )


def _roll_back(trainer: TaskTrainer, step: int, loss: float) -> None:
    output_dir = Path(str(trainer.args.output_dir))
    reader = AllRanksReader(trainer.args, trainer.trusts_checkpoint, trainer.disks_group)
    earlier = [path for path in reader.listed(planned(output_dir)) if store.step_of(path) < step]
    whole, damaged = newest_whole(earlier, reader)
    for path, problems in damaged.items():
        logger.warning("Passed over %s: %s", path.name, "; ".join(problems[:3]))
    if whole is None:
        raise trainer.bad_steps.stop("no-checkpoint-to-roll-back-to", step, loss)
    check_trusted(whole, output_dir, trainer.trusts_checkpoint, "--on_nonfinite rollback to")
    assert trainer.lr_scheduler is not None
    assert trainer.optimizer is not None
    schedule = trainer.lr_scheduler.state_dict()
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    trainer.checkpoints.state.model.restore(whole)
    trainer.lr_scheduler.load_state_dict(schedule)
    for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):  # some schedules only change it
        group["lr"] = rate

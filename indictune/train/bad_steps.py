"""What is done about a step whose loss or gradient is NaN or infinite, and the record of such steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from indictune.checkpoint import resume, store
from indictune.checkpoint.save import planned
from indictune.data.batching import NO_ROW, TrainingBatches
from indictune.distributed import sharding
from indictune.distributed.deepspeed_config import has_found_no_scale, leaves_bad_steps_out
from indictune.supervise import run_folder
from indictune.train.nonfinite import LOWER_RATE, NonFiniteLossError

if TYPE_CHECKING:
    from indictune.train.exact_trainer import ExactTrainer

logger = logging.getLogger(__name__)

FILE = "nonfinite.jsonl"
_NAMED = 5  # rows of a step in a message; the record has all


class BadSteps:
    """Bad steps and their rows, told to the user and written to `nonfinite.jsonl`.

    Args:
        batches: tells the rows of a step.
        place: tells where a training row stands (`file:line`).
        path: of the record; None on ranks that write none.
        strategy: of the run, in the names of `accelerate_configs/`.

    Attributes:
        count: of the steps that were left out, in the runs before this one too.
        way_out: how such steps are left out, in a sentence.
    """

    def __init__(
        self, batches: TrainingBatches, place: Callable[[int], str], path: Path | None, strategy: str
    ) -> None:
        self.batches = batches
        self.place = place
        self.record = None if path is None else run_folder.Record(path)
        self.way_out = f"--on_nonfinite {' or '.join(leaves_bad_steps_out(strategy))} leaves such steps out."
        self.count = 0

    def go_on_after(self, step: int) -> None:
        """Count the steps up to this one that were left out; later ones are done again, and their lines dropped, but
        for those that a run stopped at: no other place has all their rows. All ranks must call it."""
        noted = []
        if self.record is not None:
            noted = run_folder.keep_lines(
                self.record.path, lambda line: line["step"] <= step or line["action"] == "stop"
            )
        left_out = [each for each in noted if each["action"] != "stop"]
        self.count = max(sharding.from_all(len(left_out)))  # rank 0 alone has a record

    def note(self, step: int, action: str, loss: float | None) -> str:
        """Record a step, its loss where that or its gradient is bad, and what is done about it: `stop`, `skip` or
        `rollback`; returns the places of its first rows, as a message names them."""
        self.count += 1
        epoch, step_of_epoch = divmod(step - 1, self.batches.steps_per_epoch)
        micro_batches = self.batches.micro_batches(epoch, step_of_epoch)
        rows = [row for micro_batch in micro_batches for row in micro_batch if row != NO_ROW]
        places = [self.place(row) for row in rows]
        if self.record is not None:
            if action == "stop":  # at which a run that goes on may stop again
                with suppress(OSError):  # a disk that refuses leaves it there twice
                    run_folder.keep_lines(
                        self.record.path, lambda line: (line["step"], line["action"]) != (step, action)
                    )
            noted = {"step": step, "action": action, "loss": loss, "rows": rows, "places": places}
            self.record.append(run_folder.json_line(noted))
        more = f" and {len(places) - _NAMED} more ({FILE} lists them)" if len(places) > _NAMED else ""
        return ", ".join(places[:_NAMED]) + more

    def end(self) -> None:
        """Tell at the end of a run if the record is not whole."""
        if self.record is not None:
            self.record.end()

    def stop(self, step: int, loss: float, why: str | None = None) -> NonFiniteLossError:
        """The end of a run.

        Args:
            step: that is bad.
            loss: that it had.
            why: it is not left out; None tells how it could be.
        """
        return NonFiniteLossError(
            f"The loss or the gradient of step {step} is NaN or infinite; training has stopped and nothing was saved "
            f"since. {self.way_out if why is None else why} Use bf16 in place of fp16, {LOWER_RATE}, or look at the "
            f"rows of that step, whose loss was {loss:.4g}: {self.note(step, 'stop', loss)}."
        )

    def stop_by_weights(self, step: int) -> NonFiniteLossError:
        """The end of a run whose loss and gradient were finite, and a weight is not.

        Args:
            step: the last one that the optimizer took. An earlier one would have spoilt the loss of this one.
        """
        return NonFiniteLossError(
            f"A weight is NaN or infinite after step {step}; training has stopped and nothing was saved since. Use "
            f"bf16 in place of fp16, {LOWER_RATE}, or look at the rows of that step: {self.note(step, 'stop', None)}."
        )

    def stop_without_scale(self, step: int, loss: float) -> NonFiniteLossError:
        """The end of a run under fp16, whose loss scaling leaves bad steps out, and has come to leave out all.

        Args:
            step: the last of them.
            loss: that it had.
        """
        return NonFiniteLossError(
            "fp16 has found no scale for the loss: it halves it at each step whose gradient is NaN or infinite, which "
            f"it leaves out, and has come below 1 at step {step}; training has stopped. Use bf16 in place of fp16, "
            f"{LOWER_RATE}, or look at the rows of that step, whose loss was {loss:.4g}: "
            f"{self.note(step, 'stop', loss)}."
        )


def of_all_ranks(loss: torch.Tensor | None) -> float:
    """The loss of a step, of which each rank gives that of its micro-batches, a scalar; None where it had none.

    All ranks must call it.
    """
    losses = sharding.from_all(0.0 if loss is None else loss.item())
    return sum(losses) / len(losses)


def scaled(trainer: ExactTrainer, step: Callable[[], torch.Tensor]) -> torch.Tensor:
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


def drop_if_bad(trainer: ExactTrainer) -> None:
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


def _roll_back(trainer: ExactTrainer, step: int, loss: float) -> None:
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

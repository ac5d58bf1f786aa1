"""What is done about a step whose loss or gradient is NaN or infinite, and the record of such steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from indictune.data.batching import NO_ROW, TrainingBatches
from indictune.distributed import collectives
from indictune.distributed.deepspeed_config import leaves_bad_steps_out
from indictune.files import Record, json_line, keep_lines
from indictune.train.nonfinite import LOWER_RATE, NonFiniteLossError

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
        self.record = None if path is None else Record(path)
        self.way_out = f"--on_nonfinite {' or '.join(leaves_bad_steps_out(strategy))} leaves such steps out."
        self.count = 0

    def go_on_after(self, step: int) -> None:
        """Count the steps up to this one that were left out; later ones are done again, and their lines dropped, but
        for those that a run stopped at: no other place has all their rows. All ranks must call it."""
        noted = []
        if self.record is not None:
            noted = keep_lines(self.record.path, lambda line: line["step"] <= step or line["action"] == "stop")
        left_out = [each for each in noted if each["action"] != "stop"]
        self.count = max(collectives.gather_from_all(len(left_out)))  # rank 0 alone has a record

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
                    keep_lines(self.record.path, lambda line: (line["step"], line["action"]) != (step, action))
            noted = {"step": step, "action": action, "loss": loss, "rows": rows, "places": places}
            self.record.append(json_line(noted))
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
    losses = collectives.gather_from_all(0.0 if loss is None else loss.item())
    return sum(losses) / len(losses)

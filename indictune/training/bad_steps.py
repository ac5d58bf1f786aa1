"""The record of steps whose loss or gradient is NaN or infinite, and the errors that end a run at such a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from indictune.data.batching import NO_ROW, TrainingBatches
from indictune.distributed import collectives
from indictune.distributed.deepspeed_config import leaves_bad_steps_out
from indictune.errors import problem
from indictune.files import Record, json_line, keep_lines
from indictune.training.nonfinite import NonFiniteLossError

FILE = "nonfinite.jsonl"
_ROWS_IN_MESSAGE = 5  # the record has all rows


class BadSteps:
    """Bad steps with their rows, written to `nonfinite.jsonl`.

    Args:
        batches: gives the rows of a step.
        row_location: of a training row: `file:line`.
        path: of the record; None on ranks that write none.
        strategy: of the run, in the names of `accelerate_configs/`.

    Attributes:
        count: of the steps that were left out, earlier starts of the run included.
    """

    def __init__(
        self, batches: TrainingBatches, row_location: Callable[[int], str], path: Path | None, strategy: str
    ) -> None:
        self.batches = batches
        self.row_location = row_location
        self.record = None if path is None else Record(path)
        self.policies = " or ".join(leaves_bad_steps_out(strategy))
        self.count = 0

    def resume_after(self, step: int) -> None:
        """Drop the lines of later steps: they are trained again."""
        if self.record is not None:
            keep_lines(self.record.path, lambda line: line["step"] <= step)

    def note(self, step: int, action: str, loss: float | None) -> str:
        """Record a bad step and what is done about it: `stop`, `skip` or `rollback`. Returns its first rows."""
        self.count += 1
        epoch, step_of_epoch = divmod(step - 1, self.batches.steps_per_epoch)
        micro_batches = self.batches.micro_batches(epoch, step_of_epoch)
        rows = [row for micro_batch in micro_batches for row in micro_batch if row != NO_ROW]
        places = [self.row_location(row) for row in rows]
        if self.record is not None:
            noted = {"step": step, "action": action, "loss": loss, "rows": rows, "places": places}
            self.record.append(json_line(noted))
        others = len(places) - _ROWS_IN_MESSAGE
        more = f" and {others} more ({FILE} lists them)" if others > 0 else ""
        return ", ".join(places[:_ROWS_IN_MESSAGE]) + more

    def stop(self, code: str, step: int, loss: float | None, **details: Any) -> NonFiniteLossError:
        """The error that ends the run at a step, whose rows it records.

        Args:
            code: of the error in `errors.toml`.
            step: that is bad.
            loss: of the step, over all ranks; None if it is not to blame.
            details: of the error.
        """
        rows = self.note(step, "stop", loss)
        details = {"step": step, "loss": loss, "rows": rows, "policies": self.policies, **details}
        return NonFiniteLossError(str(problem(code, "--on_nonfinite", **details)))


def mean_over_ranks(loss: torch.Tensor | None) -> float:
    """The mean of a scalar over all ranks, where None counts as 0. All ranks must call it."""
    losses = collectives.gather_from_all(0.0 if loss is None else loss.item())
    return sum(losses) / len(losses)

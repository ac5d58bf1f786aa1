"""Write `train_log.jsonl`, one JSON object for each logged step."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.files import Record, json_line, keep_lines, write_whole
from indictune.training.callbacks.throughput import Throughput

logger = logging.getLogger(__name__)

LOGGED = ("loss", "grad_norm", "learning_rate", "bubble", "bubble_formula")


class TrainLog(TrainerCallback):
    """Appends to the log on rank 0. A resumed run drops the lines after its checkpoint.

    Lines that are missing, for example on a new disk, come from the checkpoint, without rates.
    """

    def __init__(self, path: Path, throughput: Throughput) -> None:
        self.record = Record(path)
        self.throughput = throughput
        self._began = 0.0, 0  # time and step

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.monotonic(), state.global_step
        if not state.is_world_process_zero:
            return
        path = self.record.path
        done = keep_lines(path, lambda entry: int(entry["step"]) <= state.global_step)
        kept = {entry["step"]: entry for entry in done}
        known = {entry["step"]: entry for entry in state.log_history if "loss" in entry}
        if known.keys() - kept.keys() or not path.exists():
            entries = sorted((known | kept).items())
            write_whole(path, "".join(json_line(entry) for _, entry in entries))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if not state.is_world_process_zero or logs is None or "loss" not in logs:
            return
        entry = {"step": state.global_step, "epoch": state.epoch}
        entry |= {name: logs[name] for name in LOGGED if name in logs} | self.throughput.lap()
        self.record.append(json_line(entry))
        logger.info(
            "step %d of %d: loss %.4f, %.0f rows/s, %s left",
            *(state.global_step, state.max_steps, entry["loss"], entry["samples_per_second"], self._time_left(state)),
        )

    def _time_left(self, state: TrainerState) -> str:
        """The time of the steps that are left, if they take as long as those of this start, evaluations included."""
        began, first_step = self._began
        a_step = (time.monotonic() - began) / max(1, state.global_step - first_step)
        return str(timedelta(seconds=round(a_step * (state.max_steps - state.global_step))))

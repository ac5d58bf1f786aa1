"""Write `train_log.jsonl`, one JSON object for each logged step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.files import Record, json_line, keep_lines, write_whole
from indictune.training.callbacks.throughput import Throughput

logger = logging.getLogger(__name__)

LOGGED = ("loss", "grad_norm", "learning_rate")


class TrainLog(TrainerCallback):
    """Appends to the log on rank 0. A resumed run drops the lines after its checkpoint.

    Lines that are missing, for example on a new disk, come from the checkpoint, without rates.
    """

    def __init__(self, path: Path, throughput: Throughput) -> None:
        self.record = Record(path)
        self.throughput = throughput

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
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
        rate = entry["samples_per_second"]
        logger.info("step %d of %d: loss %.4f, %.0f rows/s", state.global_step, state.max_steps, entry["loss"], rate)

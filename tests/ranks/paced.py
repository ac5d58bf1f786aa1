"""Run a training script with slow steps, and note the rows of each.

    paced.py 0.2 ROWS.jsonl SCRIPT FLAGS...

Each step takes 0.2 s longer. Each micro-batch adds a line to the file: when the process began, the step, and the rows
as their tokens.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
import time
from typing import Any

import psutil

import indictune.before_imports  # noqa: F401, as the script does

seconds, rows_file = float(sys.argv[1]), sys.argv[2]
sys.argv = sys.argv[3:]
began = psutil.Process().create_time() + os.getpid() % 1000 * 1e-5  # several start within a tick


def rows_of(inputs: dict[str, Any]) -> list[list[int]]:
    """The rows of a micro-batch that runs end to end."""
    starts = [*(inputs["position_ids"][0] == 0).nonzero().flatten().tolist(), inputs["input_ids"].shape[1]]
    return [inputs["input_ids"][0, start:end].tolist() for start, end in itertools.pairwise(starts)]


def slow_down() -> None:
    from indictune.training.exact_trainer import IndicTrainer

    original = IndicTrainer.training_step

    def training_step(self: Any, model: Any, inputs: Any, *more: Any) -> Any:
        if "labels" in inputs and not (inputs["labels"] == -100).all():
            with open(rows_file, "a", encoding="utf-8") as file:
                file.write(json.dumps([began, self.state.global_step + 1, rows_of(inputs)]) + "\n")
        if self.accelerator.sync_gradients:
            time.sleep(seconds)
        return original(self, model, inputs, *more)

    IndicTrainer.training_step = training_step  # type: ignore[method-assign]


slow_down()
runpy.run_path(sys.argv[0], run_name="__main__")

"""Run a training script and note how much memory it holds.

    MEMORY=FILE python tests/faults/growing.py SCRIPT FLAGS...

FILE gets a line of JSON for every 500th step: the step, and the resident bytes of the process.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import psutil
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.training.callbacks.step_flags import StepFlags

EVERY = 500


def note_memory(path: Path) -> None:
    """Arrange for the notes."""
    original = StepFlags.on_step_end

    def noted(
        self: TrainerCallback, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        original(self, args, state, control, **more)  # type: ignore[arg-type]
        if state.global_step % EVERY == 0:
            line = {"step": state.global_step, "bytes": psutil.Process().memory_info().rss}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    StepFlags.on_step_end = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    note_memory(Path(os.environ["MEMORY"]))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

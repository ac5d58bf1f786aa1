"""On what a benchmark ran: a part of every result file."""

from __future__ import annotations

import datetime
import platform
from importlib.metadata import version
from pathlib import Path

import torch

PACKAGES = (
    *("torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "bitsandbytes", "datasets", "scikit-learn"),
)


def environment() -> dict[str, object]:
    """Hardware, versions and date."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_name(),
        "cpu_cores": torch.multiprocessing.cpu_count(),
        "gpus": gpus,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def _cpu_name() -> str:
    """The processor's model as Linux tells it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())

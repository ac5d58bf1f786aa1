"""How far the estimate of memory is from peaks that were measured on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

# Written by `benchmarks/plan.py` on a GPU.
CALIBRATION = Path(__file__).with_name("calibration.json")


def calibration(path: Path = CALIBRATION) -> str:
    """In words for the user: hardware, date, number of settings and largest error, if any were measured."""
    if not path.exists():
        return "not calibrated on a GPU"
    content = json.loads(path.read_text(encoding="utf-8"))
    about, settings = content["environment"], content["settings"]
    error = max(abs(each["predicted"] / each["measured"] - 1) for each in settings)
    return f"within {error:.0%} of the peaks of {len(settings)} settings on {about['gpus'][0]}, {about['date']}"

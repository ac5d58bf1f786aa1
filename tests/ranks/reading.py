"""scripts/train_llama.py, which notes in the folder READERS which rank reads weights."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from indictune.models import task_models
from indictune.models.load import read_weights


def noted(*args: Any, **settings: Any) -> Any:
    (Path(os.environ["READERS"]) / os.environ["RANK"]).touch()
    return read_weights(*args, **settings)


if __name__ == "__main__":
    setattr(task_models, "read_weights", noted)  # noqa: B010
    runpy.run_path("scripts/train_llama.py", run_name="__main__")

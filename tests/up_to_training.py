"""Run a script up to `Trainer.train`, and write the files of the functions that run then: `SCRIPT FLAGS... FOLDER`."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import transformers


def train(*_: Any, **__: Any) -> NoReturn:
    """Instead of the Trainer's."""
    files = {frame.filename for frame in traceback.extract_stack()}
    Path(sys.argv[-1], "passed").write_text("\n".join(files), encoding="utf-8")
    raise KeyboardInterrupt


if __name__ == "__main__":
    transformers.Trainer.train = train  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

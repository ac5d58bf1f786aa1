"""Run a script up to `Trainer.train`, and list our files that ran and our modules in memory: `SCRIPT FLAGS... FOLDER`.

A file ran if one of its functions did. That its module was imported is not enough.
"""

from __future__ import annotations

import inspect
import json
import os
import runpy
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import transformers

ROOT = Path(__file__).resolve().parents[1]
OURS = f"{ROOT / 'indictune'}{os.sep}"
executed: set[str] = set()


def note(frame: FrameType, event: str, _: Any) -> None:
    """Keep the file of a function, not of the body of a module or class."""
    code = frame.f_code
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(OURS):
        executed.add(code.co_filename)


def train(*_: Any, **__: Any) -> NoReturn:
    """Instead of the Trainer's."""
    sys.setprofile(None)
    found = {
        "executed": sorted(str(Path(file).relative_to(ROOT)) for file in executed),
        "imported": sorted(name for name in sys.modules if name.partition(".")[0] == "indictune"),
        "libraries": sorted({name.partition(".")[0] for name in sys.modules}),
    }
    Path(sys.argv[-1], "passed.json").write_text(json.dumps(found), encoding="utf-8")
    raise KeyboardInterrupt


if __name__ == "__main__":
    transformers.Trainer.train = train  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    sys.setprofile(note)
    runpy.run_path(sys.argv[0], run_name="__main__")

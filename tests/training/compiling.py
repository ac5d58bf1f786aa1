"""Run a training script and note what was compiled.

    COMPILED=FILE python tests/training/compiling.py SCRIPT FLAGS...

FILE gets a JSON object, from rank 0: the class of each module that was to be compiled in its place, and the number of
frames that were compiled.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from torch import nn
from torch._dynamo.utils import counters

if __name__ == "__main__":
    compile_in_place = nn.Module.compile
    modules: list[str] = []

    def noted(self: nn.Module, *args: Any, **settings: Any) -> None:
        modules.append(type(self).__name__)
        compile_in_place(self, *args, **settings)

    nn.Module.compile = noted  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        if os.environ.get("RANK", "0") == "0":
            content = {"modules": modules, "frames": counters["frames"]["ok"]}
            Path(os.environ["COMPILED"]).write_text(json.dumps(content), encoding="utf-8")

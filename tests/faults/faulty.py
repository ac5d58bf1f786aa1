"""Run a training script and let a signal hit it at a place that is always the same.

    python tests/faults/faulty.py SIGTERM@indictune.training.step_flags:StepFlags.on_step_end:3 SCRIPT FLAGS...
    ... SIGKILL@os:fsync:7@1 ...

The signal comes just before the third call of the function; in the second example the 7th call on rank 1 alone.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
from functools import reduce
from typing import Any


def hit(event: str) -> None:
    """Arrange for the signal."""
    name, place, *ranks = event.split("@")
    if ranks and os.environ.get("RANK", "0") != ranks[0]:
        return
    module, path, count = place.split(":")
    *owners, function = path.split(".")
    owner: Any = reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, function)
    calls = 0

    def counted(*args: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(count):
            os.kill(os.getpid(), getattr(signal, name))
        return original(*args, **settings)

    setattr(owner, function, counted)


if __name__ == "__main__":
    hit(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")

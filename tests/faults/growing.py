"""Run a training script and note how much memory it holds.

    MEMORY=FILE python tests/faults/growing.py SCRIPT FLAGS...

FILE gets a line of JSON for every 500th step, and one without a step when the script has ended: the step, the resident
bytes of the process, those of them that are of no file ("own": pages of a file of rows are the disk's cache), the most
bytes that it ever held ("peak"); the last tells the most of any process that it has started ("child") too, and
the most of all of them with it at one moment ("tree"; see `tree_bytes`).
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

EVERY = 500
LOOK_EVERY_S = 0.1


def note(about: dict[str, int]) -> None:
    """Add a line."""
    with Path(os.environ["MEMORY"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({**about, **held()}) + "\n")


def note_steps() -> None:
    """Arrange for the notes of steps."""
    original = DefaultFlowCallback.on_step_end  # every Trainer has it

    def noted(
        self: DefaultFlowCallback, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> Any:
        if state.global_step % EVERY == 0:
            note({"step": state.global_step})
        return original(self, args, state, control, **more)

    DefaultFlowCallback.on_step_end = noted  # type: ignore[method-assign]


def held() -> dict[str, int]:
    """Bytes of this process's memory, as Linux counts them."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    found = dict(line.split(":", 1) for line in lines)
    names = {"bytes": "VmRSS", "own": "RssAnon", "peak": "VmHWM"}
    return {name: 1024 * int(found[word].split()[0]) for name, word in names.items()}


@contextmanager
def watched_tree() -> Iterator[dict[str, int]]:
    """The most bytes of this process and all that it has started, looked at again and again while the block lasts."""
    from benchmarks.preparation import polling

    most = {"tree": tree_bytes()}

    def look() -> None:
        most["tree"] = max(most["tree"], tree_bytes())

    with polling(look, LOOK_EVERY_S):
        yield most


def tree_bytes() -> int:
    """Those of this process, and of all that it has started what they share with none, now.

    The part of each in what it shares (PSS) would depend on processes that have nothing to do with this one.
    """
    own = psutil.Process()
    found = int(own.memory_info().rss)
    for process in own.children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            found += process.memory_full_info().uss
    return found


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))  # a script has its own folder alone
    from benchmarks.preparation import watched_children

    note_steps()
    sys.argv = sys.argv[1:]
    try:
        with watched_children() as peaks, watched_tree() as most:
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        note({"child": max(peaks.values(), default=0), **most})

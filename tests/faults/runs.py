"""Runs that something happens to, and the run that nothing happens to."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from indictune.checkpoint import store
from indictune.checkpoint.resume import best_of
from tests.ranks.launching import SCRIPT, Run, python, start

FAULTY = "tests/faults/faulty.py"
STEP = "indictune.training.callbacks.every_step:StepFlags.on_step_end"
EVALUATION = "indictune.training.evaluation:measure_batch"
SAVE = "indictune.checkpoint.store:share"
EXIT_RESUMABLE = 75
FOLDER = "TEST_FOLDER"  # in the environment of what is started for a folder, and of all that this starts
# Root may read and write everything; started by this it may not.
_NO_POWERS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner", "--inh-caps=-all")
AS_A_USER = (*(_NO_POWERS if os.getuid() == 0 else ()), *python())
_OF_STATES = (".safetensors", ".distcp", ".pt", ".pth")  # weights, the optimizer's, the schedule's, random numbers
_WITH_PADDING = "_optim_states.pt"  # DeepSpeed's (0.19.8), which is whatever was in the memory


def best_step(checkpoint: Path) -> int | None:
    """The step of the best checkpoint that another one names."""
    best = best_of(checkpoint)
    return None if best is None else store.step_of(best)


@dataclass(frozen=True)
class Job:
    """A run of 8 steps in 2 epochs, evaluated and saved at every other step.

    Attributes:
        recipe: of the run.
        folder: gets the run.
        launcher: starts it.
        flags: added to those below.
        anew: as in `launching.start`.
    """

    recipe: Path
    folder: Path
    launcher: tuple[str, ...] = tuple(python())
    flags: tuple[str, ...] = ()
    anew: bool = False

    def start(
        self, event: str | None = None, script: str = SCRIPT, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Start it, or go on with it; `event` as in `faulty.py`."""
        scripts = [script] if event is None else [FAULTY, event, script]
        flags = [
            *("--config", str(self.recipe), "--output_dir", str(self.folder), "--resume_from_checkpoint", "auto"),
            *("--eval_strategy", "steps", "--eval_steps", "2", "--save_strategy", "steps", "--save_steps", "2"),
            *("--logging_steps", "3", "--dropout", "0.1", *self.flags),
        ]
        return start([*self.launcher, *scripts, *flags], {FOLDER: str(self.folder), **variables}, anew=self.anew)

    @property
    def status(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "status.json").read_text(encoding="utf-8")))

    def outcome(self, with_checkpoint: bool = True) -> dict[str, Any]:
        """All that must be the same whatever has happened on the way: models, states, losses, evaluations.

        Args:
            with_checkpoint: whether the run saves its last step. The finished model may be one of the first steps.
        """
        run = Run(self.folder)
        (model,) = run.folder.glob("*.safetensors")  # whole, or an adapter's
        found = {
            "weights": hashlib.sha256(model.read_bytes()).hexdigest(),
            "log": [[entry["step"], entry["loss"], entry["learning_rate"]] for entry in run.log],
            "eval": run.metrics["eval"],
        }
        if not with_checkpoint:
            return found
        last = store.checkpoints_in(run.folder)[0]
        files = json.loads((last / store.MANIFEST).read_text(encoding="utf-8"))["files"]
        states = [name for name in files if name.endswith(_OF_STATES) and not name.endswith(_WITH_PADDING)]
        found["states"] = {name: files[name]["sha256"] for name in states}
        state = json.loads((last / "trainer_state.json").read_text(encoding="utf-8"))
        timed = ("runtime", "per_second")
        history = [
            {name: value for name, value in entry.items() if not name.endswith(timed)}
            for entry in state["log_history"]
        ]
        return {**found, "history": history, "best": [state["best_metric"], state["best_global_step"]]}


def processes_of(folder: Path) -> list[int]:
    """Those whose command names the folder, or that were started for one in it: cleaners of rows and compilers too."""
    found = []
    for process in psutil.process_iter(["cmdline", "pid"]):
        with suppress(psutil.Error):  # another user's, or gone
            words = [*(process.info["cmdline"] or []), process.environ().get(FOLDER, "")]
            if any(str(folder) in word for word in words):
                found.append(process.info["pid"])
    return found


def environment(folder: Path | None = None) -> dict[str, str]:
    """Of a process that is started anew, for a folder."""
    own = {} if folder is None else {FOLDER: str(folder)}
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **own}


def wait_for(condition: Any, seconds: float) -> None:
    """Until it holds; it must within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)

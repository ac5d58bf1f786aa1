"""Start the runs of `indictune parity`, each through its launcher."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from indictune.config.flag_table import flags_of
from indictune.config.task_names import PARITY_TRACE, SCRIPTS
from indictune.distributed.choose_launcher import Launcher
from indictune.errors import Problem, problem
from indictune.parity.traces import TRACE, Traced
from indictune.shipped_files import as_seen_from_here, script
from indictune.supervise import run_folder
from indictune.train_command import Asked, fit_data_ranks

CONSOLE = "console.log"
# What makes runs comparable, unless the user asks for something else.
_EXACT = {
    "dropout": "0",
    "bf16": "false",
    "fp16": "false",
    "tf32": "false",
    "eval_strategy": "no",
    "save_strategy": "no",
    "load_best_model_at_end": "false",
    "snapshot_steps": "0",
    "push_to_hub": "false",
    "num_sample_generations": "0",
    "report": "false",
}
# What the trace needs: every step is logged, and rows are read in the process that trains.
_TRACED = {"dataloader_num_workers": "0", "logging_strategy": "steps", "logging_steps": "1"}
_SET = ("max_steps", "num_train_epochs", *_TRACED)


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        name: of the strategy.
        processes: that were asked for.
        folder: of the run.
        state: of `status.json`: ok, user_error, failed or resumable.
        message: why it is not ok.
    """

    name: str
    processes: int
    folder: Path
    state: str
    message: str

    @property
    def traced(self) -> Traced:
        """What it left, if it is ok."""
        return Traced(self.name, self.folder)


def problems_of_set(asked: Asked) -> list[Problem]:
    """The typed flags that would have no effect, as parity sets them."""
    return [problem("parity-sets", f"--{name}", " ".join(asked.flags[name])) for name in _SET if name in asked.flags]


def exact_flags(asked: Asked, steps: int) -> Asked:
    """The same with the flags that make runs comparable; those that were typed stay."""
    known = flags_of(asked.task)
    added: Mapping[str, Sequence[str]] = {name: [value] for name, value in _EXACT.items() if name in known}
    fixed = {name: [value] for name, value in _TRACED.items()}
    return replace(asked, flags={**added, **asked.flags, **fixed, "max_steps": [str(steps)]})


def run(asked: Asked, name: str, launcher: Launcher, folder: Path) -> Ended:
    """Train under a strategy in a folder of its own, and wait for the end. Its console goes to a file there."""
    folder.mkdir(parents=True)
    asked = replace(asked, flags={**asked.flags, "output_dir": [str(folder)]})
    asked = fit_data_ranks(asked, launcher)
    command = launcher.command(as_seen_from_here(script(SCRIPTS[asked.task])), asked.words())
    environ = {**os.environ, PARITY_TRACE: str((folder / TRACE).absolute())}
    began = time.time()
    with (folder / CONSOLE).open("wb") as console:
        code = subprocess.run(command, env=environ, stdout=console, stderr=console, check=False).returncode
    status = run_folder.status_since(folder, began)
    state = status.get("state", "failed") if code else "ok"
    said = (folder / CONSOLE).read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(said) if line.strip()), "it said nothing")
    message = status.get("message") or f"exit code {code}: {last}. --output_dir keeps what it said."
    print(f"indictune: {name} ran for {time.time() - began:.0f} s: {state}", file=sys.stderr, flush=True)
    return Ended(name, launcher.processes, folder, state, "" if state == "ok" else message)

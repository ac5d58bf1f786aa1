"""Runs with an injected fault, restarted until they end, and the verdict on how they ended."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fault_contenders import GLOBAL_BATCH, ONE, Contender
from indictune.checkpoint import store
from tests.faults.runs import EXIT_RESUMABLE, FAULTY, FOLDER, processes_of
from tests.ranks.launching import start

Counts = dict[str, int]
Found = dict[str, Any]  # case -> outcome counts, or one measured value

TRIES = 3
TIMEOUT_S = 180
EXACT, NOT_ITS_LOG, REPEATED, WRONG, STUCK = "exact", "exact except its log", "repeated steps", "wrong", "stuck"
VERDICTS = (EXACT, NOT_ITS_LOG, REPEATED, WRONG, STUCK)
LATER = "only at a later start"
RESUMED = r"(?:Going on|Resum\w+) from "


@dataclass(frozen=True)
class Job:
    """Runs of one contender under one launch.

    Attributes:
        contender: runs its script.
        work: folder for the runs.
        launch: a key of its `launches`.
        kind: a key of its `flags`. Kinds that begin with "accumulation" halve the micro-batch.
    """

    contender: Contender
    work: Path
    launch: str = ONE
    kind: str = "plain"

    def words(self, folder: Path, *flags: str, event: str | None = None) -> list[str]:
        """The command line; `event` is a fault in the syntax of `tests/faults/faulty.py`."""
        faulty = (FAULTY, event) if event else ()
        contender = self.contender
        rows = GLOBAL_BATCH // (1 if self.launch == ONE else 2) // (2 if self.kind.startswith("accumulation") else 1)
        return [
            *(*contender.launches[self.launch](), *faulty, *contender.command, *contender.flags[self.kind]),
            *("--per_device_train_batch_size", str(rows), *flags, "--output_dir", str(folder)),
        ]

    def run(
        self, folder: Path, event: str | None = None, *flags: str, timeout_s: int = TIMEOUT_S, **variables: str
    ) -> tuple[int | None, str]:
        """Run to the end; return the exit code, None after a timeout, and the output."""
        words = self.words(folder, *flags, event=event)
        try:
            done = start(words, {FOLDER: str(folder), **variables}, timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            kill_processes_of(folder)
            return None, ""
        return done.returncode, done.stdout + done.stderr

    @cached_property
    def unbroken(self) -> tuple[Path, float]:
        """The folder of a run without a fault, and its seconds.

        Raises:
            RuntimeError: it failed.
        """
        folder, since = self.work / f"unbroken-{self.launch}-{self.kind}".replace(" ", "-"), time.monotonic()
        code, output = self.run(folder)
        if code != 0 or not ended(folder):
            raise RuntimeError(f"The run without a fault failed: {output[-2000:]}")
        return folder, time.monotonic() - since

    def verdict(self, folder: Path, code: int | None, output: str, newest: int) -> str:
        """How a run ended.

        `exact`: the weights of the unbroken run, resumed at the newest whole checkpoint, each step logged once with
        the same loss and rate. `exact except its log`: the log differs. `repeated steps`: same weights, but it resumed
        earlier. `wrong`: other weights. `stuck`: it did not end.

        Args:
            folder: of the run.
            code: exit code of its last start.
            output: of that start.
            newest: step of the newest whole checkpoint before that start.
        """
        if code != 0 or not ended(folder):
            return STUCK
        if weights(folder) != weights(self.unbroken[0]):
            return WRONG
        if resumed_from(output, folder) < newest:
            return REPEATED
        return EXACT if logged(folder) == logged(self.unbroken[0]) else NOT_ITS_LOG

    def restart_until_it_ends(self, folder: Path) -> Counter[str]:
        """Start a run up to three times until it succeeds; count its verdict and how failed starts ended."""
        code, output, failed, newest = None, "", list[str](), 0
        while code != 0 and len(failed) < TRIES:
            newest = 0 if ended(folder) else max(newest, newest_whole(folder))
            code, output = self.run(folder)
            if code != 0:
                failed.append(how_it_failed(code, output))
        found = Counter({self.verdict(folder, code, output, newest): 1})
        if code == 0 and failed:
            found[LATER] = 1
            found.update(failed)
        shutil.rmtree(folder, ignore_errors=True)
        return found

    def stopped_at(self, step: int, folder: Path) -> Path:
        """Copy the unbroken run as it was after a step."""
        saved = store.checkpoints_in(self.unbroken[0])
        later = [path.name for path in saved if store.step_of(path) > step]
        shutil.copytree(self.unbroken[0], folder, ignore=shutil.ignore_patterns(*later, "metrics.json", "status.json"))
        (folder / "model.safetensors").unlink()
        return folder


def how_it_failed(code: int | None, output: str) -> str:
    """The exit code and last line of a failed start."""
    if code is None:
        return f"a start was killed after {TIMEOUT_S} s"
    return f"a start ended with {code}: {(output.strip().splitlines() or ['no output'])[-1][:200]}"


def ended(folder: Path) -> bool:
    """Whether a run has saved its model; ours, which keeps a log, writes its metrics last."""
    names = ["model.safetensors", "metrics.json"] if (folder / "train_log.jsonl").exists() else ["model.safetensors"]
    return all((folder / name).exists() for name in names)


def newest_whole(folder: Path) -> int:
    """Step of the newest complete checkpoint; 0 without one."""
    return max((store.step_of(path) for path in store.checkpoints_in(folder) if _is_whole(path)), default=0)


def is_torn(folder: Path) -> bool:
    """Whether a folder has an incomplete checkpoint."""
    return not all(map(_is_whole, store.checkpoints_in(folder)))


def _is_whole(checkpoint: Path) -> bool:
    """By the manifest if it is ours; the stock Trainer writes its state last."""
    is_ours = (checkpoint.parent / "train_log.jsonl").exists()
    return not store.damage(checkpoint) if is_ours else (checkpoint / "trainer_state.json").exists()


def resumed_from(output: str, folder: Path) -> int:
    """Step of the checkpoint that the last start of a run resumed from, by its output; 0 if it resumed from none."""
    steps = re.findall(rf"{RESUMED}{re.escape(str(folder))}/{store.PREFIX}(\d+)\b", output)
    return int(steps[-1]) if steps else 0


def weights(folder: Path) -> str:
    """SHA-256 of the saved model."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def steps_lost(folder: Path) -> int:
    """Logged steps that no complete checkpoint holds; 0 without a log."""
    log = folder / "train_log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
    steps = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    return max(steps) - newest_whole(folder) if steps else 0


def logged(folder: Path) -> list[tuple[int, float, float]]:
    """Step, loss and learning rate of each logged step, from our log or the stock Trainer's last checkpoint."""
    log = folder / "train_log.jsonl"
    if log.exists():
        entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    else:
        state = store.checkpoints_in(folder)[0] / "trainer_state.json"
        entries = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    return [(entry["step"], entry["loss"], entry["learning_rate"]) for entry in entries if "loss" in entry]


def losses(folder: Path) -> list[float]:
    """The loss of each step."""
    return [loss for _, loss, _ in logged(folder)]


def epochs(folder: Path) -> float:
    """Epochs done, by the newest checkpoint."""
    state = store.checkpoints_in(folder)[0] / "trainer_state.json"
    return float(json.loads(state.read_text(encoding="utf-8"))["epoch"])


def status_of(folder: Path) -> tuple[str, str]:
    """State and message of `status.json`; empty without a file."""
    path = folder / "status.json"
    status = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"state": "", "message": ""}
    return status["state"], status["message"]


def says_it_is_resumable(folder: Path, code: int | None, is_of_the_run: bool) -> bool:
    """Whether a stopped run reported that it can resume: by its exit code, or by `status.json` under a launcher."""
    return code == EXIT_RESUMABLE if is_of_the_run else status_of(folder)[0] == "resumable"


def kill_processes_of(folder: Path) -> None:
    """Kill processes that outlived their launcher."""
    for pid in processes_of(folder):
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()

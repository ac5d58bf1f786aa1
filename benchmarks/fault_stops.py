"""Rows 4 and 7 of the fault scoreboard: SIGTERM, and disks that refuse a write."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from benchmarks.fault_contenders import DDP, ONE, STEPS, Contender
from benchmarks.fault_rows import WRITES
from benchmarks.fault_runs import Counts, Found, Job, ended, is_torn, says_it_is_resumable, status_of
from indictune.checkpoint import store
from indictune.checkpoint.store import UNFINISHED
from tests.faults.faulty import SIGNALLED
from tests.faults.runs import environment
from tests.ranks.launching import ROOT

GRACE_S = 30  # SLURM (KillWait) and torchrun kill by default what has not ended by then
HUNG_S = GRACE_S  # beyond the seconds of a run without a fault
DISK_ERROR = re.compile("No space left|File too large|Read-only file system|Permission denied")
BYTES_NEEDED = re.compile(r"needs?(?: about)? [\d,]+ bytes")


def stops(contender: Contender, counts: Counts, work: Path) -> Found:
    """Row 4: SIGTERM at random times, at chosen places, and to one of two ranks."""
    job = Job(contender, work, kind="long")
    draw, seconds = random.Random(1), job.unbroken[1]
    events = {"at random times": [f"after:{draw.uniform(0, seconds):.3f}" for _ in range(counts["random stops"])]}
    for place in ("after a step", "in a step", "in evaluation", "in saving"):
        calls = range(1, STEPS, counts["every stop"])
        events[place] = [f"{contender.places[place]}:{call}" for call in calls]
    events["in data preparation"] = [f"{contender.places['in data preparation']}:1"]
    found: Found = {case: outcomes_of_stops(job, each) for case, each in events.items()}
    on_two = Job(contender, work, DDP, "long")
    places = ("in a step", "in saving", "in evaluation", "in data preparation", "after a step")
    for place in places[: counts["places to stop one rank"]]:
        calls = range(1, STEPS, counts["every stop of one rank"]) if place == "in a step" else range(1, 2)
        rank = 0 if place == "in data preparation" else 1  # ours prepares on rank 0 alone
        each = [f"{contender.places[place]}:{call}@{rank}" for call in calls]
        found[f"to one of two ranks, {place}"] = outcomes_of_stops(on_two, each)
    return found


def outcomes_of_stops(job: Job, places: list[str]) -> Found:
    """Stop a run at each place; count the outcomes, and the longest time from the signal to the end.

    Raises:
        RuntimeError: a run failed before its signal.
    """
    found, longest_s = Counter[str](), 0.0
    for number, place in enumerate(places):
        folder, signalled = job.work / f"stopped-{number}", job.work / f"signalled-{number}"
        # An own cache, so that the rows are prepared again.
        variables = {"INDICTUNE_CACHE": str(folder / "cache"), SIGNALLED: str(signalled)}
        code, output = job.run(folder, f"SIGTERM@{place}", timeout_s=int(job.unbroken[1]) + HUNG_S, **variables)
        seconds = seconds_since(signalled)
        if seconds is None and code != 0:
            raise RuntimeError(f"The run failed before its signal: {output[-2000:]}")
        found["hung"] += code is None
        if seconds is None or ended(folder):
            found["ended before the signal" if seconds is None else "ignored the signal"] += 1
            shutil.rmtree(folder)
            continue
        found[f"within {GRACE_S} s"] += seconds <= GRACE_S
        longest_s = max(longest_s, seconds)
        found["said that it is resumable"] += says_it_is_resumable(folder, code, job.launch == ONE)
        if job.launch != ONE:
            found["saved the step that it reported"] += saved_the_reported_step(folder)
        found.update(job.restart_until_it_ends(folder))
    return {**+found, "seconds at most": round(longest_s, 1)}


def seconds_since(signalled: Path) -> float | None:
    """Seconds since the signal, by the time that `faulty.py` wrote to a file, which is removed. None if unsent."""
    if not signalled.exists():
        return None
    then = float(signalled.read_text(encoding="ascii"))
    signalled.unlink()
    return time.monotonic() - then


def saved_the_reported_step(folder: Path) -> bool:
    """Whether the newest checkpoint is whole, and is that of the step that `status.json` reports."""
    newest = store.checkpoints_in(folder)[:1]
    message = status_of(folder)[1]
    return any(not store.damage(path) and re.search(rf"\bstep {store.step_of(path)}\b", message) for path in newest)


def full_disks(contender: Contender, counts: Counts, work: Path) -> Found:
    """Row 7: from the third step on there is no room, or no right to write; the restart has both again."""
    job = Job(contender, work)
    sizes = sorted(path.stat().st_size for path in (job.unbroken[0] / "checkpoint-4").iterdir())
    # Just below the largest file, just below the second, and next to nothing.
    limits = [sizes[-1] // 1024, sizes[-2] // 1024, 16][: counts["limits"]]
    limited = Counter[str]()
    for limit in limits:
        folder = job.stopped_at(2, work / f"full-{limit}")
        words = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", *job.words(folder)]
        done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
        limited.update(outcomes_of_a_refused_write(job, folder, done.returncode, done.stderr))
    found: Found = {"a limit on the size of files": dict(+limited), "a small disk": _on_a_small_disk(job)}
    once = Job(replace(contender, command=(*contender.command, "--max_steps", "3")), work / "refused")
    for error in ("EROFS", "EACCES"):
        for write in WRITES[:: counts["every kind of write"]]:
            refused = _refused(once, error, write, counts["every refused write"])
            if refused:
                found[f"{error} from a {write.partition(':')[2]} on"] = dict(refused)
    return found


def _refused(job: Job, error: str, write: str, every: int) -> Counter[str]:
    """Resume from step 2, save step 3, and let each write fail from one call on."""
    refused = Counter[str]()
    for call in range(1, 1000, every):
        folder = job.stopped_at(2, job.work / f"{error}-{write.replace(':', '-')}-{call}")
        hit = job.work / "hit"
        hit.unlink(missing_ok=True)
        code, output = job.run(folder, f"{error}@{write}:{call}", SIGNALLED=str(hit))
        if not hit.exists():  # no such call is left
            shutil.rmtree(folder)
            break
        if code == 0:
            refused[f"ended anyway, {job.verdict(folder, code, output, 0)}"] += 1
        else:
            refused.update(outcomes_of_a_refused_write(job, folder, code, output))
    return +refused


def outcomes_of_a_refused_write(job: Job, folder: Path, code: int | None, output: str) -> Counter[str]:
    """What a run reported and left, and how it ends when it can write again."""
    found = Counter[str]()
    found["failed with an exit code"] += code != 0
    lines = [line for line in output.splitlines() if str(folder) in line and DISK_ERROR.search(line)]
    found["named the path and the error"] += bool(lines)
    found["named the bytes needed"] += any(BYTES_NEEDED.search(line) for line in lines)
    found["left a partial checkpoint"] += is_torn(folder) or bool(list((folder / UNFINISHED).glob("*")))
    found.update(job.restart_until_it_ends(folder))
    return found


def _on_a_small_disk(job: Job) -> Found:
    """Run on a file system with room for half a checkpoint, then with room for all."""
    disk = job.work / "disk"
    disk.mkdir()
    before = job.stopped_at(2, job.work / "before")
    held = sum(path.stat().st_size for path in before.rglob("*"))
    half = sum(path.stat().st_size for path in (before / "checkpoint-2").iterdir()) // 2
    mount = ["mount", "-t", "tmpfs", "-o", f"size={held + half}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        return {"not run": "no file system can be mounted here"}
    try:
        folder = Path(shutil.copytree(before, disk / "out"))
        code, output = job.run(folder)
        subprocess.run(["mount", "-o", "remount,size=1g", str(disk)], check=True)
        return dict(+outcomes_of_a_refused_write(job, folder, code, output))
    finally:
        subprocess.run(["umount", str(disk)], check=True)

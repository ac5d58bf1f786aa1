"""Rows 5, 6, 9 and 10 of the fault scoreboard: launchers, lost ranks, resumes, and other launches."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from pathlib import Path

from benchmarks.fault_contenders import DDP, EPOCHS, FSDP2, ONE, STEPS, ZERO3, Contender
from benchmarks.fault_runs import (
    Counts,
    Found,
    Job,
    ended,
    epochs,
    kill_processes_of,
    logged,
    losses,
    resumed_from,
    says_it_is_resumable,
    status_of,
)
from benchmarks.fault_stops import seconds_since
from tests.faults.runs import environment, processes_of
from tests.ranks.launching import BIN, ROOT, accelerate, deepspeed, python, torchrun

PATIENCE = ("--ddp_timeout", "20")
GIVE_UP_S = 60
START_S = 30  # until a run reaches its third step
DEAD_AFTER_S = 10
ENDS_WITHIN_S = {"SIGKILL": DEAD_AFTER_S, "SIGSTOP": 55}  # the others wait 20 s for a stopped rank
CHANGE_AT = 6  # step of 20; an epoch has four


def orphans(contender: Contender, counts: Counts, work: Path) -> Found:
    """Row 5: SIGTERM and SIGINT to a launcher, and the seconds until no process is left."""
    alone = [str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "1"]
    zero = ("--deepspeed", "ds_configs/zero2.json")
    launchers: dict[str, tuple[str, Callable[[], list[str]], tuple[str, ...]]] = {
        "accelerate launch, one process": (ONE, lambda: alone, ()),
        "python": (ONE, python, ()),
        "accelerate launch, two": (DDP, partial(accelerate, "ddp", 2), ()),
        "torchrun, two": (DDP, partial(torchrun, 2), ()),
        "deepspeed, two": (DDP, partial(deepspeed, 2), zero),
    }
    found: Found = {}
    for title, (launch, launcher, flags) in list(launchers.items())[:: counts["every launcher"]]:
        for number in (signal.SIGTERM, signal.SIGINT)[: counts["signals to launchers"]]:
            job = Job(replace(contender, launches={launch: launcher}), work, launch)
            folder = work / f"{number.name}-{len(found)}"
            left, code = _left_after_a_signal(job, folder, number, *flags)
            resumable = says_it_is_resumable(folder, code, title == "python")
            found[f"{number.name} to {title}"] = {**left, "said that it is resumable": int(resumable)}
    return found


def _left_after_a_signal(
    job: Job, folder: Path, number: signal.Signals, *flags: str
) -> tuple[dict[str, float], int | None]:
    """Processes left after a signal to the launcher, and the launcher's exit code."""
    words = job.words(folder, *flags, "--max_steps", "20000", "--save_total_limit", "2")
    with subprocess.Popen(
        words, cwd=ROOT, env=environment(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as started:
        try:
            deadline = time.monotonic() + 2 * GIVE_UP_S
            while not (folder / "checkpoint-3").exists():
                if time.monotonic() > deadline or started.poll() is not None:
                    raise RuntimeError(f"The run in {folder} did not begin.")
                time.sleep(0.02)
            started.send_signal(number)
            since, late = time.monotonic(), 0
            while (left := len(processes_of(folder))) and time.monotonic() < since + GIVE_UP_S:
                if time.monotonic() > since + DEAD_AFTER_S:
                    late = late or left
                time.sleep(0.1)
            found = {"seconds": round(time.monotonic() - since, 1), "left after 10 s": late, "left in the end": left}
            with suppress(subprocess.TimeoutExpired):
                started.wait(1)
            return found, started.poll()
        finally:
            kill_processes_of(folder)
            started.kill()


def lost_ranks(contender: Contender, counts: Counts, work: Path) -> Found:
    """Row 6: kill or stop either of two ranks; the seconds until the run ended, and who named the rank.

    Raises:
        RuntimeError: a run failed before its rank was hit.
    """
    job = Job(contender, work, DDP)
    found: Found = {}
    for name, rank in product(("SIGKILL", "SIGSTOP"), (1, 0)):
        folder, hit = work / f"{name}-{rank}", work / f"{name}-{rank}-hit"
        event = f"{name}@{contender.places['in a step']}:3@{rank}"
        code, output = job.run(folder, event, *PATIENCE, timeout_s=START_S + GIVE_UP_S, SIGNALLED=str(hit))
        seconds, message = seconds_since(hit), status_of(folder)[1]
        if seconds is None:
            raise RuntimeError(f"The run failed before its rank was hit: {output[-2000:]}")
        found[f"{name} to rank {rank}"] = {
            "seconds": round(seconds, 1),
            f"within {ENDS_WITHIN_S[name]} s": int(code is not None and seconds <= ENDS_WITHIN_S[name]),
            "still running after the limit": int(code is None),
            "named by the run": int(f"rank {rank} (process" in message or f"rank {rank} (process" in output),
            "named by the launcher": int(f"rank      : {rank}" in output),
        }
    launcher = {DDP: lambda: [*torchrun(2), "--max-restarts", "1"]}
    restarting = Job(replace(contender, launches=launcher), work / "restarted", DDP)
    for name in ("SIGKILL", "SIGSTOP")[: counts["restarts"]]:
        found[f"{name}, torchrun --max-restarts 1"] = _restarted(restarting, name)
    return found


def _restarted(job: Job, name: str) -> Found:
    """Lose a rank in the sixth step; the restarted run has fewer steps left, so it is not hit again."""
    folder, event = job.work / name, f"{name}@{job.contender.places['in a step']}:6@1"
    code, output = job.run(folder, event, *PATIENCE)
    # The other rank may still be saving the fifth step.
    return {"ended without a hand": int(code == 0), job.verdict(folder, code, output, newest=4): 1}


def resumes(contender: Contender, counts: Counts, work: Path) -> Found:
    """Row 9: resume after each step of two epochs, by launch and kind of batches."""
    found: Found = {}
    kinds = ["plain", "accumulation", "batches by length", "packed rows"][: counts["kinds of batches"]]
    kinds += [f"{kind}, workers 2" for kind in kinds[: counts["kinds of batches with workers"]]]
    for launch in contender.launches:
        for kind in kinds:
            on_packed = replace(contender, command=contender.packed) if kind.startswith("packed") else contender
            if on_packed.command:
                found[f"{launch}, {kind}"] = dict(resumed_at_each(Job(on_packed, work, launch, kind), counts))
            else:
                found[f"{launch}, {kind}"] = "not run: it packs no rows"
    return found


def resumed_at_each(job: Job, counts: Counts) -> Counter[str]:
    """Outcomes of resuming after each step.

    Raises:
        RuntimeError: the run without a fault has another number of steps or epochs.
    """
    whole = job.unbroken[0]
    if (len(logged(whole)), epochs(whole)) != (STEPS, EPOCHS):
        raise RuntimeError(f"{len(logged(whole))} steps in {epochs(whole)} epochs, not {STEPS} in {EPOCHS}")
    found = Counter[str]()
    for step in range(1, STEPS, counts["every step"]):
        found.update(job.restart_until_it_ends(job.stopped_at(step, job.work / f"resumed-{step}")))
    shutil.rmtree(whole)
    return found


def other_launches(contender: Contender, counts: Counts, work: Path) -> Found:
    """Row 10: resume checkpoint-6 of 20 steps under another launch, with the same rows in each step."""
    launches = [each for each in (ONE, DDP, FSDP2, ZERO3) if each in contender.launches]
    jobs = {launch: Job(contender, work, launch, "many steps, no dropout") for launch in launches}
    found: Found = dict(contender.unsupported)
    for before, after in list(permutations(launches, 2))[:: counts["every change of launch"]]:
        folder = jobs[before].stopped_at(CHANGE_AT, work / f"{before}-{after}".replace(" ", "-"))
        code, output = jobs[after].run(folder)
        if code != 0 or not ended(folder):
            outcome: Found = {"hung" if code is None else "refused": 1}
        elif resumed_from(output, folder) != CHANGE_AT:
            outcome = {"repeated steps": 1}
        else:
            pairs = zip(losses(jobs[before].unbroken[0]), losses(folder), strict=True)
            largest = max(abs(one - other) for one, other in pairs)
            outcome = {"largest difference of losses": float(f"{largest:.2g}")}
        found[f"{before}, then {after}"] = outcome
    return found

"""The rows of the scoreboard that launchers, ranks and launches make: each is put through a contender and counted."""

from __future__ import annotations

import re
import shlex
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

from benchmarks.fault_rows import Counts, Found, seconds_since
from benchmarks.fault_runs import (
    DDP,
    EPOCHS,
    FSDP2,
    ONE,
    STEPS,
    ZERO3,
    Contender,
    Job,
    ended,
    epochs,
    gone_on_from,
    kill_processes_of,
    logged,
    losses,
    status_of,
    tells_of_going_on,
)
from tests.faults.runs import environment, processes_of
from tests.ranks.launching import BIN, ROOT, accelerate, deepspeed, free_port, python, torchrun

PATIENCE = ("--ddp_timeout", "20")
GIVE_UP_S = 60
START_S = 30  # in which a run has come to its third step
DEAD_AFTER_S = 10
ENDS_WITHIN_S = {"SIGKILL": DEAD_AFTER_S, "SIGSTOP": 55}  # of which the others wait 20 for a stopped rank
GO_ON_BY = re.compile(r"Go on with it by `([^`]+)`")
AMID = 6  # steps, of which an epoch has four


def orphans(contender: Contender, counts: Counts, work: Path) -> Found:
    """5: SIGTERM and SIGINT to a launcher: how long until no process is left."""
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
            left, code = _left(job, folder, number, *flags)
            told = tells_of_going_on(folder, code, title == "python")
            found[f"{number.name} to {title}"] = {**left, "told that it can be gone on with": int(told)}
    return found


def _left(job: Job, folder: Path, number: signal.Signals, *flags: str) -> tuple[Found, int | None]:
    """What is left after a signal to the launcher, and the launcher's exit code."""
    words = job.words(folder, *flags, "--max_steps", "20000", "--save_total_limit", "2")
    with subprocess.Popen(
        words, cwd=ROOT, env=environment(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as started:
        try:
            deadline = time.monotonic() + 2 * GIVE_UP_S
            while not (folder / "checkpoint-3").exists():
                if time.monotonic() > deadline or started.poll() is not None:
                    raise RuntimeError(f"the run in {folder} did not begin")
                time.sleep(0.02)
            started.send_signal(number)
            since, late = time.monotonic(), 0
            while (left := len(processes_of(folder))) and time.monotonic() < since + GIVE_UP_S:
                if time.monotonic() > since + DEAD_AFTER_S:
                    late = late or left
                time.sleep(0.1)
            found = {"seconds": round(time.monotonic() - since, 1), "left after 10 s": late, "left in the end": left}
            with suppress(subprocess.TimeoutExpired):  # it has forgotten its command before its code is known
                started.wait(1)
            return found, started.poll()
        finally:
            kill_processes_of(folder)
            started.kill()


def lost_ranks(contender: Contender, counts: Counts, work: Path) -> Found:
    """6: either of two ranks is killed or stopped: how long until the run ended, and whether it named the rank.

    Raises:
        RuntimeError: a run failed before its rank was hit.
    """
    job = Job(contender, work, DDP)
    found: Found = {}
    ways = ("SIGKILL", "SIGSTOP")[: counts["ways to lose a rank"]]
    for name, rank in product(ways, (1, 0)):
        folder, hit = work / f"{name}-{rank}", work / f"{name}-{rank}-hit"
        event = f"{name}@{contender.places['in a step']}:3@{rank}"
        code, said = job.run(folder, event, *PATIENCE, timeout_s=START_S + GIVE_UP_S, SIGNALLED=str(hit))
        seconds, message = seconds_since(hit), status_of(folder)[1]
        if seconds is None:
            raise RuntimeError(f"the run failed before its rank was hit: {said[-2000:]}")
        found[f"{name} to rank {rank}"] = {
            "seconds": round(seconds, 1),
            f"within {ENDS_WITHIN_S[name]} s": int(code is not None and seconds <= ENDS_WITHIN_S[name]),
            "still running when given up": int(code is None),
            "told by the run": int(f"rank {rank} (process" in message or f"rank {rank} (process" in said),
            "told by the launcher": int(f"rank      : {rank}" in said),
        }
    launcher = {DDP: lambda: [*torchrun(2), "--max-restarts", "1"]}
    restarting = Job(replace(contender, launches=launcher), work / "restarted", DDP)
    for name in ("SIGKILL", "SIGSTOP")[: counts["restarts"]]:
        found[f"{name}, torchrun --max-restarts 1"] = _restarted(restarting, name)
    return found


def _restarted(job: Job, name: str) -> Found:
    """A rank is lost in its sixth step; started again by its launcher it has fewer to go: it is not hit again."""
    folder, event = job.work / name, f"{name}@{job.contender.places['in a step']}:6@1"
    code, said = job.run(folder, event, *PATIENCE)
    # The other rank may be saving the fifth step.
    return {"ended by itself": int(code == 0), job.judged(folder, code, said, newest=4): 1}


def resumes(contender: Contender, counts: Counts, work: Path) -> Found:
    """9: gone on with after each step of two epochs, by launch and kind of batches."""
    found: Found = {}
    kinds = ["plain", "accumulation", "batches by length", "packed rows"][: counts["kinds of batches"]]
    kinds += [f"{kind}, workers 2" for kind in kinds[: counts["kinds of batches with workers"]]]
    for launch in contender.launches:
        for kind in kinds:
            on_packed = replace(contender, command=contender.packed) if kind.startswith("packed") else contender
            if on_packed.command:
                found[f"{launch}, {kind}"] = dict(_gone_on(Job(on_packed, work, launch, kind), counts["every step"]))
            else:
                found[f"{launch}, {kind}"] = "not run: it packs no rows"
    return found


def _gone_on(job: Job, every: int) -> Counter[str]:
    """As `until_it_ends`.

    Raises:
        RuntimeError: the run that nothing happens to has not so many steps, or is not over when the second epoch is.
    """
    whole = job.unbroken[0]
    if (len(logged(whole)), epochs(whole)) != (STEPS, EPOCHS):
        raise RuntimeError(f"{len(logged(whole))} steps in {epochs(whole)} epochs, not {STEPS} in {EPOCHS}")
    found = Counter[str]()
    for step in range(1, STEPS, every):
        folder = job.stopped_at(step, job.work / f"resumed-{step}")
        found.update(job.until_it_ends(folder))
    shutil.rmtree(whole)
    return found


def other_launches(contender: Contender, counts: Counts, work: Path) -> Found:
    """10: checkpoint-6 of 20 steps is gone on with under another launch, with the same rows in each step."""
    launches = [each for each in (ONE, DDP, FSDP2, ZERO3) if each in contender.launches]
    jobs = {launch: Job(contender, work, launch, "many steps, no dropout") for launch in launches}
    found: Found = dict(contender.cannot)
    for before, after in list(permutations(launches, 2))[:: counts["every change of launch"]]:
        folder = jobs[before].stopped_at(AMID, work / f"{before}-{after}".replace(" ", "-"))
        code, said = jobs[after].run(folder)
        if code != 0 or not ended(folder):
            way_out = told_way_out(jobs[before], folder, said, AMID)
            found[f"{before}, then {after}"] = {"refused": int(code is not None), **way_out}
            continue
        if gone_on_from(said, folder) != AMID:
            found[f"{before}, then {after}"] = {"did steps again": 1}
            continue
        found[f"{before}, then {after}"] = difference(jobs[before], folder)
    return found


def difference(job: Job, folder: Path) -> Found:
    """Of the losses, from those of the run that nothing happened to."""
    both = zip(losses(job.unbroken[0]), losses(folder), strict=True)
    largest = max(abs(one - other) for one, other in both)
    return {"largest difference of losses": float(f"{largest:.2g}")}


def told_way_out(job: Job, folder: Path, said: str, newest: int) -> Found:
    """Whether a run that is refused has told a command, and how that ends: it keeps the micro-batches of the one that
    was refused, which may add in another order.

    Args:
        job: under whose launch the command is to go on.
        folder: of the run.
        said: by the run that is refused.
        newest: step of the checkpoint to go on from.
    """
    told = GO_ON_BY.search(said)
    if told is None:
        return {"told the way out": 0}
    # As torchrun's --master_port.
    code, said = job.typed(shlex.split(told[1]), folder, PET_MASTER_PORT=str(free_port()))
    if code != 0 or not ended(folder) or gone_on_from(said, folder) != newest:
        return {"told the way out": 1, "the command that is told does not go on": 1}
    return {"told the way out": 1, **difference(job, folder)}

"""The rows of the scoreboard that are runs: each is put through a contender and counted. For `benchmarks.faults`."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.fault_runs import (
    DDP,
    FSDP2,
    JUDGED,
    ONE,
    STEPS,
    ZERO3,
    Contender,
    Job,
    ended,
    kill_processes_of,
    losses,
    steps_lost,
)
from tests.distributed.launching import BIN, ROOT, free_port
from tests.faults.runs import environment, processes_of

Counts = dict[str, int]
Found = dict[str, Any]  # by case: words and how often, or how much

LAUNCHER_S = 2  # of a launched run's seconds, in which no rank runs yet
RANK_TIMEOUT_S = 20
GIVE_UP_S = 60
DEAD_AFTER_S = 10


def kills(contender: Contender, counts: Counts, work: Path) -> Found:
    """1: SIGKILL at random times, of one rank where there are two."""
    wanted = {ONE: counts["kills"], DDP: counts["kills of two ranks"], ZERO3: counts["kills of ZeRO-3"]}
    return _under_each(contender, work, wanted, _killed)


def _under_each(contender: Contender, work: Path, wanted: Counts, put: Callable[[Job, int], Counter[str]]) -> Found:
    """What `put` counts under each launch of the contender for which a number is given."""
    return {
        launch: dict(put(Job(contender, work, launch, "plain" if launch == ONE else "two ranks"), number))
        for launch, number in wanted.items()
        if launch in contender.launches and number
    }


def _killed(job: Job, count: int) -> Counter[str]:
    """Runs that end before they are hit do not count."""
    draw, found = random.Random(0), Counter[str]()
    seconds = job.unbroken[1] - (0 if job.launch == ONE else LAUNCHER_S)
    for number in range(3 * count):
        if sum(found[word] for word in JUDGED) == count:
            break
        folder = job.work / f"killed-{job.launch}-{number}".replace(" ", "-")
        rank = "" if job.launch == ONE else f"@{draw.randrange(2)}"
        code, _ = job.run(folder, f"SIGKILL@after:{draw.uniform(0, seconds):.3f}{rank}")
        if code == 0:
            continue
        lost = steps_lost(folder)  # each step is saved
        if lost is not None:
            found["lost more than a step"] += lost > 1
        found[job.until_it_ends(folder)] += 1
    return found


WRITES = (
    *("os:fsync", "os:makedirs", "os:chmod", "shutil:rmtree", "pathlib:Path.rename", "pathlib:Path.write_text"),
    *("torch:save", "transformers.modeling_utils:safe_save_file"),
    *("transformers.configuration_utils:PreTrainedConfig.to_json_file",),
    *("transformers.tokenization_utils_base:PreTrainedTokenizerBase.save_pretrained",),
    "transformers.trainer_callback:TrainerState.save_to_json",
)


def writes(contender: Contender, counts: Counts, work: Path) -> Found:
    """2: SIGKILL just before every call that writes, in a run of two steps that saves both."""
    job = Job(replace(contender, command=(*contender.command, "--max_steps", "2")), work)
    found: Found = {}
    for write in WRITES:
        cases = Counter[str]()
        for call in range(1, 1000, counts["every write"]):
            folder = work / f"{write.replace(':', '-')}-{call}"
            code, _ = job.run(folder, f"SIGKILL@{write}:{call}")
            if code == 0:  # it has no more such calls
                shutil.rmtree(folder)
                break
            cases[job.until_it_ends(folder)] += 1
        if cases:
            found[write.partition(":")[2]] = dict(cases)
    return found


def flipped(content: bytes) -> bytes:
    """With a bit changed at each eighth of its length: a single one may hit what is not used."""
    changed = bytearray(content)
    for eighth in range(1, 8):
        changed[len(content) * eighth // 8] ^= 64
    return bytes(changed)


CORRUPTIONS: dict[str, Callable[[bytes], bytes | None]] = {
    "deleted": lambda _: None,
    "empty": lambda _: b"",
    "cut": lambda content: content[: len(content) // 2],
    "longer": lambda content: content + b"0",
    "zeros": lambda content: bytes(len(content)),
    "reversed": lambda content: content[::-1],
    "bits flipped": flipped,
}


def corruptions(contender: Contender, counts: Counts, work: Path) -> Found:
    """3: each file of the newest checkpoint is corrupted in each way."""
    strides = {
        ONE: counts["every corruption"],
        FSDP2: counts["every corruption of a shard"],
        ZERO3: counts["every corruption of ZeRO's shard"],
    }
    return _under_each(contender, work, strides, _corrupted)


def _corrupted(job: Job, every: int) -> Counter[str]:
    found = Counter[str]()
    for name, corrupt in list(_cases(job.unbroken[0] / "checkpoint-4"))[::every]:
        folder = job.stopped_at(4, job.work / "corrupted")
        path = folder / "checkpoint-4" / name
        content = corrupt(path.read_bytes())
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        code, said = job.run(folder)
        found["named the file"] += name in said
        found["took the unfinished run for whole"] += code == 0 and not ended(folder)
        found[job.judged(folder)] += 1
        shutil.rmtree(folder)
    return +found


def _cases(checkpoint: Path) -> Iterator[tuple[str, Callable[[bytes], bytes | None]]]:
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.stat().st_size:
            for corrupt in CORRUPTIONS.values():
                yield path.relative_to(checkpoint).as_posix(), corrupt


def stops(contender: Contender, counts: Counts, work: Path) -> Found:
    """4: SIGTERM at random times, at places, and to one of two ranks."""
    job = Job(contender, work, kind="long")
    draw, seconds = random.Random(1), job.unbroken[1]
    events = {"at random times": [f"after:{draw.uniform(0, seconds):.3f}" for _ in range(counts["random stops"])]}
    for place in ("after a step", "in a step", "in evaluation", "in saving"):
        calls = range(1, STEPS, counts["every stop"])
        events[place] = [f"{contender.places[place]}:{call}" for call in calls]
    events["in data preparation"] = [f"{contender.places['in data preparation']}:1"]
    found: Found = {case: dict(_stopped(job, each)) for case, each in events.items()}
    on_two = Job(contender, work, DDP, "long, two ranks")
    calls = range(1, STEPS, counts["every stop of one rank"])
    found["to one of two ranks"] = dict(_stopped(on_two, [f"{contender.places['in a step']}:{n}@1" for n in calls]))
    return found


def _stopped(job: Job, places: list[str]) -> Counter[str]:
    found = Counter[str]()
    for number, place in enumerate(places):
        folder = job.work / f"stopped-{number}"
        # Rows that were prepared before would not be prepared again.
        code, _ = job.run(folder, f"SIGTERM@{place}", INDICTUNE_CACHE=str(folder / "cache"))
        found["hung"] += code is None
        if ended(folder):
            found["ended all the same"] += 1
            shutil.rmtree(folder)
            continue
        found["told by the exit code"] += code not in (None, 0, -signal.SIGTERM)
        found[job.until_it_ends(folder)] += 1
    return +found


def orphans(contender: Contender, counts: Counts, work: Path) -> Found:
    """5: SIGTERM and SIGINT to a launcher: how long until no process is left."""
    launchers = {
        "accelerate launch, one process": [str(BIN / "accelerate"), "launch", "--num_processes", "1", "--cpu"],
        "torchrun, two": [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", str(free_port())],
    }
    found: Found = {}
    for title, launcher in launchers.items():
        for number in (signal.SIGTERM, signal.SIGINT)[: counts["signals to launchers"]]:
            with_launcher = replace(contender, launches={ONE: launcher.copy})
            folder = work / f"{number.name}-{len(found)}"
            job = Job(with_launcher, work, kind="plain" if "one" in title else "two ranks")
            found[f"{number.name} to {title}"] = _left(job, folder, number)
    return found


def _left(job: Job, folder: Path, number: signal.Signals) -> Found:
    words = job.words(folder, "--max_steps", "20000", "--save_total_limit", "2")
    with subprocess.Popen(
        words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
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
            return {"seconds": round(time.monotonic() - since, 1), "left after 10 s": late, "left in the end": left}
        finally:
            kill_processes_of(folder)
            started.kill()


def lost_ranks(contender: Contender, counts: Counts, work: Path) -> Found:
    """6: one of two ranks is killed or stopped: how long until the run ended, and whether it named the rank."""
    job = Job(contender, work, DDP, "two ranks")
    found: Found = {}
    for name in ("SIGKILL", "SIGSTOP")[: counts["ways to lose a rank"]]:
        folder = work / name
        event = f"{name}@{contender.places['in a step']}:3@1"
        since = time.monotonic()
        code, said = job.run(folder, event, "--ddp_timeout", str(RANK_TIMEOUT_S), timeout_s=GIVE_UP_S)
        status = folder / "status.json"
        message = status.read_text(encoding="utf-8") if status.exists() else ""
        found[name] = {
            "seconds": round(time.monotonic() - since, 1),
            "still running when given up": int(code is None),
            "told by the run": int("rank 1 (process" in message or "rank 1 (process" in said),
            "told by the launcher": int("rank      : 1" in said),
        }
    return found


def full_disks(contender: Contender, counts: Counts, work: Path) -> Found:
    """7: no file may get longer than a limit, from the third step on; then there is room again."""
    job = Job(contender, work)
    sizes = sorted(path.stat().st_size for path in (job.unbroken[0] / "checkpoint-4").iterdir())
    # Of the largest file all but a byte, of the one before it, and next to nothing.
    limits = [sizes[-1] // 1024, sizes[-2] // 1024, 16][: counts["limits"]]
    found = Counter[str]()
    for limit in limits:
        folder = job.stopped_at(2, work / f"full-{limit}")
        words = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", *job.words(folder)]
        done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
        found["told by the exit code"] += done.returncode != 0
        found["named the folder"] += "could not be written to" in done.stderr or str(folder) in done.stderr
        found["a partial checkpoint left"] += (folder / "checkpoint-3").exists()
        found[job.until_it_ends(folder)] += 1
    return {"a limit on the size of files": dict(+found)}


def bad_numbers(contender: Contender, counts: Counts, work: Path) -> Found:
    """8: a NaN in the loss of each step."""
    job, found = Job(contender, work), Counter[str]()
    for step in range(1, STEPS + 1, counts["every step"]):
        folder = work / f"nan-{step}"
        code, _ = job.run(folder, f"NAN@{contender.places['loss']}:{step}")
        saved = [path for path in folder.glob("checkpoint-*") if int(path.name.rpartition("-")[2]) >= step]
        found["stopped"] += code != 0
        found["saved after it"] += bool(saved)
        found["not stopped"] += code == 0
        shutil.rmtree(folder)
    return {"NaN in the loss": dict(+found)}


def resumes(contender: Contender, counts: Counts, work: Path) -> Found:
    """9: gone on with after each step."""
    found: Found = {}
    for kind in ("plain", "accumulation", "batches by length", "workers 2"):
        job, cases = Job(contender, work, kind=kind), Counter[str]()
        for step in range(1, STEPS, counts["every step"]):
            folder = job.stopped_at(step, work / f"resumed-{step}")
            cases[job.until_it_ends(folder)] += 1
        found[kind] = dict(cases)
    return found


def other_launches(contender: Contender, counts: Counts, work: Path) -> Found:
    """10: checkpoint-4 is gone on with under another number of processes, with the same rows in each step."""
    alone = Job(contender, work, ONE, "no dropout")
    two = Job(contender, work, DDP, "no dropout, two ranks")
    found: Found = {}
    changes = {"one process, then DDP x2": (alone, two), "DDP x2, then one process": (two, alone)}
    for title, (before, after) in list(changes.items())[: counts["changes of launch"]]:
        folder = before.stopped_at(4, work / title.replace(" ", "-").replace(",", ""))
        code, said = after.run(folder)
        expected = losses(before.unbroken[0])
        if not ended(folder):
            found[title] = {"refused": int(code is not None), "in its words": said[-300:]}
            continue
        differences = [abs(one - other) for one, other in zip(expected, losses(folder), strict=True)]
        found[title] = {"largest difference of losses": float(f"{max(differences):.2g}")}
    return found

"""The rows of the scoreboard that are faults of one run: each is put through a contender and counted."""

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

import torch
from safetensors.torch import load_file

from benchmarks.fault_runs import (
    DDP,
    FSDP2,
    JUDGED,
    MANY_STEPS,
    ONE,
    STEPS,
    ZERO3,
    Contender,
    Job,
    ended,
    losses,
    steps_lost,
)
from indictune.training.checkpoints import store
from tests.distributed.launching import ROOT
from tests.faults.runs import environment

Counts = dict[str, int]
Found = dict[str, Any]  # by case: words and how often, or how much

LAUNCHER_S = 2  # of a launched run's seconds, in which no rank runs yet
SMALL_DISK = "a small disk"


def kills(contender: Contender, counts: Counts, work: Path) -> Found:
    """1: SIGKILL at random times, of one rank where there are two."""
    wanted = {ONE: counts["kills"], DDP: counts["kills of two ranks"], ZERO3: counts["kills of ZeRO-3"]}
    return _under_each(contender, work, wanted, _killed)


def _under_each(contender: Contender, work: Path, wanted: Counts, put: Callable[[Job, int], Counter[str]]) -> Found:
    """What `put` counts under each launch of the contender for which a number is given."""
    return {
        launch: dict(put(Job(contender, work, launch), number))
        for launch, number in wanted.items()
        if launch in contender.launches and number
    }


def _killed(job: Job, count: int) -> Counter[str]:
    """Runs that end before they are hit do not count."""
    draw, found = random.Random(0), Counter[str]()
    launcher_s = 0 if job.launch == ONE else LAUNCHER_S
    seconds = job.unbroken[1] - launcher_s
    for number in range(3 * count):
        if sum(found[word] for word in JUDGED) == count:
            break
        folder = job.work / f"killed-{job.launch}-{number}".replace(" ", "-")
        rank = "" if job.launch == ONE else f"@{draw.randrange(2)}"
        since = time.monotonic()
        code, _ = job.run(folder, f"SIGKILL@after:{draw.uniform(0, seconds):.3f}{rank}")
        if code == 0:  # it was quicker than those before
            seconds = time.monotonic() - since - launcher_s
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
    on_two = Job(contender, work, DDP, "long")
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


def full_disks(contender: Contender, counts: Counts, work: Path) -> Found:
    """7: from the third step on no room, or no right to write; then there is again."""
    job = Job(contender, work)
    sizes = sorted(path.stat().st_size for path in (job.unbroken[0] / "checkpoint-4").iterdir())
    # Of the largest file all but a byte, of the one before it, and next to nothing.
    limits = [sizes[-1] // 1024, sizes[-2] // 1024, 16][: counts["limits"]]
    limited = Counter[str]()
    for limit in limits:
        folder = job.stopped_at(2, work / f"full-{limit}")
        words = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", *job.words(folder)]
        done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
        limited.update(_not_written(job, folder, done.returncode, done.stderr))
    found: Found = {"a limit on the size of files": dict(+limited), SMALL_DISK: _on_a_small_disk(job)}
    for error in ("EROFS", "EACCES"):
        refused = Counter[str]()
        for write in ("torch:save", "transformers.modeling_utils:safe_save_file"):
            for call in range(1, 1000, counts["every refused write"]):
                folder = job.stopped_at(2, work / f"{error}-{write.replace(':', '-')}-{call}")
                code, said = job.run(folder, f"{error}@{write}:{call}")
                if code == 0:  # it has no more such calls
                    shutil.rmtree(folder)
                    break
                refused.update(_not_written(job, folder, code, said))
        found[f"{error} from a write on"] = dict(+refused)
    return found


def _not_written(job: Job, folder: Path, code: int | None, said: str) -> Counter[str]:
    """What a run has told and left, and how it ends when it can write again."""
    partial = [path for path in folder.glob("checkpoint-*") if not (path / "trainer_state.json").exists()]
    found = Counter[str]()
    found["told by the exit code"] += code != 0
    found["named the folder"] += "could not be written to" in said or str(folder) in said
    found["a partial checkpoint left"] += bool(partial)
    found[job.until_it_ends(folder)] += 1
    return found


def _on_a_small_disk(job: Job) -> Found:
    """A file system that has room for half a checkpoint, and then for all."""
    disk = job.work / "disk"
    disk.mkdir()
    before = job.stopped_at(2, job.work / "before")
    held = sum(path.stat().st_size for path in before.rglob("*"))
    half = sum(path.stat().st_size for path in (before / "checkpoint-2").iterdir()) // 2
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={held + half}", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        return {"not run": "no file system can be mounted here"}
    try:
        folder = Path(shutil.copytree(before, disk / "out"))
        code, said = job.run(folder)
        subprocess.run(["mount", "-o", "remount,size=1g", str(disk)], check=True)
        return dict(+_not_written(job, folder, code, said))
    finally:
        subprocess.run(["umount", str(disk)], check=True)


BAD_NUMBERS = {
    "NaN in the loss": ("NAN", "loss"),
    "an infinite loss": ("INFINITE", "loss"),
    "NaN in the gradients": ("NAN_GRADIENT", "gradients"),
    "infinite gradients": ("INFINITE_GRADIENT", "gradients"),
}


def bad_numbers(contender: Contender, counts: Counts, work: Path) -> Found:
    """8: NaN or inf in loss or gradients of each of 20 steps; where there is a policy, by each."""
    found: Found = {}
    for kind in ("many steps", "many steps, skip", "many steps, rollback"):
        if kind not in contender.flags:
            continue
        job = Job(contender, work, kind=kind)
        for title, (event, place) in BAD_NUMBERS.items():
            cases = Counter[str]()
            for step in range(1, MANY_STEPS + 1, counts["every bad step"]):
                cases.update(
                    _went_bad(job, work / f"{event}-{step}", f"{event}@{contender.places[place]}:{step}", step)
                )
            found[title + kind.removeprefix("many steps")] = dict(+cases)
    return found


def _went_bad(job: Job, folder: Path, event: str, step: int) -> Counter[str]:
    code, _ = job.run(folder, event)
    saved = [path for path in store.listed(folder) if store.step_of(path) >= step]
    found = Counter[str]()
    found["stopped"] += code not in (0, None)
    found["ended"] += code == 0
    found["saved a weight that is not finite"] += not all(map(_is_finite, folder.rglob("model.safetensors")))
    found["saved after it, and stopped"] += code != 0 and bool(saved)
    found["told a loss of 0"] += code == 0 and 0.0 in losses(folder)
    shutil.rmtree(folder)
    return found


def _is_finite(path: Path) -> bool:
    return all(bool(torch.isfinite(each).all()) for each in load_file(path).values())

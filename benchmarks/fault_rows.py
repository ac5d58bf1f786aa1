"""The rows of the scoreboard that are faults of one run: each is put through a contender and counted."""

from __future__ import annotations

import random
import re
import shutil
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
    is_torn,
    newest_whole,
    status_of,
    steps_lost,
    tells_of_going_on,
)
from indictune.checkpoint import store
from indictune.checkpoint.store import UNFINISHED
from tests.faults.faulty import SIGNALLED
from tests.faults.runs import environment
from tests.ranks.launching import ROOT

Counts = dict[str, int]
Found = dict[str, Any]  # by case: words and how often, or how much

SMALL_DISK = "a small disk"
# After a SIGTERM; by default both SLURM (KillWait) and torchrun kill what has not ended by then.
GRACE_S = 30
HUNG_S = GRACE_S  # more than the run that nothing happens to takes
WRONG_WITH_A_DISK = re.compile("No space left|File too large|Read-only file system|Permission denied")
BYTES_NEEDED = re.compile(r"needs? [\d,]+ bytes")


def kills(contender: Contender, counts: Counts, work: Path) -> Found:
    """1: SIGKILL at random times, of one rank where there are two."""
    wanted = {ONE: counts["kills"], DDP: counts["kills of two ranks"], ZERO3: counts["kills of ZeRO-3"]}
    return _under_each(contender, work, wanted, _killed)


def _under_each(contender: Contender, work: Path, wanted: Counts, put: Callable[[Job, int], Counter[str]]) -> Found:
    """What `put` counts under each launch of the contender for which a number is given."""
    found: Found = {}
    for launch, number in wanted.items():
        if number and launch in contender.launches:
            found[launch] = dict(put(Job(contender, work, launch), number))
        elif number:
            found[launch] = contender.cannot[launch]
    return found


def _killed(job: Job, count: int) -> Counter[str]:
    """Runs that end before they are hit do not count: others are started until so many were hit."""
    draw, found = random.Random(0), Counter[str]()
    seconds, number = job.unbroken[1], 0
    while sum(found[word] for word in JUDGED) < count:
        number += 1
        folder = job.work / f"killed-{job.launch}-{number}".replace(" ", "-")
        rank = "" if job.launch == ONE else f"@{draw.randrange(2)}"
        after = draw.uniform(0, seconds)
        code, _ = job.run(folder, f"SIGKILL@after:{after:.3f}{rank}")
        if code == 0:
            seconds = after  # from the rank's start to its end it is no longer than this
            shutil.rmtree(folder)
            continue
        found.update(lost_by_a_kill(folder))
        found.update(job.until_it_ends(folder))
    return +found


def lost_by_a_kill(folder: Path) -> Counter[str]:
    """What a killed run that saves each step has left, and not."""
    found = Counter[str]()
    found["had a checkpoint"] += newest_whole(folder) > 0
    found["left one that is torn"] += is_torn(folder)
    found["lost more than a step"] += steps_lost(folder) > 1
    return found


WRITES = (
    *("os:fsync", "os:makedirs", "os:chmod", "shutil:rmtree", "shutil:copyfile"),
    *("pathlib:Path.rename", "pathlib:Path.replace", "pathlib:Path.write_text"),
    *("torch:save", "transformers.modeling_utils:safe_save_file", "indictune.models.active_vocabulary:save_file"),
    *("transformers.configuration_utils:PreTrainedConfig.to_json_file",),
    *("transformers.tokenization_utils_base:PreTrainedTokenizerBase.save_pretrained",),
    *("transformers.trainer_callback:TrainerState.save_to_json", "pathlib:Path.mkdir"),
)


def writes(contender: Contender, counts: Counts, work: Path) -> Found:
    """2: SIGKILL just before every call that writes, or deletes, in a run of two steps that saves both and keeps one;
    of either of two ranks."""
    twice = replace(contender, command=(*contender.command, "--max_steps", "2", "--save_total_limit", "1"))
    found = _cut(Job(twice, work), "", counts["every write"])
    if FSDP2 in contender.launches and counts["every write of a rank"]:
        for rank in ("0", "1"):
            cases = _cut(Job(twice, work, FSDP2), f"@{rank}", counts["every write of a rank"])
            found |= {f"{write}, rank {rank} of {FSDP2}": counted for write, counted in cases.items()}
    elif counts["every write of a rank"]:
        found[FSDP2] = contender.cannot[FSDP2]
    return found


def _cut(job: Job, rank: str, every: int) -> Found:
    """By write; the rank as in an event of `tests/faults/faulty.py`."""
    found: Found = {}
    for write in WRITES:
        cases = Counter[str]()
        for call in range(1, 1000, every):
            folder = job.work / f"{write.replace(':', '-')}-{call}{rank}"
            code, _ = job.run(folder, f"SIGKILL@{write}:{call}{rank}")
            if code == 0:  # it has no more such calls
                shutil.rmtree(folder)
                break
            cases.update(lost_by_a_kill(folder))
            cases.update(job.until_it_ends(folder))
        if cases:
            found[write.partition(":")[2]] = dict(+cases)
    return found


def flipped(content: bytes) -> bytes:
    """With a bit changed at each eighth of its length: a single one may hit what is not used."""
    changed = bytearray(content)
    for eighth in range(1, 8):
        changed[len(content) * eighth // 8] ^= 64
    return bytes(changed)


def changed_by(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """What writes a file anew, with other content."""

    def write(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return write


def of_step(path: Path, step: int) -> Path:
    """The file that stands for a file of checkpoint-4 in another one of the run; DeepSpeed's names tell steps."""
    name = path.as_posix().replace("/checkpoint-4/", f"/checkpoint-{step}/")
    return Path(name.replace("/global_step4/", f"/global_step{step}/"))


def make_stale(path: Path) -> None:
    """The file is that of an older step, as it was then, with its size."""
    shutil.copy(of_step(path, 2), path)


def swap(path: Path) -> None:
    """The file and that of the checkpoint before it stand in each other's place: neither checkpoint is whole."""
    other, aside = of_step(path, 3), path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


CORRUPTIONS: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "empty": changed_by(lambda _: b""),
    "cut": changed_by(lambda content: content[: len(content) // 2]),
    "longer": changed_by(lambda content: content + b"0"),
    "zeros": changed_by(lambda content: bytes(len(content))),
    "reversed": changed_by(lambda content: content[::-1]),
    "bits flipped": changed_by(flipped),
    "stale": make_stale,
    "swapped": swap,
}
WRONG_WITH_A_FILE = re.compile(
    r"missing|instead of|not as it was written|cannot be read|holds step|[Nn]o such file|[Ii]nvalid|[Cc]orrupt|Error"
)


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
        corrupt(folder / "checkpoint-4" / name)
        newest = newest_whole(folder)
        code, said = job.run(folder)
        found["named the file"] += names_the_file(said, folder / "checkpoint-4" / name)
        found["took the unfinished run for whole"] += code == 0 and not ended(folder)
        found[job.judged(folder, code, said, newest)] += 1
        shutil.rmtree(folder)
    return +found


def names_the_file(said: str, path: Path) -> bool:
    """Whether a line that names a file says what is wrong with it. Of a manifest, which is then another checkpoint's,
    the checkpoint's name tells."""
    named = path.parent if path.name == store.MANIFEST else path
    return any(str(named) in line and WRONG_WITH_A_FILE.search(line) for line in said.splitlines())


def _cases(checkpoint: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.stat().st_size:
            for how, corrupt in CORRUPTIONS.items():
                before = {"stale": of_step(path, 2), "swapped": of_step(path, 3)}.get(how)
                if before is None or before.read_bytes() != path.read_bytes():
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
    found: Found = {case: _stopped(job, each) for case, each in events.items()}
    on_two = Job(contender, work, DDP, "long")
    places = ("in a step", "in saving", "in evaluation", "in data preparation", "after a step")
    for place in places[: counts["places to stop one rank"]]:
        calls = range(1, STEPS, counts["every stop of one rank"]) if place == "in a step" else range(1, 2)
        rank = 0 if place == "in data preparation" else 1  # ours prepares on rank 0 alone
        each = [f"{contender.places[place]}:{call}@{rank}" for call in calls]
        found[f"to one of two ranks, {place}"] = _stopped(on_two, each)
    return found


def _stopped(job: Job, places: list[str]) -> Found:
    """What becomes of runs that are stopped, and how long the longest took from the signal to the end of all.

    Raises:
        RuntimeError: a run failed before it was to be stopped.
    """
    found, most = Counter[str](), 0.0
    for number, place in enumerate(places):
        folder, signalled = job.work / f"stopped-{number}", job.work / f"signalled-{number}"
        # Rows that were prepared before would not be prepared again.
        variables = {"INDICTUNE_CACHE": str(folder / "cache"), SIGNALLED: str(signalled)}
        code, said = job.run(folder, f"SIGTERM@{place}", timeout_s=int(job.unbroken[1]) + HUNG_S, **variables)
        seconds = seconds_since(signalled)
        if seconds is None and code != 0:
            raise RuntimeError(f"the run failed before its signal: {said[-2000:]}")
        found["hung"] += code is None
        if seconds is None or ended(folder):
            found["ended before it" if seconds is None else "ended all the same"] += 1
            shutil.rmtree(folder)
            continue
        found[f"within {GRACE_S} s"] += seconds <= GRACE_S
        most = max(most, seconds)
        found["told"] += tells_of_going_on(folder, code, job.launch == ONE)
        if job.launch != ONE:
            found["one whole checkpoint of the step that is told"] += saved_what_is_told(folder)
        found.update(job.until_it_ends(folder))
    return {**+found, "seconds at most": round(most, 1)}


def seconds_since(signalled: Path) -> float | None:
    """Those since the signal of which `tests/faults/faulty.py` has noted the time in a file, which goes; None where it
    has not been sent."""
    if not signalled.exists():
        return None
    then = float(signalled.read_text(encoding="ascii"))
    signalled.unlink()
    return time.monotonic() - then


def saved_what_is_told(folder: Path) -> bool:
    """Whether the newest checkpoint is whole, and that of the step after which all ranks have stopped."""
    found = store.listed(folder)[:1]
    return any(
        not store.damage(each) and f"after step {store.step_of(each)}," in status_of(folder)[1] for each in found
    )


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
    once = Job(replace(contender, command=(*contender.command, "--max_steps", "3")), work / "refused")
    for error in ("EROFS", "EACCES"):
        for write in WRITES[:: counts["every kind of write"]]:
            refused = _refused(once, error, write, counts["every refused write"])
            if refused:
                found[f"{error} from a {write.partition(':')[2]} on"] = dict(refused)
    return found


def _refused(job: Job, error: str, write: str, every: int) -> Counter[str]:
    """A run that goes on from its second step, and saves the third, cannot write from one of its calls on."""
    refused = Counter[str]()
    for call in range(1, 1000, every):
        folder = job.stopped_at(2, job.work / f"{error}-{write.replace(':', '-')}-{call}")
        hit = job.work / "hit"
        hit.unlink(missing_ok=True)
        code, said = job.run(folder, f"{error}@{write}:{call}", SIGNALLED=str(hit))
        if not hit.exists():  # it has no more such calls
            shutil.rmtree(folder)
            break
        if code == 0:
            refused[f"ended all the same, {job.judged(folder, code, said, 0)}"] += 1
        else:
            refused.update(_not_written(job, folder, code, said))
    return +refused


def _not_written(job: Job, folder: Path, code: int | None, said: str) -> Counter[str]:
    """What a run has told and left, and how it ends when it can write again."""
    found = Counter[str]()
    found["told by the exit code"] += code != 0
    found.update(told_of_the_disk(said, folder))
    found["a partial checkpoint left"] += is_torn(folder) or bool(list((folder / UNFINISHED).glob("*")))
    found.update(job.until_it_ends(folder))
    return found


def told_of_the_disk(said: str, folder: Path) -> Counter[str]:
    """What the lines tell that have both a path of the run and what is wrong with it."""
    told = [line for line in said.splitlines() if str(folder) in line and WRONG_WITH_A_DISK.search(line)]
    found = Counter({"named the path and the error": int(bool(told))})
    found["told the bytes needed"] += any(BYTES_NEEDED.search(line) for line in told)
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

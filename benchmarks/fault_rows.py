"""Rows 1 to 3 of the fault scoreboard: SIGKILL at random times, SIGKILL at a write, and corrupted files."""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.fault_contenders import DDP, FSDP2, ONE, ZERO3, Contender
from benchmarks.fault_runs import VERDICTS, Counts, Found, Job, ended, is_torn, newest_whole, steps_lost
from indictune.checkpoint import store

WRITES = (
    *("os:fsync", "os:makedirs", "os:chmod", "shutil:rmtree", "shutil:copyfile"),
    *("pathlib:Path.rename", "pathlib:Path.replace", "pathlib:Path.write_text"),
    *("torch:save", "transformers.modeling_utils:safe_save_file", "indictune.models.active_vocabulary:save_file"),
    *("transformers.configuration_utils:PreTrainedConfig.to_json_file",),
    *("transformers.tokenization_utils_base:PreTrainedTokenizerBase.save_pretrained",),
    *("transformers.trainer_callback:TrainerState.save_to_json", "pathlib:Path.mkdir"),
)
PROBLEM_WITH_A_FILE = re.compile(
    r"missing|instead of|not as it was written|cannot be read|holds step|[Dd]amaged|[Nn]o such file|[Ii]nvalid"
    r"|[Cc]orrupt|Error"
)


def kills(contender: Contender, counts: Counts, work: Path) -> Found:
    """Row 1: SIGKILL at random times; of one rank if there are two."""
    wanted = {ONE: counts["kills"], DDP: counts["kills of two ranks"], ZERO3: counts["kills of ZeRO-3"]}
    return _under_each(contender, work, wanted, _killed)


def _under_each(contender: Contender, work: Path, wanted: Counts, count: Callable[[Job, int], Counter[str]]) -> Found:
    """Outcomes under each launch that has a number in `wanted`."""
    found: Found = {}
    for launch, number in wanted.items():
        if number and launch in contender.launches:
            found[launch] = dict(count(Job(contender, work, launch), number))
        elif number:
            found[launch] = contender.unsupported[launch]
    return found


def _killed(job: Job, wanted: int) -> Counter[str]:
    """Kill runs until so many were hit; a run that ends first does not count."""
    draw, found = random.Random(0), Counter[str]()
    seconds, number = job.unbroken[1], 0
    while sum(found[verdict] for verdict in VERDICTS) < wanted:
        number += 1
        folder = job.work / f"killed-{job.launch}-{number}".replace(" ", "-")
        rank = "" if job.launch == ONE else f"@{draw.randrange(2)}"
        after = draw.uniform(0, seconds)
        code, _ = job.run(folder, f"SIGKILL@after:{after:.3f}{rank}")
        if code == 0:
            seconds = after  # an upper bound of a run's time
            shutil.rmtree(folder)
            continue
        found.update(losses_by_a_kill(folder))
        found.update(job.restart_until_it_ends(folder))
    return +found


def losses_by_a_kill(folder: Path) -> Counter[str]:
    """What a killed run left that saves each step."""
    found = Counter[str]()
    found["had a checkpoint"] += newest_whole(folder) > 0
    found["left a torn checkpoint"] += is_torn(folder)
    found["lost more than a step"] += steps_lost(folder) > 1
    return found


def writes(contender: Contender, counts: Counts, work: Path) -> Found:
    """Row 2: SIGKILL just before each call that writes or deletes, in a run that saves twice and keeps one."""
    twice = replace(contender, command=(*contender.command, "--max_steps", "2", "--save_total_limit", "1"))
    found = _killed_at_writes(Job(twice, work), "", counts["every write"])
    if FSDP2 in contender.launches and counts["every write of a rank"]:
        for rank in ("0", "1"):
            cases = _killed_at_writes(Job(twice, work, FSDP2), f"@{rank}", counts["every write of a rank"])
            found |= {f"{write}, rank {rank} of {FSDP2}": outcomes for write, outcomes in cases.items()}
    elif counts["every write of a rank"]:
        found[FSDP2] = contender.unsupported[FSDP2]
    return found


def _killed_at_writes(job: Job, rank: str, every: int) -> Found:
    """Outcomes by function; `rank` is the suffix of an event of `tests/faults/faulty.py`."""
    found: Found = {}
    for write in WRITES:
        cases = Counter[str]()
        for call in range(1, 1000, every):
            folder = job.work / f"{write.replace(':', '-')}-{call}{rank}"
            code, _ = job.run(folder, f"SIGKILL@{write}:{call}{rank}")
            if code == 0:  # no such call is left
                shutil.rmtree(folder)
                break
            cases.update(losses_by_a_kill(folder))
            cases.update(job.restart_until_it_ends(folder))
        if cases:
            found[write.partition(":")[2]] = dict(+cases)
    return found


def flip_bits(content: bytes) -> bytes:
    """Flip a bit at each eighth of the length; a single bit may hit unused bytes."""
    changed = bytearray(content)
    for eighth in range(1, 8):
        changed[len(content) * eighth // 8] ^= 64
    return bytes(changed)


def _rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        path.write_bytes(change(path.read_bytes()))

    return rewrite


def same_file_of_step(path: Path, step: int) -> Path:
    """The file of another checkpoint that matches a file of checkpoint-4; DeepSpeed's names contain the step."""
    name = path.as_posix().replace("/checkpoint-4/", f"/checkpoint-{step}/")
    return Path(name.replace("/global_step4/", f"/global_step{step}/"))


def make_stale(path: Path) -> None:
    """Replace the file by that of an older step."""
    shutil.copy(same_file_of_step(path, 2), path)


def swap(path: Path) -> None:
    """Exchange the file with that of the previous checkpoint; both checkpoints are damaged then."""
    other, aside = same_file_of_step(path, 3), path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


CORRUPTIONS: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "empty": _rewrite(lambda _: b""),
    "cut": _rewrite(lambda content: content[: len(content) // 2]),
    "longer": _rewrite(lambda content: content + b"0"),
    "zeros": _rewrite(lambda content: bytes(len(content))),
    "reversed": _rewrite(lambda content: content[::-1]),
    "bits flipped": _rewrite(flip_bits),
    "stale": make_stale,
    "swapped": swap,
}


def corruptions(contender: Contender, counts: Counts, work: Path) -> Found:
    """Row 3: each file of the newest checkpoint, corrupted in each way."""
    strides = {
        ONE: counts["every corruption"],
        FSDP2: counts["every corruption of a shard"],
        ZERO3: counts["every corruption of ZeRO's shard"],
    }
    return _under_each(contender, work, strides, _corrupted)


def _corrupted(job: Job, every: int) -> Counter[str]:
    found = Counter[str]()
    for name, way in list(corruption_cases(job.unbroken[0] / "checkpoint-4"))[::every]:
        folder = job.stopped_at(4, job.work / "corrupted")
        CORRUPTIONS[way](folder / "checkpoint-4" / name)
        newest = newest_whole(folder)
        code, output = job.run(folder)
        found["named the file"] += names_the_file(output, folder / "checkpoint-4" / name)
        found["took the unfinished run for whole"] += code == 0 and not ended(folder)
        found[job.verdict(folder, code, output, newest)] += 1
        shutil.rmtree(folder)
    return +found


def names_the_file(output: str, path: Path) -> bool:
    """Whether a line names a file and its problem; of a manifest, the checkpoint's name is enough."""
    named = path.parent if path.name == store.MANIFEST else path
    return any(str(named) in line and PROBLEM_WITH_A_FILE.search(line) for line in output.splitlines())


def corruption_cases(checkpoint: Path) -> Iterator[tuple[str, str]]:
    """Each file of checkpoint-4 with each corruption that changes it: path in the checkpoint, and way."""
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.stat().st_size:
            for way in CORRUPTIONS:
                before = {"stale": same_file_of_step(path, 2), "swapped": same_file_of_step(path, 3)}.get(way)
                if before is None or before.read_bytes() != path.read_bytes():
                    yield path.relative_to(checkpoint).as_posix(), way

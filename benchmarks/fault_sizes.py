"""Row 13 of the fault scoreboard: a run of millions of rows, how soon it resumes, and its memory."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.fault_contenders import GLOBAL_BATCH, Contender
from benchmarks.fault_runs import Counts, Found, Job, resumed_from
from benchmarks.preparation import LABELS, words
from indictune.checkpoint import store

TIMEOUT_S = 600
TRIES = 2  # of each start
SAVED = 2  # steps of the run that is stopped
GROWING = "tests/faults/growing.py"
MOST_BYTES = 1_000_000_000  # that any process of a run of millions of rows may hold


def many_rows(contender: Contender, counts: Counts, work: Path) -> Found:
    """Row 13: resume at the start, in the middle and at the end of an epoch of many rows."""
    number, steps = counts["many rows"], counts["steps of many rows"]
    rows = work / "many.jsonl"
    write_rows(rows, number)
    command = tuple(str(rows) if word.endswith("train.jsonl") else word for word in contender.command)
    many = replace(contender, command=command)
    job = Job(many, work, kind="many rows")
    return {f"{number:,} rows": {**_starts(job, number), **(_memory(many, work, steps) if steps else {})}}


def write_rows(path: Path, number: int) -> None:
    """Write random tweets of 5 to 30 words as JSON lines."""
    draw, known = random.Random(0), words()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(number):
            text = " ".join(draw.choices(known, k=draw.randint(5, 30)))
            file.write(json.dumps({"text": text, "label": draw.choice(LABELS)}, ensure_ascii=False) + "\n")


def _starts(job: Job, number: int) -> Found:
    """Seconds until the first step of a resumed run, beyond those of a new one; both find prepared rows."""
    stopped = job.work / "stopped"
    _seconds_until_step(job, stopped, SAVED + 1)  # it prepares the rows
    assert store.path_of(stopped, SAVED).exists(), "The run of many rows saved no checkpoint."
    fresh = [_seconds_until_step(job, job.work / f"fresh-{number}", 1) for number in range(TRIES)]
    found: Found = {"tries, of which the slowest counts": TRIES, "seconds until the first step": round(min(fresh), 1)}
    last = number // GLOBAL_BATCH - 1
    for place, step in {"start": SAVED, "middle": last // 2, "end": last - 1}.items():
        seconds = []
        for _ in range(TRIES):
            folder = Path(shutil.copytree(stopped, job.work / "resumed"))
            renumber_step(store.path_of(folder, SAVED), step)
            seconds.append(_seconds_until_step(job, folder, 1, step))
            shutil.rmtree(folder)
        found[f"seconds more at the {place}"] = round(slowest_delay(seconds, fresh), 1)
    return found


def slowest_delay(resumed: Sequence[float], fresh: Sequence[float]) -> float:
    """Seconds from the quickest new start to the slowest resumed one."""
    return max(resumed) - min(fresh)


def _seconds_until_step(job: Job, folder: Path, steps: int, resumed_at: int = 0) -> float:
    """Seconds until a run has done so many steps and is killed; it must resume at `resumed_at`."""
    since = time.monotonic()
    event = f"SIGKILL@{job.contender.places['after a step']}:{steps}"
    code, output = job.run(folder, event, timeout_s=TIMEOUT_S, INDICTUNE_CACHE=str(job.work / "cache"))
    if code in (0, None, 1, 2):
        raise RuntimeError(f"The run of many rows was not killed: {output[-2000:]}")
    if resumed_from(output, folder) != resumed_at:
        raise RuntimeError(f"The run of many rows did not resume from step {resumed_at}: {output[-2000:]}")
    return time.monotonic() - since


def renumber_step(checkpoint: Path, step: int) -> None:
    """Make a checkpoint that of another step, so that no epoch must be trained to measure a late resume."""
    moved = checkpoint.rename(store.path_of(checkpoint.parent, step))
    path = moved / "trainer_state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**state, "global_step": step}, indent=2), encoding="utf-8")
    manifest = store.read_manifest(moved)
    if manifest is not None:
        files = {**manifest.files, path.name: store.file_digest(path)}
        at_step = replace(manifest, step=step, rows_of_epoch=step * GLOBAL_BATCH, files=files)
        (moved / store.MANIFEST).write_text(at_step.to_json(), encoding="utf-8")


def _memory(many: Contender, work: Path, steps: int) -> Found:
    """Memory of a whole run: peaks of the main process, of a child, and of all; and growth after 1,000 steps."""
    rows = work / "anew.jsonl"  # a new name, so that the stock Trainer prepares it again
    (work / "many.jsonl").rename(rows)
    command = tuple(str(rows) if word.endswith("many.jsonl") else word for word in many.command)
    job = Job(replace(many, command=(GROWING, *command)), work, kind="many rows")
    notes = work / "memory"
    variables = {"MEMORY": str(notes), "INDICTUNE_CACHE": str(work / "cache-anew")}
    flags = ("--max_steps", str(steps), "--save_steps", "500", "--logging_steps", "10")
    code, output = job.run(work / "growing", None, *flags, timeout_s=2 * TIMEOUT_S, **variables)
    if code != 0:
        raise RuntimeError(f"The run of many steps failed: {output[-2000:]}")
    *lines, end = map(json.loads, notes.read_text(encoding="utf-8").splitlines())
    own = {line["step"]: line["own"] for line in lines}
    last = max(own)
    return {
        **memory_verdict(end),
        "peak bytes": end["peak"],
        "peak bytes of a child": end["child"],
        "peak bytes of all at one moment": end["tree"],
        "bytes of the rows": rows.stat().st_size,
        "bytes more in a thousand steps": (own[last] - own[1000]) * 1000 // (last - 1000),
    }


def memory_verdict(end: Mapping[str, int]) -> Found:
    """Whether each process stayed within `MOST_BYTES`; `end` is the last note of `growing.py`."""
    return {"at most 1 GB in its largest process": max(end["peak"], end["child"]) <= MOST_BYTES}

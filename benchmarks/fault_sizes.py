"""The row of the scoreboard that is a run of very many rows: how soon it goes on, and how much memory it holds."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.fault_rows import Counts, Found
from benchmarks.fault_runs import GLOBAL_BATCH, Contender, Job, gone_on_from
from benchmarks.preparation import LABELS, words
from indictune.checkpoint import store

TIMEOUT_S = 600
TIMES = 2  # each start is tried
SAVED = 2  # steps of the run that is stopped
GROWING = "tests/faults/growing.py"
BYTES_OF_A_PROCESS = 1_000_000_000  # the most that a run of millions of rows may hold in any


def many_rows(contender: Contender, counts: Counts, work: Path) -> Found:
    """13: a run of many rows is stopped, and goes on at the start, in the middle and at the end of its epoch."""
    number, steps = counts["many rows"], counts["steps of many rows"]
    rows = work / "many.jsonl"
    write_rows(rows, number)
    command = tuple(str(rows) if word.endswith("train.jsonl") else word for word in contender.command)
    many = replace(contender, command=command)
    job = Job(many, work, kind="many rows")
    return {f"{number:,} rows": {**_starts(job, number), **(_memory(many, work, steps) if steps else {})}}


def write_rows(path: Path, number: int) -> None:
    """Json lines of random tweets of 5 to 30 words."""
    draw, known = random.Random(0), words()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(number):
            text = " ".join(draw.choices(known, k=draw.randint(5, 30)))
            file.write(json.dumps({"text": text, "label": draw.choice(LABELS)}, ensure_ascii=False) + "\n")


def _starts(job: Job, number: int) -> Found:
    """Seconds until the first step of a run that goes on, over those of one that starts (`most_later`); both find
    prepared rows."""
    stopped = job.work / "stopped"
    _until_step(job, stopped, SAVED + 1)  # it prepares the rows
    assert store.path_of(stopped, SAVED).exists(), "the run of many rows has not saved"
    fresh = [_until_step(job, job.work / f"fresh-{time_}", 1) for time_ in range(TIMES)]
    found: Found = {"tries of which the slowest counts": TIMES, "seconds until the first step": round(min(fresh), 1)}
    last = number // GLOBAL_BATCH - 1
    for place, step in {"start": SAVED, "middle": last // 2, "end": last - 1}.items():
        seconds = []
        for _ in range(TIMES):
            folder = Path(shutil.copytree(stopped, job.work / "gone-on"))
            say_step(store.path_of(folder, SAVED), step)
            seconds.append(_until_step(job, folder, 1, step))
            shutil.rmtree(folder)
        found[f"more at the {place}"] = round(most_later(seconds, fresh), 1)
    return found


def most_later(gone_on: Sequence[float], fresh: Sequence[float]) -> float:
    """By how many seconds the slowest of some runs that go on is behind the quickest that starts."""
    return max(gone_on) - min(fresh)


def _until_step(job: Job, folder: Path, steps: int, since: int = 0) -> float:
    """Seconds until a run has done so many steps, since that of the checkpoint in its folder, and is killed."""
    began = time.monotonic()
    event = f"SIGKILL@{job.contender.places['after a step']}:{steps}"
    code, said = job.run(folder, event, timeout_s=TIMEOUT_S, INDICTUNE_CACHE=str(job.work / "cache"))
    if code in (0, None, 1, 2):
        raise RuntimeError(f"the run of many rows was not killed: {said[-2000:]}")
    if gone_on_from(said, folder) != since:
        raise RuntimeError(f"the run of many rows did not go on from step {since}: {said[-2000:]}")
    return time.monotonic() - began


def say_step(checkpoint: Path, step: int) -> None:
    """Let a checkpoint be one of another step: nobody trains for hours to measure a second."""
    moved = checkpoint.rename(store.path_of(checkpoint.parent, step))
    path = moved / "trainer_state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**state, "global_step": step}, indent=2), encoding="utf-8")
    manifest = store.read_manifest(moved)
    if manifest is not None:
        files = {**manifest.files, path.name: store.digest(path)}
        at_step = replace(manifest, step=step, rows_of_epoch=step * GLOBAL_BATCH, files=files)
        (moved / store.MANIFEST).write_text(at_step.to_json(), encoding="utf-8")


def _memory(many: Contender, work: Path, steps: int) -> Found:
    """What a run of so many steps holds that prepares its rows first, and in the end saves and reads its model back:
    the peak of its own process, of any other that it starts, and of all at one moment; and the growth of its own after
    the first thousand steps, while it saves every five hundredth."""
    rows = work / "anew.jsonl"  # the stock Trainer's tokens stand beside them
    (work / "many.jsonl").rename(rows)
    command = tuple(str(rows) if word.endswith("many.jsonl") else word for word in many.command)
    job = Job(replace(many, command=(GROWING, *command)), work, kind="many rows")
    notes = work / "memory"
    variables = {"MEMORY": str(notes), "INDICTUNE_CACHE": str(work / "cache-anew")}
    flags = ("--max_steps", str(steps), "--save_steps", "500", "--logging_steps", "10")
    code, said = job.run(work / "growing", None, *flags, timeout_s=2 * TIMEOUT_S, **variables)
    if code != 0:
        raise RuntimeError(f"the run of many steps failed: {said[-2000:]}")
    *lines, end = map(json.loads, notes.read_text(encoding="utf-8").splitlines())
    own = {line["step"]: line["own"] for line in lines}
    last = max(own)
    growth = (own[last] - own[1000]) * 1000 // (last - 1000)
    return {
        **judged(end),
        "peak bytes": end["peak"],
        "peak bytes of a child": end["child"],
        "peak bytes of all at one moment": end["tree"],
        "bytes of the rows": rows.stat().st_size,
        "bytes more in a thousand steps": growth,
    }


def judged(end: Mapping[str, int]) -> Found:
    """Whether no process of a run has held more than is promised.

    Args:
        end: the last note of `growing.py`.
    """
    return {"at most 1 GB in its largest process": max(end["peak"], end["child"]) <= BYTES_OF_A_PROCESS}

"""What profiled steps were spent on, by rank: traces, a table and `profile.json`."""

from __future__ import annotations

import gzip
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.profiler import profile

from indictune.console_text import table
from indictune.distributed import collectives
from indictune.distributed.trace_times import RankTimes, Slowest, rank_times, slowest
from indictune.files import write_json
from indictune.progress import OWN_PROGRESS
from indictune.run import Run

logger = logging.getLogger(__name__)

FOLDER = "profile"
_HEADER = ["rank", "ms a step", "compute", "communication", "overlapped", "exposed", "host gaps"]


def report(profiler: profile, run: Run, last_step: int) -> None:
    """Write this rank's trace; on rank 0 also show and write the times of all ranks. All ranks must call it.

    Args:
        profiler: has recorded steps.
        run: of this process.
        last_step: that was profiled.
    """
    OWN_PROGRESS.passed("writing the profile")
    folder = run.output_dir / FOLDER
    try:
        times = rank_times(run.rank, _write_trace(profiler, folder / f"rank-{run.rank}.json.gz"))
    except (OSError, ValueError) as error:  # torch (2.13) writes a cut-off trace to a full disk
        run.warn([f"The profile of rank {run.rank} cannot be written: {error}. The run continues."])
        times = None
    known = [each for each in collectives.gather_from_all(times) if each is not None]
    if run.rank == 0 and known:
        first_step, worst = last_step - known[0].steps + 1, slowest(known)
        run.show(f"\n{_text(known, first_step, worst)}\ntraces and profile.json: {folder}\n")
        content = {"first_step": first_step, "last_step": last_step, "ranks": [_entry(each) for each in known]}
        write_json(folder / "profile.json", content | {"slowest": worst and asdict(worst)})


def _write_trace(profiler: profile, path: Path) -> list[dict[str, Any]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def _entry(times: RankTimes) -> dict[str, Any]:
    return asdict(times) | {"exposed_s": times.exposed_s, "own_s": times.own_s}


def _text(known: list[RankTimes], first_step: int, worst: Slowest | None) -> str:
    lines = []
    for each in known:
        times = (each.step_s, each.compute_s, each.communication_s, each.overlapped_s, each.exposed_s)
        lines.append([str(each.rank), *(f"{1000 * time:.1f}" for time in (*times, sum(each.gaps_s.values())))])
    steps = f"profile of steps {first_step} to {first_step + known[0].steps - 1}"
    return "\n".join([steps, table(_HEADER, lines), *([] if worst is None else [_sentence(worst)])])


def _sentence(worst: Slowest) -> str:
    """Names the slowest rank, and what it spends more time on than the others; small differences are left out."""
    least = (worst.own_s - worst.others_s) / 10
    more = [f"{1000 * time:.1f} ms more in {part}" for part, time in worst.more_s.items() if time > least]
    return (
        f"slowest: rank {worst.rank}, {1000 * worst.own_s:.1f} ms a step without exposed communication; the others "
        f"{1000 * worst.others_s:.1f} ms\nof these, {', '.join(more)}"
    )

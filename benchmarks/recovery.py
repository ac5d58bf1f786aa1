"""What a lost node costs: the time until the run trains again, and the steps that are done anew.

    OMP_NUM_THREADS=1 python -m benchmarks.recovery --kills 20

Two torchrun agents on this machine train a tiny BERT, each as a node with its own memory. Again and again one of them
is killed with its processes, its memory is lost, and a new agent takes its place. The steps between two kills are
drawn from 1 to `--save_steps`. It runs without snapshots, and with them. A step lasts `PACE_S` longer than it needs.
At last, two processes train without a pause, for what a snapshot costs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import environment, write_results
from indictune.console_text import table
from tests.ranks.agents import OWN_MEMORY, SHORT_WAITS, Agents
from tests.ranks.conftest import write_job
from tests.ranks.launching import SCRIPT, accelerate, train

PACE_S = 0.2
SAVE_STEPS = 20
SNAPSHOT_STEPS = 2
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True)
class Trained:
    """A step that a process began.

    Attributes:
        process: when it was started, in seconds since 1970.
        step: that it trained.
    """

    process: float
    step: int


class Steps:
    """Reads which steps the processes of a run train, from the file that `paced.py` writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> list[Trained]:
        """In the order in which they began."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return [Trained(*json.loads(line)[:2]) for line in lines if line.endswith("]")]

    def wait(self, since: float, processes: int, steps: int) -> list[Trained]:
        """The steps of processes started after a moment, once so many of them have trained so many."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            found = [each for each in self.all() if each.process > since]
            done = Counter(each.process for each in set(found))
            if sum(count >= steps for count in done.values()) >= processes:
                return found
            time.sleep(_LOOK_EVERY_S)
        raise TimeoutError(f"the run does not train: {self.path.parent}")


def measure(folder: Path, kills: int, snapshot_steps: int) -> list[dict[str, float]]:
    """Seconds until a step begins again, and steps done anew, of each kill."""
    folder.mkdir()
    job, steps, draw = write_job(folder), Steps(folder / "rows.jsonl"), random.Random(0)
    flags = ["--config", str(job), "--output_dir", str(folder / "out"), "--max_steps", "100000", "--allow_cpu", "true"]
    flags += ["--save_steps", str(SAVE_STEPS), "--snapshot_steps", str(snapshot_steps)]
    command = ["tests/ranks/paced.py", str(PACE_S), str(steps.path), SCRIPT, *flags]
    options = ["--max-restarts", "1000"]
    agents = Agents(folder / "out", command, nodes="1:2", options=options, before=OWN_MEMORY)
    found: list[dict[str, float]] = []
    try:
        agents.start("node-0", "node-1")
        since = 0.0
        for number in range(kills):
            steps.wait(since, processes=2, steps=draw.randint(1, SAVE_STEPS))
            victim = next(iter(agents.running)) if number % 2 else [*agents.running][-1]
            since, began = time.time(), time.monotonic()
            agents.kill(victim)
            reached = max(each.step for each in steps.all())
            agents.start(f"node-{number + 2}")
            first = min(each.step for each in steps.wait(since, processes=1, steps=1))
            found.append({"seconds": time.monotonic() - began, "steps_lost": reached - first + 1})
            print(f"kill {number + 1} of {kills}: {found[-1]}", flush=True)
    finally:
        agents.close()
    return found


def cost(folder: Path) -> dict[str, float]:
    """Seconds of a snapshot and of a step on two processes, and the snapshots' share of the runtime."""
    folder.mkdir()
    flags = ["--config", str(write_job(folder)), "--max_steps", "60", "--save_steps", "60"]
    run = train(accelerate("ddp", 2), folder / "out", *flags, "--snapshot_steps", str(SNAPSHOT_STEPS))
    measured = run.metrics["train"]
    snapshot, share = measured["snapshots"]["median_s"], measured["snapshots"]["share_of_runtime"]
    return {"snapshot_s": snapshot, "step_s": measured["runtime_s"] * (1 - share) / 60, "share_of_runtime": share}


def summary(kills: list[dict[str, float]]) -> dict[str, Any]:
    """Median and worst, and each kill."""
    worst = {name: max(each[name] for each in kills) for name in kills[0]}
    median = {name: statistics.median(each[name] for each in kills) for name in kills[0]}
    return {"median": median, "worst": worst, "kills": kills}


def main() -> None:
    """Measure, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="for the result file; default: benchmarks/results")
    options = parser.parse_args()
    settings = {"save_steps": SAVE_STEPS, "snapshot_steps": SNAPSHOT_STEPS, "pace_s": PACE_S, "waits": SHORT_WAITS}
    results: dict[str, Any] = {"environment": environment(), "settings": settings}
    with tempfile.TemporaryDirectory() as folder:
        for name, every in (("without snapshots", 0), ("with snapshots", SNAPSHOT_STEPS)):
            results[name] = summary(measure(Path(folder) / name.split()[0], options.kills, every))
        results["cost"] = cost(Path(folder) / "cost")
    body = []
    for name in ("without snapshots", "with snapshots"):
        seconds, lost = (
            [results[name][which][of] for which in ("median", "worst")] for of in ("seconds", "steps_lost")
        )
        body.append([name, *(f"{each:.1f}" for each in seconds), *(f"{each:g}" for each in lost)])
    print(table(["", "median s", "worst s", "median steps lost", "worst steps lost"], body))
    snapshot_s, step_s, share = results["cost"].values()
    print(f"a snapshot: {1000 * snapshot_s:.0f} ms, {snapshot_s / step_s:.0%} of a step, {share:.1%} of the runtime")
    where = {} if options.folder is None else {"folder": options.folder}
    print(f"written to {write_results('recovery', results, **where)}")


if __name__ == "__main__":
    main()

"""What `--divergence_check_steps` costs: seconds of a comparison of the ranks, next to those of a step.

    OMP_NUM_THREADS=1 python -m benchmarks.divergence [--steps 40]

Two processes train the demo recipes and compare their copies after every step. They wait for each other before each
comparison, so that its time is its own. The share is that of a run with `--divergence_check_steps 100`.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.environment import environment, write_results
from indictune.console_text import table
from indictune.distributed.collectives import barrier
from indictune.training.callbacks import every_step
from tests.ranks.launching import SCRIPT, accelerate, start

EVERY = 100
TIMES = "DIVERGENCE_TIMES"  # a variable: the file that rank 0 writes
LLAMA = "scripts/train_llama.py"
RUNS = [(SCRIPT, "sentiment", each) for each in ("ddp", "tp", "pipeline", "fsdp2", "zero2")] + [
    (LLAMA, "llama", "ddp")
]
FLAGS = (
    *("--divergence_check_steps", "1", "--eval_strategy", "no", "--save_strategy", "no", "--bf16", "false"),
    *("--load_best_model_at_end", "false", "--logging_steps", "1000"),
)


def timed_run() -> None:
    """Run a script on this rank, and note when each comparison began and ended."""
    times = list[tuple[float, float]]()
    check = vars(every_step)["check_copies"]

    def timed(*args: Any) -> None:
        barrier()
        began = time.perf_counter()
        check(*args)
        times.append((began, time.perf_counter()))
        if os.environ["RANK"] == "0":
            Path(os.environ[TIMES]).write_text(json.dumps(times), encoding="utf-8")

    vars(every_step)["check_copies"] = timed
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def measured(script: str, recipe: str, strategy: str, steps: int) -> dict[str, float]:
    """Median seconds of a step and of a comparison, and its share of a run that compares every `EVERY` steps."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder, "times.json")
        job = ["--config", f"recipes/{recipe}/demo.yaml", "--max_steps", str(steps), "--output_dir", f"{folder}/run"]
        done = start([*accelerate(strategy, 2), __file__, script, *job, *FLAGS], {TIMES: str(times)})
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        found = json.loads(times.read_text(encoding="utf-8"))
    step = statistics.median(after[0] - before[1] for before, after in pairwise(found))
    check = statistics.median(end - began for began, end in found[1:])
    return {"step_s": step, "check_s": check, "share": check / (EVERY * step + check)}


def main() -> None:
    """Measure all runs, print a table, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    steps, about = parser.parse_args().steps, environment()
    found = {f"{recipe} {strategy}": measured(script, recipe, strategy, steps) for script, recipe, strategy in RUNS}
    body = [
        [name, f"{each['step_s'] * 1e3:.1f}", f"{each['check_s'] * 1e3:.2f}", f"{each['share']:.3%}"]
        for name, each in found.items()
    ]
    print(table(["run", "ms a step", "ms a check", f"share at every {EVERY} steps"], body))
    print(f"written to {write_results('divergence', {'environment': about, 'steps': steps, 'runs': found})}")


if __name__ == "__main__":
    timed_run() if "RANK" in os.environ else main()

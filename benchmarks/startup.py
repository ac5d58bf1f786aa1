"""Seconds until something happens: imports, help, a mistake, a plan, a second `prepare`, a second run's first step.

    python -m benchmarks.startup [CHECKOUT] [--laps 3] [--rows 100000]

Each command runs in fresh processes, in turns; the table has medians of the whole process. The second `prepare` and
the run find prepared rows; the run counts from its start to the end of its first optimizer step, and so does a bare
`Trainer` with the same model and prepared rows (`benchmarks/bare_trainer.py`). The plans are of 70 billion parameters
on 32 GPUs. CHECKOUT is an earlier version of the repository, in which help, mistakes and the run are timed too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.axes_jobs import LARGE
from benchmarks.bare_trainer import BATCH_SIZE, FIRST_STEP
from benchmarks.environment import environment, write_results
from benchmarks.preparation import write_rows
from indictune.cli import EXIT_REFUSED
from indictune.console_text import table
from indictune.models.builtin import resolve

ROOT = Path(__file__).resolve().parents[1]
RUN = "a second run, to its first step"
BARE = "a bare Trainer, to its first step"

COMMANDS = {
    "python": ["-c", "pass"],
    "import indictune": ["-c", "import indictune"],
    "indictune --help": ["-m", "indictune", "--help"],
    "import torch": ["-c", "import torch"],
    "import transformers' arguments and LLaMA": ["-c", "from transformers import LlamaForCausalLM, TrainingArguments"],
    "imports of a run": ["-c", "import scripts.train_sentiment"],
    "imports of a plan": ["-c", "import indictune.commands.plan"],
}
# A typing error and a wrong value end with code 2.
TYPED = {
    "scripts/train_sentiment.py --help": ["scripts/train_sentiment.py", "--help"],
    "a typing error, to the script": ["scripts/train_sentiment.py", "--lerning_rate", "1"],
    "a typing error, to a verb": ["-m", "indictune", "evaluate", "--modle", "outputs"],
    "no number, to the script": ["scripts/train_sentiment.py", "--learning_rate", "abc"],
    "a missing file, to the script": ["scripts/train_sentiment.py", "--train_file", "missing.csv"],
    "a missing file, to train": ["-m", "indictune", "train", "sentiment", "--train_file", "missing.csv"],
    "no name of a model, to train": ["-m", "indictune", "train", "sentiment", "--model_name_or_path", "a//b"],
    "a missing folder, to predict": ["-m", "indictune", "predict", "missing"],
    "a missing folder, to serve": ["-m", "indictune", "serve", "missing"],
    "a missing folder, to evaluate": [
        "-m",
        "indictune",
        "evaluate",
        "--model",
        "missing",
        "--test_file",
        "missing.csv",
    ],
    "a missing folder, to report": ["-m", "indictune", "report", "missing"],
    "a missing folder, to export": ["-m", "indictune", "export", "missing"],
    "a missing folder, to push": ["-m", "indictune", "push", "missing", "you/name"],
    "a missing folder, to merge": ["-m", "indictune", "merge", "missing"],
    "a missing folder, to chat": ["-m", "indictune", "chat", "missing"],
    "a missing file, to inspect": ["-m", "indictune", "inspect", "missing.csv"],
}
JOB = ("--model_name_or_path", "builtin:tiny-indic-bert", "--max_length", "128", "--validation_split", "0")
OF_70B = (
    *("--task", "chat", "--bf16", "true", "--global_batch_size", "32"),
    *("--gpus", "32", "--nodes", "4", "--gpu", "h100"),
)
SAME_BATCH = ("--global_batch_size", str(BATCH_SIZE), "--per_device_train_batch_size", str(BATCH_SIZE))
ONE_STEP = (
    *SAME_BATCH,
    "--max_steps",
    "1",
    "--eval_strategy",
    "no",
    "--save_strategy",
    "no",
    "--load_best_model_at_end",
    "false",
)


def output_of(command: list[str], checkout: Path = ROOT) -> str:
    """Run a Python process in a checkout; return its output, or raise a `RuntimeError` if it fails."""
    environ = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, *command], cwd=checkout, env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, EXIT_REFUSED):
        raise RuntimeError(f"{command} failed:\n{done.stderr}")
    return done.stdout


def seconds_of(command: list[str], checkout: Path = ROOT) -> float:
    """Seconds of a whole Python process in a checkout."""
    since = time.perf_counter()
    output_of(command, checkout)
    return time.perf_counter() - since


def main() -> None:
    """Measure, print the tables and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("earlier", nargs="*", metavar="CHECKOUT")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=100_000)
    asked = parser.parse_args()
    earlier = asked.earlier
    os.environ["OMP_NUM_THREADS"] = str(os.cpu_count())
    with tempfile.TemporaryDirectory() as work:
        os.environ["INDICTUNE_CACHE"] = str(Path(work) / "cache")
        write_rows(rows := Path(work) / "rows.csv", asked.rows)
        job = [*JOB, "--train_file", str(rows)]
        prepare, run = ["-m", "indictune", "prepare", *job], ["scripts/train_sentiment.py", *job, *ONE_STEP]
        checkouts = [ROOT, *(Path(each).resolve() for each in earlier)]
        for each in checkouts:
            seconds_of(prepare, each)
        bare = ["-m", "benchmarks.bare_trainer", resolve(JOB[1]), str(rows), f"{work}/bare"]
        output_of(bare)
        LARGE.save_pretrained(work)
        plan = ["-m", "indictune", "plan", "--model", f"{work}/config.json", *OF_70B]
        again = {"indictune prepare, again": prepare}
        plans = {"indictune plan, 70B": [*plan, "--method", "full"], "indictune plan, 70B, all methods": plan}
        commands = {**COMMANDS, **TYPED, **again, **plans}
        seconds: dict[str, list[float]] = {name: [] for name in (*commands, RUN, BARE)}
        before: dict[str, list[float]] = {name: [] for name in (*TYPED, RUN)}
        for lap in range(asked.laps):
            for name, command in TYPED.items() if earlier else ():
                before[name].append(seconds_of(command, checkouts[1]))
            for name, command in commands.items():
                seconds[name].append(seconds_of(command))
            for times, checkout in zip((seconds, before), checkouts, strict=False):
                output_dir = Path(work) / f"{lap} of {checkout.name}"
                seconds_of([*run, "--output_dir", str(output_dir)], checkout)
                metrics = json.loads((output_dir / "metrics.json").read_text(encoding="utf-8"))["train"]
                times[RUN].append(metrics["time_to_first_step_s"])
            seconds[BARE].append(float(output_of(bare).rpartition(FIRST_STEP)[2].split()[0]))
    started = {name: round(statistics.median(laps), 3) for name, laps in seconds.items()}
    once = {name: round(statistics.median(laps), 3) for name, laps in before.items() if laps}
    body = [[name, f"{once[name]:.2f}" if name in once else "", f"{spent:.2f}"] for name, spent in started.items()]
    print(table(["command", "seconds before", "seconds"], body), end="\n\n")
    ratio = round(started[RUN] / started[BARE], 3)
    print(f"{RUN}: {ratio} times that of a bare Trainer")
    results = {"environment": environment(), "laps": asked.laps, "rows": asked.rows, "seconds_of_commands": started}
    results["run_to_bare_trainer"] = ratio
    results |= {"seconds_of_commands_before": once} if once else {}
    print(f"written to {write_results('startup', results)}")


if __name__ == "__main__":
    main()

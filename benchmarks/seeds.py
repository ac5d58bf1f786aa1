"""What settings that are not exact do to the loss: the mean of five seeds, beside their spread in fp32.

    OMP_NUM_THREADS=1 python -m benchmarks.seeds [--data ../shared/data/sentiment] [--steps 120]

Each run is `accelerate launch` of the training script with DDP on two processes, or, where there is one GPU, plain
python: the BERT and the tweets of `benchmarks.speed`, with dropout, from random weights. `bf16` computes in bfloat16,
but for attention, which on a CPU is in fp32 where rows are joined (indictune/models/attention.py); `reduce_dtype`
computes in fp32 and sends the gradients in bfloat16: one process sends none, and leaves it out. Compared is the mean
loss of the last third of the steps. A setting is inside where its mean over the seeds is no farther from that of fp32
than one standard deviation of the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import BATCH_SIZE, MAX_LENGTH
from benchmarks.environment import environment, write_results
from benchmarks.speed import VOCABULARIES, read_tweets, write_model, write_rows
from indictune.console_text import table
from tests.ranks.launching import accelerate, python, train

SEEDS = range(5)
# From random weights, so that it learns within these steps; a loss that stays where it began shows nothing.
RATE = "1e-3"
LEARNED = 0.95  # of the first steps' loss
EXACT = "fp32"
SETTINGS = {EXACT: (), "bf16": ("--bf16", "true")}
BETWEEN_RANKS = {"reduce_dtype": ("--reduce_dtype", "bfloat16")}


def ranks() -> int:
    """How many processes a run has: each needs a GPU of its own where there is any."""
    return 1 if torch.cuda.device_count() == 1 else 2


def launcher() -> list[str]:
    """Of a run."""
    return python() if ranks() == 1 else accelerate("ddp", ranks())


def settings() -> dict[str, tuple[str, ...]]:
    """What is compared: of each its flags."""
    return SETTINGS if ranks() == 1 else SETTINGS | BETWEEN_RANKS


def losses(job: tuple[str, ...], folder: Path, seed: int, *flags: str) -> list[float]:
    """The loss of each step of a run.

    Args:
        job: flags of all runs.
        folder: gets the run.
        seed: of the order, dropout and the head.
        flags: of the setting.
    """
    return train(launcher(), folder, *job, "--seed", str(seed), *flags).series("loss")


def job_flags(data: Path, folder: Path, steps: int) -> tuple[str, ...]:
    """Write the model and the rows to the folder; flags of all runs."""
    rows = read_tweets(data)
    write_model(folder / "model", rows, VOCABULARIES[0])
    return (
        *("--model_name_or_path", str(folder / "model"), "--max_length", str(MAX_LENGTH), "--learning_rate", RATE),
        *("--train_file", str(write_rows(rows, folder / "train.jsonl")), "--max_steps", str(steps)),
        *("--global_batch_size", str(BATCH_SIZE), "--per_device_train_batch_size", str(BATCH_SIZE // ranks())),
        *("--logging_steps", "1", "--save_strategy", "no", "--load_best_model_at_end", "false"),
        *("--eval_strategy", "no"),
    )


def compare(curves: dict[str, list[list[float]]]) -> dict[str, dict[str, Any]]:
    """How far each setting is from fp32.

    Args:
        curves: of each setting, of each seed, the losses by step.

    Returns:
        Of each setting the mean losses by seed, and of each but fp32 the `difference` of their mean from that of fp32,
        and whether it is `inside` the `spread`.

    Raises:
        RuntimeError: the model has not learned, and its losses would agree whatever computes them.
    """
    third = len(curves[EXACT][0]) // 3
    means = {name: [statistics.mean(curve[-third:]) for curve in found] for name, found in curves.items()}
    began = statistics.mean(loss for curve in curves[EXACT] for loss in curve[: third // 4])
    exact, spread = statistics.mean(means[EXACT]), statistics.stdev(means[EXACT])
    if exact > LEARNED * began:
        raise RuntimeError(f"The loss fell from {began:.4f} to {exact:.4f} only: this compares nothing.")
    found: dict[str, dict[str, Any]] = {EXACT: {"losses": means[EXACT], "at_first": began, "spread": spread}}
    for name in [name for name in means if name != EXACT]:
        difference = statistics.mean(means[name]) - exact
        found[name] = {"losses": means[name], "difference": difference, "inside": abs(difference) <= spread}
    return found


def main() -> None:
    """Train, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/sentiment"), help="folder with jsonl files")
    parser.add_argument("--steps", type=int, default=120, help="of each run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        job = job_flags(options.data, folder, options.steps)
        curves = {
            name: [losses(job, folder / f"{name}-{seed}", seed, *flags) for seed in SEEDS]
            for name, flags in settings().items()
        }
    found = compare(curves)
    judged = [name for name in found if name != EXACT]
    body = [[name, f"{found[name]['difference']:+.4f}", str(found[name]["inside"])] for name in judged]
    print(table(["setting", "difference", f"inside {found[EXACT]['spread']:.4f}"], body), end="\n\n")
    results = {"environment": environment(), "ranks": ranks(), "seeds": len(SEEDS), "steps": options.steps}
    print(f"written to {write_results('seeds', {**results, 'settings': found, 'curves': curves})}")


if __name__ == "__main__":
    main()

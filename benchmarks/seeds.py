"""What settings that are not exact do to the loss: the mean over five seeds, next to the spread of the exact runs.

    OMP_NUM_THREADS=1 python -m benchmarks.seeds [--data ../shared/data/sentiment] [--settings bf16 packing ...]

`bf16` and `reduce_dtype` train the BERT of `benchmarks.speed` on tweets under DDP on two processes. With one GPU, one
process trains, and sends no gradients. The loss compared is the mean of the last third of the steps. On a CPU,
attention of joined rows stays in fp32. `packing` trains LLaMA's demo recipe, and as many rows in as many steps without
packs; the loss compared is that of held-out rows, which are never packed. A setting is `inside` if its mean differs
from the exact one by at most one standard deviation of the exact runs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import BATCH_SIZE, MAX_LENGTH
from benchmarks.environment import environment, write_results
from benchmarks.speed import SAMPLES, VOCABULARIES, read_tweets, write_model, write_rows
from indictune.console_text import table
from tests.ranks.launching import Run, accelerate, python, train

SEEDS = 5
STEPS, EPOCHS = 120, 8  # of the classifier, of LLaMA
LEARNED = 0.95  # largest ratio of the last loss to the first
QUIET = ("--save_strategy", "no", "--eval_strategy", "no", "--load_best_model_at_end", "false")
CLASSIFIER = {"bf16": ("--bf16", "true"), "reduce_dtype": ("--reduce_dtype", "bfloat16")}
LLAMA = ("--config", "recipes/llama/demo.yaml", "--num_sample_generations", "0", *QUIET)
UNPACKED = ("--packing", "false")

Losses = dict[str, float]  # `compared`, `first` and `last`
Pair = Callable[[Path, int], tuple[Losses, Losses]]  # folder and seed -> exact losses, and those of the setting


def ranks() -> int:
    """Processes of a classifier's run; with GPUs, each needs one."""
    return 1 if torch.cuda.device_count() == 1 else 2


def classifier_flags(data: Path, folder: Path, steps: int) -> tuple[str, ...]:
    """Write the model and the rows to the folder; return the flags of all runs."""
    rows = read_tweets(data)
    write_model(folder / "model", rows, VOCABULARIES[0])
    return (
        *("--model_name_or_path", str(folder / "model"), "--max_length", str(MAX_LENGTH), "--learning_rate", "1e-3"),
        *("--train_file", str(write_rows(rows, folder / "train.jsonl")), "--max_steps", str(steps)),
        *("--validation_split", "0"),
        *("--global_batch_size", str(BATCH_SIZE), "--per_device_train_batch_size", str(BATCH_SIZE // ranks())),
        *("--logging_steps", "1", *QUIET),
    )


def train_classifier(job: Sequence[str], folder: Path, seed: int, *flags: str) -> Losses:
    """Train the classifier once."""
    launcher = python() if ranks() == 1 else accelerate("ddp", ranks())
    curve = train(launcher, folder, *job, "--seed", str(seed), *flags).series("loss")
    third = max(1, len(curve) // 3)
    last = statistics.mean(curve[-third:])
    return {"compared": last, "first": statistics.mean(curve[: max(1, third // 4)]), "last": last}


def train_llama(folder: Path, seed: int, *flags: str) -> Run:
    """Train LLaMA's demo once."""
    return train(python(), folder, *LLAMA, "--seed", str(seed), *flags, script="scripts/train_llama.py")


def llama_losses(run: Run) -> Losses:
    """The losses of a LLaMA's run."""
    curve = run.series("loss")
    return {"compared": float(run.metrics["eval"]["loss"]), "first": curve[0], "last": curve[-1]}


def with_packing(folder: Path, seed: int, epochs: float = EPOCHS) -> tuple[Losses, Losses]:
    """Train with packs, and with as many rows in as many steps without."""
    packed = train_llama(folder / "packed", seed, "--num_train_epochs", str(epochs))
    steps = int(packed.log[-1]["step"])
    count = len((SAMPLES / "chats/train.jsonl").read_text(encoding="utf-8").splitlines())
    rows = str(round(count * epochs / steps))
    sizes = ("--global_batch_size", rows, "--per_device_train_batch_size", rows, "--max_steps", str(steps))
    return llama_losses(train_llama(folder / "plain", seed, *UNPACKED, *sizes)), llama_losses(packed)


def pairs(data: Path, folder: Path) -> dict[str, Pair]:
    """What is compared, by setting; one process sends no gradients, so it has no `reduce_dtype`."""
    job = classifier_flags(data, folder, STEPS)

    def of_classifier(flags: tuple[str, ...]) -> Pair:
        return lambda to, seed: (
            train_classifier(job, to / "exact", seed),
            train_classifier(job, to / "other", seed, *flags),
        )

    found = {name: of_classifier(flags) for name, flags in CLASSIFIER.items() if ranks() > 1 or name == "bf16"}
    return {**found, "packing": with_packing}


def compare(name: str, found: Sequence[tuple[Losses, Losses]]) -> dict[str, Any]:
    """The `difference` of the means, the `spread` of the exact runs, and whether the setting is `inside`.

    Args:
        name: of the setting.
        found: of each seed, the losses of the exact run and of the setting.

    Raises:
        RuntimeError: a model has not learned, so its losses would agree however it was trained.
    """
    for seed, pair in enumerate(found):
        for losses in pair:
            if losses["last"] > LEARNED * losses["first"]:
                fall = f"from {losses['first']:.4f} to {losses['last']:.4f}"
                raise RuntimeError(f"{name}, seed {seed}: the loss fell only {fall}, so this compares nothing.")
    exact, other = ([pair[number]["compared"] for pair in found] for number in (0, 1))
    difference, spread = statistics.mean(other) - statistics.mean(exact), statistics.stdev(exact)
    inside = abs(difference) <= spread
    return {"exact": exact, "setting": other, "difference": difference, "spread": spread, "inside": inside}


def main() -> None:
    """Train, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/sentiment"), help="folder with jsonl files")
    parser.add_argument("--settings", nargs="+", choices=[*CLASSIFIER, "packing"], help="all by default")
    options = parser.parse_args()
    about, compared = environment(), {}
    with tempfile.TemporaryDirectory() as work:
        for name, pair in pairs(options.data, Path(work)).items():
            if name in (options.settings or [name]):
                found = [pair(Path(work) / f"{name}-{seed}", seed) for seed in range(SEEDS)]
                compared[name] = compare(name, found)
    body = [
        [name, *(f"{line[key]:+.4f}" for key in ("difference", "spread")), str(line["inside"])]
        for name, line in compared.items()
    ]
    print(table(["setting", "difference", "spread", "inside"], body), end="\n\n")
    results = {"environment": about, "ranks": ranks(), "steps": STEPS, "epochs": EPOCHS, "settings": compared}
    print(f"written to {write_results('seeds', results)}")


if __name__ == "__main__":
    main()

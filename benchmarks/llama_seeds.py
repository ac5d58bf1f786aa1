"""What is not exact in a LLaMA's training: the held-out loss of five seeds, beside their spread without it.

    OMP_NUM_THREADS=1 python -m benchmarks.llama_seeds [--epochs 8]

The runs are like those of `make demo-llama`, a small LLaMA from random weights on the built-in instructions.

`packing`: a packed step takes other rows than a plain one, because best fit puts rows of fitting lengths together. It
has the demo's packs, the plain one as many rows as these hold on average, in as many steps. Held-out rows are never
packed. `optimizer`: AdamW with states of 8 bits, which QLoRA takes on a GPU by default (there in pages), beside
torch's. The adapter's matrices are so large that bitsandbytes keeps their states in 8 bits (from 4,096 numbers on),
and the output layer is trained too, without which random weights learn little. `precision`: computed in bf16, which is
the default, beside fp32; on a CPU attention stays in fp32.

Each is inside where its mean over the seeds is no farther from the other's than one standard deviation of that one's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from benchmarks.environment import environment, write_results
from indictune.console_text import table
from tests.ranks.launching import Run, python, train

SCRIPT = "scripts/train_llama.py"
DEMO = "recipes/llama/demo.yaml"
JOB = (
    *("--config", DEMO, "--num_sample_generations", "0", "--save_strategy", "no", "--eval_strategy", "no"),
    *("--load_best_model_at_end", "false"),
)
QLORA = ("--method", "qlora", "--bf16", "true", "--lora_r", "64", "--modules_to_save", "lm_head")
SEEDS = range(5)
LEARNED = 0.95  # of the first steps' loss
# What is compared, and with what.
PLAIN, PACKED = "plain", "packing"
FULL, EIGHT_BITS = "adamw_torch_fused", "adamw_bnb_8bit"
FP32, BF16 = "fp32", "bf16"
PAIRS = {PACKED: (PLAIN, PACKED), "optimizer": (FULL, EIGHT_BITS), "precision": (FP32, BF16)}

Losses = dict[str, float]


def with_packing(folder: Path, seed: int, epochs: float) -> dict[str, Losses]:
    """Train with packs, and with as many rows in as many steps without.

    Args:
        folder: gets the runs.
        seed: of the order and dropout.
        epochs: of the packed run.

    Returns:
        Of each kind the losses of `losses_of`, and the `rows` of a step.
    """
    job = (*JOB, "--seed", str(seed))
    packed = train(python(), folder / PACKED, *job, "--num_train_epochs", str(epochs), script=SCRIPT)
    steps = int(packed.log[-1]["step"])
    rows = round(count_rows() * epochs / steps)
    sizes = ("--global_batch_size", str(rows), "--per_device_train_batch_size", str(rows), "--max_steps", str(steps))
    plain = train(python(), folder / PLAIN, *job, *sizes, "--packing", "false", script=SCRIPT)
    return {PLAIN: {**losses_of(plain), "rows": rows}, PACKED: {**losses_of(packed), "rows": rows}}


def with_optimizers(folder: Path, seed: int, epochs: float) -> dict[str, Losses]:
    """Train with states in full precision and in 8 bits; arguments and losses as above."""
    job = (*JOB, *QLORA, "--seed", str(seed), "--num_train_epochs", str(epochs))
    return {
        name: losses_of(train(python(), folder / name, *job, "--optim", name, script=SCRIPT))
        for name in (FULL, EIGHT_BITS)
    }


def with_precisions(folder: Path, seed: int, epochs: float) -> dict[str, Losses]:
    """Train in fp32 and in bf16, without packs; arguments and losses as above."""
    job = (*JOB, "--packing", "false", "--seed", str(seed), "--num_train_epochs", str(epochs))
    return {
        name: losses_of(train(python(), folder / name, *job, "--bf16", str(name == BF16).lower(), script=SCRIPT))
        for name in (FP32, BF16)
    }


def losses_of(run: Run) -> Losses:
    """The `held_out` loss, the training loss `at_first` and `at_last`, and the number of `steps`."""
    losses = run.series("loss")
    held_out = float(run.metrics["eval"]["loss"])
    return {"held_out": held_out, "at_first": losses[0], "at_last": losses[-1], "steps": run.log[-1]["step"]}


def count_rows() -> int:
    """Of the built-in training rows."""
    content = resources.files("indictune.data").joinpath("samples/chats/train.jsonl").read_text(encoding="utf-8")
    return sum(1 for line in content.splitlines() if json.loads(line))


def compare(found: list[dict[str, Losses]], exact: str, other: str) -> dict[str, Any]:
    """How far one of two ways to train is from the other.

    Args:
        found: of each seed, the losses of both.
        exact: the one whose seeds tell the spread.
        other: is judged.

    Returns:
        The `difference` of the mean held-out losses, the `spread` of the seeds, and whether it is `inside`.

    Raises:
        RuntimeError: a model has not learned, and its losses would agree however it was trained.
    """
    for seed, kinds in enumerate(found):
        for name, run in kinds.items():
            if run["at_last"] > LEARNED * run["at_first"]:
                raise RuntimeError(
                    f"{name}, seed {seed}: the loss fell from {run['at_first']:.4f} to {run['at_last']:.4f} only: "
                    "this compares nothing."
                )
    means = {name: [kinds[name]["held_out"] for kinds in found] for name in (exact, other)}
    difference = statistics.mean(means[other]) - statistics.mean(means[exact])
    spread = statistics.stdev(means[exact])
    return {"held_out": means, "difference": difference, "spread": spread, "inside": abs(difference) <= spread}


RUNS = {PACKED: with_packing, "optimizer": with_optimizers, "precision": with_precisions}


def main() -> None:
    """Train, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=8, help="of each run")
    options = parser.parse_args()
    results: dict[str, Any] = {"environment": environment(), "seeds": len(SEEDS), "epochs": options.epochs}
    with tempfile.TemporaryDirectory() as work:
        for name, runs in RUNS.items():
            found = [runs(Path(work) / f"{name}-{seed}", seed, options.epochs) for seed in SEEDS]
            results[name] = {**compare(found, *PAIRS[name]), "runs": found}
    body = []
    for name, (exact, other) in PAIRS.items():
        compared = results[name]
        numbers = [f"{compared['difference']:+.4f}", f"{compared['spread']:.4f}", str(compared["inside"])]
        body.append([other, exact, *numbers])
    print(table(["setting", "beside", "held-out loss", "of seeds", "inside"], body), end="\n\n")
    print(f"written to {write_results('llama-seeds', results)}")


if __name__ == "__main__":
    main()

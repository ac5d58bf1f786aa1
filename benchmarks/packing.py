"""What packing does to what a LLaMA learns: the held-out loss of five seeds, beside their spread without it.

    OMP_NUM_THREADS=1 python -m benchmarks.packing [--epochs 8]

The runs are those of `make demo-llama`, a small LLaMA from random weights on the built-in instructions. A packed step
takes other rows than a plain one, because best fit puts rows of fitting lengths together: `packed` has the demo's four
packs a step, `plain` as many rows as these hold on average, in as many steps. Held-out rows are never packed. Packing
is inside where its mean over the seeds is no farther from that of plain rows than one standard deviation of these.
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
from indictune.layout import table
from tests.distributed.launching import python, train

SCRIPT = "scripts/train_llama.py"
DEMO = "recipes/llama/demo.yaml"
SEEDS = range(5)
LEARNED = 0.95  # of the first steps' loss
PLAIN, PACKED = "plain", "packed"


def runs(folder: Path, seed: int, epochs: float) -> dict[str, dict[str, float]]:
    """Train with packs, and with as many rows in as many steps without.

    Args:
        folder: gets the runs.
        seed: of the order and dropout.
        epochs: of the packed run.

    Returns:
        Of each kind the `held_out` loss, the training loss `at_first` and `at_last`, and the `rows` and `steps`.
    """
    job = (
        *("--config", DEMO, "--seed", str(seed), "--num_sample_generations", "0", "--save_strategy", "no"),
        *("--load_best_model_at_end", "false", "--eval_strategy", "no"),
    )
    packed = train(python(), folder / PACKED, *job, "--num_train_epochs", str(epochs), script=SCRIPT)
    steps = int(packed.log[-1]["step"])
    rows = round(count_rows() * epochs / steps)
    sizes = ("--global_batch_size", str(rows), "--per_device_train_batch_size", str(rows))
    plain = train(
        python(), folder / PLAIN, *job, *sizes, "--packing", "false", "--max_steps", str(steps), script=SCRIPT
    )
    found = {}
    for name, run in ((PLAIN, plain), (PACKED, packed)):
        losses = run.series("loss")
        held_out = float(run.metrics["eval"]["loss"])
        found[name] = {"held_out": held_out, "at_first": losses[0], "at_last": losses[-1]}
        found[name] |= {"rows": rows, "steps": run.log[-1]["step"]}
    return found


def count_rows() -> int:
    """Of the built-in training rows."""
    content = resources.files("indictune.data").joinpath("samples/chats/train.jsonl").read_text(encoding="utf-8")
    return sum(1 for line in content.splitlines() if json.loads(line))


def compare(found: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """How far packing is from plain rows.

    Args:
        found: from `runs`, of each seed.

    Returns:
        The `difference` of the mean held-out losses, the `spread` of plain rows' seeds, and whether it is `inside`.

    Raises:
        RuntimeError: a model has not learned, and its losses would agree however its rows came.
    """
    for seed, kinds in enumerate(found):
        for name, run in kinds.items():
            if run["at_last"] > LEARNED * run["at_first"]:
                raise RuntimeError(
                    f"{name}, seed {seed}: the loss fell from {run['at_first']:.4f} to {run['at_last']:.4f} only: "
                    "this compares nothing."
                )
    means = {name: [kinds[name]["held_out"] for kinds in found] for name in (PLAIN, PACKED)}
    difference = statistics.mean(means[PACKED]) - statistics.mean(means[PLAIN])
    spread = statistics.stdev(means[PLAIN])
    return {"losses": means, "difference": difference, "spread": spread, "inside": abs(difference) <= spread}


def main() -> None:
    """Train, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=8, help="of each run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        found = [runs(Path(work) / str(seed), seed, options.epochs) for seed in SEEDS]
    compared = compare(found)
    means = {name: statistics.mean(losses) for name, losses in compared["losses"].items()}
    body = [[name, f"{mean:.4f}", f"{mean - means[PLAIN]:+.4f}"] for name, mean in means.items()]
    print(table(["rows", "held-out loss", "difference"], body))
    print(f"the seeds' standard deviation is {compared['spread']:.4f}: inside is {compared['inside']}\n")
    results = {"environment": environment(), "seeds": len(SEEDS), "epochs": options.epochs, **compared}
    print(f"written to {write_results('packing', {**results, 'runs': found})}")


if __name__ == "__main__":
    main()

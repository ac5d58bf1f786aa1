"""Loss curves of one recipe under eight strategies: they lie on one another.

    python -m benchmarks.strategies [--steps 120]

Each run is the demo recipe in fp32 without dropout, started as a user starts it: plain python for one process,
`accelerate launch` with two processes (gloo on a CPU) for the others. All have the same global batch. The program
writes a result file and the picture `docs/images/strategies.png`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import environment, write_results
from indictune.console_text import table
from tests.ranks.launching import accelerate, python, train

ROOT = Path(__file__).parents[1]
RECIPE = "recipes/sentiment/demo.yaml"
PICTURE = ROOT / "docs/images/strategies.png"
SINGLE = "single"
RANKS = 2
FLAGS = (
    *("--config", RECIPE, "--dropout", "0", "--bf16", "false", "--logging_steps", "1"),
    *("--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"),
)
NAMES = {
    SINGLE: "one process",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "fsdp2_offload": "FSDP2, offload",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "zero3_offload": "ZeRO-3, offload",
}
# Okabe and Ito's palette, which colour-blind readers can tell apart; markers differ too.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#8C8C8C")
MARKERS = ("", "o", "s", "D", "^", "v", "<", ">")
BOUND = 1e-4  # of our parity tests, relative to the loss


def losses_under(strategy: str, folder: Path, steps: int) -> list[float]:
    """Train with a strategy; return the loss of each step.

    Raises:
        RuntimeError: another strategy than this one came up.
    """
    launcher, ranks = (python(), 1) if strategy == SINGLE else (accelerate(strategy, RANKS), RANKS)
    run = train(launcher, folder / strategy, *FLAGS, "--max_steps", str(steps))
    trained_as = (run.metrics["strategy"], run.metrics["world_size"])
    if trained_as != (strategy, ranks):
        raise RuntimeError(f"{strategy} on {ranks} process(es) was asked for, but {trained_as} came up.")
    return run.series("loss")


def largest_differences(losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The largest absolute difference of each curve from that of one process."""
    single = np.array(losses[SINGLE])
    return {name: float(np.abs(single - curve).max()) for name, curve in losses.items() if name != SINGLE}


def draw(losses: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw the curves above and, on a log axis below, their largest difference from one process so far."""
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False})
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=(2.2, 1), layout="constrained"
    )
    single = np.array(losses[SINGLE])
    steps = np.arange(1, len(single) + 1)
    for number, (name, curve) in enumerate(losses.items()):
        style = {
            "color": COLOURS[number],
            "marker": MARKERS[number],
            "markersize": 6,
            "markevery": (number * len(single) // 60, len(single) // 6),
        }
        width = 5 if name == SINGLE else 1.2
        above.plot(steps, curve, label=NAMES[name], linewidth=width, alpha=0.35 if name == SINGLE else 1, **style)
        if name != SINGLE:
            largest_so_far = np.maximum.accumulate(np.abs(curve - single))
            below.plot(steps, np.where(largest_so_far > 0, largest_so_far, np.nan), linewidth=1.2, **style)
    above.set(ylabel="training loss", title="One recipe, one global batch, eight strategies: one loss curve")
    above.legend(ncols=2, frameon=False)
    below.set(yscale="log", xlabel="step", ylabel="largest difference\nfrom one process", ylim=(1e-8, 10 * BOUND))
    below.axhline(BOUND, color="#555555", linestyle="--", linewidth=1)
    below.text(steps[-1], 1.3 * BOUND, f"bound of the tests: {BOUND:.0e}", ha="right", va="bottom", fontsize=10)
    for axes in (above, below):
        axes.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train under each strategy, print the differences, and write the result file and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="steps of each run")
    options = parser.parse_args()
    about = environment()
    with tempfile.TemporaryDirectory() as work:
        losses = {name: losses_under(name, Path(work), options.steps) for name in NAMES}
    largest = largest_differences(losses)
    print(table(["strategy", "largest difference"], [[name, f"{value:.1e}"] for name, value in largest.items()]))
    results: dict[str, Any] = {"environment": about, "recipe": RECIPE, "flags": FLAGS, "steps": options.steps}
    results |= {"ranks": {name: 1 if name == SINGLE else RANKS for name in losses}}
    results |= {"largest_difference_from_one_process": largest, "losses": losses}
    print(f"written to {write_results('strategies', results)}")
    draw(losses, PICTURE)
    print(f"drawn in {PICTURE}")


if __name__ == "__main__":
    main()

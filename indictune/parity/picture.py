"""Draw the loss curves of runs that were compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

# Okabe and Ito's palette and Tol's, which colour-blind readers can tell apart; markers differ too.
_COLOURS = (
    *("#000000", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#CC79A7"),
    *("#D55E00", "#8C8C8C", "#882255", "#44AA99", "#999933"),
)
_MARKERS = ("", "o", "s", "D", "^", "v", "<", ">", "P", "X", "h")


def draw_losses(losses: Mapping[str, Sequence[float]], tolerance: float, path: Path) -> None:
    """Draw the curves above and, on a log axis below, their largest relative difference from the first one so far.

    Args:
        losses: of each step, by strategy; the reference first.
        tolerance: of the comparison, which is drawn as a line.
        path: of the picture.
    """
    from matplotlib import pyplot  # slow

    with pyplot.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
        _draw(losses, tolerance, path)


def _draw(losses: Mapping[str, Sequence[float]], tolerance: float, path: Path) -> None:
    from matplotlib import pyplot, ticker

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=(2.2, 1), layout="constrained"
    )
    reference = np.array(next(iter(losses.values())))
    steps = np.arange(1, len(reference) + 1)
    peaks = list[float]()
    for number, (name, curve) in enumerate(losses.items()):
        every = max(1, len(reference) // 6)
        style = {
            "color": _COLOURS[number % len(_COLOURS)],
            "marker": _MARKERS[number % len(_MARKERS)],
            "markersize": 6,
            "markevery": (min(number * len(reference) // 60, every - 1), every),
        }
        above.plot(steps, curve, label=name, linewidth=1.2 if number else 5, alpha=1 if number else 0.35, **style)
        if number:
            largest = np.maximum.accumulate(np.abs(np.array(curve) - reference) / np.abs(reference))
            peaks.append(float(largest[-1]))
            below.plot(steps, np.where(largest > 0, largest, np.nan), linewidth=1.2, **style)
    above.set(ylabel="training loss", title="One recipe, one global batch: the loss under each strategy")
    above.legend(ncols=2, frameon=False)
    below.set(yscale="log", xlabel="step", ylabel="largest difference\nfrom one process")
    below.set_ylim(1e-8, 10 * max([tolerance, *peaks]))
    below.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    below.axhline(tolerance, color="#555555", linestyle="--", linewidth=1)
    below.text(steps[-1], 1.3 * tolerance, f"tolerance: {tolerance:.0e}", ha="right", va="bottom", fontsize=10)
    for axes in (above, below):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

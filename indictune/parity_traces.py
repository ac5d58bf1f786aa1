"""How far a run is from another one, by what both left in their folders: causes, numbers and curves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from indictune.files import METRICS

TRACE = "parity_trace.jsonl"
_ROUNDING = 1e-3  # of a norm in half precision, and more than any in single precision
_GROWN = 1e-5  # relative difference of a step that is no rounding any more, but has grown from it


class Traced:
    """The run of a strategy: its metrics, those of all validation rows, and each step's loss and norm before clipping.

    Its trace says what the run started from, and each step followed from.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.metrics: dict[str, Any] = json.loads((folder / METRICS).read_text(encoding="utf-8"))
        evaluation = self.metrics.get("eval", {}).items()
        self.evaluation = {name: value for name, value in evaluation if isinstance(value, float)}
        log = _lines(folder / "train_log.jsonl")
        self.losses, self.norms = ([line[each] for line in log] for each in ("loss", "grad_norm"))
        self.start, *self.steps = _lines(folder / TRACE)

    def weights(self) -> dict[str, Tensor]:
        """The final model."""
        files = sorted(self.folder.glob("*.safetensors"))
        return {name: weight for file in files for name, weight in load_file(file).items()}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@dataclass(frozen=True)
class RunDifference:
    """How far values are apart, relative to the reference, and the first place, or step, beyond the tolerance."""

    largest: float
    first: int | str | None


@dataclass(frozen=True)
class RunComparison:
    """A run of a strategy next to the reference: differences of `loss`, `grad_norm`, `weights` and `evaluation`.

    Their causes are in words, and empty if the runs agree.
    """

    name: str
    processes: int
    parts: Mapping[str, RunDifference]
    causes: Sequence[str]

    @property
    def agrees(self) -> bool:
        """Whether nothing is beyond the tolerance."""
        return all(each.first is None for each in self.parts.values())


def compare_traces(one: Traced, other: Traced, tolerance: float) -> RunComparison:
    """Compare a run with the reference `one`. `tolerance` is relative."""
    parts = {
        "loss": of_steps(one.losses, other.losses, tolerance),
        "grad_norm": of_steps(one.norms, other.norms, tolerance),
        "weights": of_weights(one.weights(), other.weights(), tolerance),
        "evaluation": of_metrics(one.evaluation, other.evaluation, tolerance),
    }
    steps = [int(parts[name].first or 0) for name in ("loss", "grad_norm")]
    differs = any(each.first is not None for each in parts.values())
    why = causes(one, other, min(filter(None, steps), default=None)) if differs else ()
    return RunComparison(other.name, other.metrics["world_size"], parts, why)


def of_steps(expected: Sequence[float], found: Sequence[float], tolerance: float) -> RunDifference:
    """The difference of two series of values, one a step. A step that only one run has is beyond any tolerance."""
    apart = [relative(a, b) for a, b in zip(expected, found, strict=False)]
    apart += [math.inf] * abs(len(expected) - len(found))
    first = next((step for step, value in enumerate(apart, 1) if not value <= tolerance), None)
    return RunDifference(max(apart, default=0.0), first)


def of_weights(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], tolerance: float) -> RunDifference:
    """The Euclidean distance of two models, relative to the length of the first; `first` is the furthest weight."""
    if expected.keys() != found.keys():
        return RunDifference(math.inf, sorted(expected.keys() ^ found.keys())[0])
    distances = {name: float((each.double() - found[name].double()).norm()) for name, each in expected.items()}
    length = math.hypot(*(float(each.double().norm()) for each in expected.values()))
    apart = math.hypot(*distances.values()) / length
    return RunDifference(apart, None if apart <= tolerance else max(distances, key=lambda name: distances[name]))


def of_metrics(expected: Mapping[str, float], found: Mapping[str, float], tolerance: float) -> RunDifference:
    """The largest difference of two evaluations."""
    apart = {name: relative(value, found.get(name, math.nan)) for name, value in expected.items()}
    first = next((name for name, value in apart.items() if not value <= tolerance), None)
    return RunDifference(max(apart.values(), default=0.0), first)


def relative(expected: float, found: float) -> float:
    """How far a value is from the expected one, as a share of it."""
    if expected == found:
        return 0.0
    return abs(found - expected) / abs(expected) if expected else math.inf


def causes(one: Traced, other: Traced, step: int | None) -> list[str]:
    """What is not alike in a run and the reference `one`, in words. `step` is the first whose loss or norm differs."""
    checks = (_weights, _order, _dropout, _precision, _clipping)
    if found := [cause for check in checks for cause in check(one, other)]:
        return found
    if step is None:
        return ["unknown: every step agrees. The saved weights or the evaluation differ."]
    return [_scaling(one, other, step)]


def _weights(one: Traced, other: Traced) -> Iterator[str]:
    own, others = one.start["weights"], other.start["weights"]
    differ = sorted(name for name in {*own, *others} if own.get(name) != others.get(name))
    if differ:
        more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        yield f"initial weights: {differ[0]}{more}"


def _order(one: Traced, other: Traced) -> Iterator[str]:
    for a, b in zip(one.steps, other.steps, strict=False):
        if a["rows"] != b["rows"]:
            yield f"data order: step {b['step']} has other rows"
            return


def _dropout(one: Traced, other: Traced) -> Iterator[str]:
    for a, b in zip(one.steps, other.steps, strict=False):
        seeds = b["seeds"]
        if len({*seeds, *a["seeds"]}) > 1 and (a["draws"] or b["draws"]):
            rank = next((rank for rank, seed in enumerate(seeds) if seed != a["seeds"][0]), 0)
            yield f"dropout: rank {rank} has another seed at step {b['step']}"
            return
        if a["draws"] != b["draws"]:
            which = other.name if b["draws"] else one.name
            yield f"dropout: only {which} draws masks at step {b['step']}"
            return
        if b["draws"] and a["generator"] != b["generator"]:
            yield f"dropout: the masks differ from step {b['step'] - 1 or 1} on; --dropout 0 draws none"
            return


def _precision(one: Traced, other: Traced) -> Iterator[str]:
    own, others = one.start["types"], other.start["types"]
    differ = [f"{name} {others[name]} instead of {own[name]}" for name in own if own[name] != others[name]]
    if differ:
        yield f"precision: {', '.join(differ)}"


def _clipping(one: Traced, other: Traced) -> Iterator[str]:
    """Whether a step scaled its gradients in another way than the reference would have scaled these gradients."""
    limit = one.start["max_norm"]
    for norm, step in zip(other.norms, other.steps, strict=False):
        expected = _clipped(norm, limit)
        found = _clipped(norm, other.start["max_norm"]) if step["clipped"] is None else step["clipped"]
        if not abs(found - expected) <= _ROUNDING * expected:
            yield f"clipping: step {step['step']} leaves a norm of {found:.4g} instead of {expected:.4g}"
            return


def _clipped(norm: float, limit: float) -> float:
    return min(norm, limit) if limit > 0 else norm


def _scaling(one: Traced, other: Traced, step: int) -> str:
    """All that is hashed is alike. A difference that grew is rounding; one that is there at once is a factor."""
    before = [
        abs(b - a) / abs(a)
        for series in ((one.losses, other.losses), (one.norms, other.norms))
        for a, b in islice(zip(*series, strict=False), step - 1)
        if a
    ]
    types = one.start["types"]["compute"]
    if types != "float32" or max(before, default=0.0) > _GROWN:
        return f"precision: rounding in {types}, which grows from step to step"
    loss, norm = (
        series[step - 1] / expected[step - 1] if expected[step - 1] else float("nan")
        for expected, series in ((one.losses, other.losses), (one.norms, other.norms))
    )
    return f"loss scaling: at step {step} the loss is {loss:.4g} times and the gradient {norm:.4g} times the expected"


# Okabe and Ito's palette and Tol's, which colour-blind readers can tell apart; markers differ too.
_COLOURS = (
    *("#000000", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#CC79A7"),
    *("#D55E00", "#8C8C8C", "#882255", "#44AA99", "#999933"),
)
_MARKERS = ("", "o", "s", "D", "^", "v", "<", ">", "P", "X", "h")


def draw_losses(losses: Mapping[str, Sequence[float]], tolerance: float, path: Path) -> None:
    """Draw the curves above and, on a log axis below, their largest relative difference from the first one so far.

    `losses` are of each step, by strategy, the reference first. The tolerance is drawn as a line.
    """
    from matplotlib import pyplot, ticker  # slow

    with pyplot.rc_context({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False}):
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

"""How far a run is from another one: loss and gradient norm of each step, final weights, and evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from indictune.parity.causes import causes
from indictune.parity.traces import Traced


@dataclass(frozen=True)
class Difference:
    """How far values are apart.

    Attributes:
        largest: relative to the value of the reference.
        first: the first place, such as a step, that is beyond the tolerance; None if there is none.
    """

    largest: float
    first: int | str | None


@dataclass(frozen=True)
class Comparison:
    """A run next to the reference.

    Attributes:
        name: of the strategy.
        processes: that it had.
        parts: differences of `loss`, `grad_norm`, `weights` and `evaluation`.
        causes: of the differences, in words; empty if the runs agree.
    """

    name: str
    processes: int
    parts: Mapping[str, Difference]
    causes: Sequence[str]

    @property
    def agrees(self) -> bool:
        """Whether nothing is beyond the tolerance."""
        return all(each.first is None for each in self.parts.values())


def compare(one: Traced, other: Traced, tolerance: float) -> Comparison:
    """Compare a run with the reference `one`. `tolerance` is relative."""
    parts = {
        "loss": of_steps(one.losses, other.losses, tolerance),
        "grad_norm": of_steps(one.norms, other.norms, tolerance),
        "weights": of_weights(one.weights(), other.weights(), tolerance),
        "evaluation": of_metrics(one.evaluation, other.evaluation, tolerance),
    }
    steps = [int(parts[name].first or 0) for name in ("loss", "grad_norm")]
    found = Comparison(other.name, other.metrics["world_size"], parts, ())
    if found.agrees:
        return found
    return Comparison(found.name, found.processes, parts, causes(one, other, min(filter(None, steps), default=None)))


def of_steps(expected: Sequence[float], found: Sequence[float], tolerance: float) -> Difference:
    """The difference of two series of values, one a step. A step that only one run has is beyond any tolerance."""
    apart = [relative(a, b) for a, b in zip(expected, found, strict=False)]
    apart += [math.inf] * abs(len(expected) - len(found))
    first = next((step for step, value in enumerate(apart, 1) if not value <= tolerance), None)
    return Difference(max(apart, default=0.0), first)


def of_weights(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], tolerance: float) -> Difference:
    """The Euclidean distance of two models, relative to the length of the first; `first` is the furthest weight."""
    if expected.keys() != found.keys():
        return Difference(math.inf, sorted(expected.keys() ^ found.keys())[0])
    distances = {name: float((each.double() - found[name].double()).norm()) for name, each in expected.items()}
    length = math.hypot(*(float(each.double().norm()) for each in expected.values()))
    apart = math.hypot(*distances.values()) / length
    return Difference(apart, None if apart <= tolerance else max(distances, key=lambda name: distances[name]))


def of_metrics(expected: Mapping[str, float], found: Mapping[str, float], tolerance: float) -> Difference:
    """The largest difference of two evaluations."""
    apart = {name: relative(value, found.get(name, math.nan)) for name, value in expected.items()}
    first = next((name for name, value in apart.items() if not value <= tolerance), None)
    return Difference(max(apart.values(), default=0.0), first)


def relative(expected: float, found: float) -> float:
    """How far a value is from the expected one, as a share of it."""
    if expected == found:
        return 0.0
    return abs(found - expected) / abs(expected) if expected else math.inf

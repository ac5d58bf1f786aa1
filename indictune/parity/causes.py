"""Why two runs differ: data order, initial weights, dropout, precision, clipping or loss scaling, by their traces."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from indictune.parity.traces import Traced

_ROUNDING = 1e-3  # of a norm in half precision, and more than any in single precision
_GROWN = 1e-5  # relative difference of a step that is no rounding any more, but has grown from it


def causes(one: Traced, other: Traced, step: int | None) -> list[str]:
    """What is not alike in a run and the reference `one`, in words.

    Args:
        one: the reference.
        other: that differs.
        step: the first one whose loss or norm differs; None if none does.
    """
    found = [*_weights(one, other), *_order(one, other), *_dropout(one, other), *_precision(one, other)]
    found += _clipping(one, other)
    if found:
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

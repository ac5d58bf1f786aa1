"""How much a row of each label counts in the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import yaml

from indictune.config.strict_yaml import TextLoader
from indictune.credentials import NOT_YAML, without_its_text
from indictune.data.columns import normalise_label
from indictune.errors import Problems, UserError, problem

BALANCED = "balanced"
_FLAG = "--class_weights"


def class_weights(choice: str | None, counts: Mapping[str, int], labels: Sequence[str]) -> dict[str, float] | None:
    """The weight of each label by `--class_weights`, for its number of training rows; None where all count alike.

    Raises:
        UserError: as of `read_file`, or the file misses a label, or names one that no row has.
    """
    if choice is None:
        return None
    if choice == BALANCED:  # as scikit-learn's `class_weight="balanced"`
        total = sum(counts.values())
        return {label: total / (len(labels) * counts[label]) for label in labels}
    weights = read_file(choice)
    problems = Problems()
    for label in sorted(weights.keys() ^ set(labels)):
        code = "class-weight-unknown" if label in weights else "class-weight-missing"
        problems.append(problem(code, _FLAG, choice, label=label, labels=", ".join(labels)))
    problems.raise_any()
    return weights


def check_file(choice: str | None) -> None:
    """Check what is known of `--class_weights` before any row is read; raises as `read_file`."""
    if choice is not None and choice != BALANCED:
        read_file(choice)


def as_tensor(weights: Mapping[str, float] | None, labels: Sequence[str]) -> torch.Tensor | None:
    """The weights in the order of the class ids, float32 [labels]."""
    return None if weights is None else torch.tensor([weights[label] for label in labels])


def read_file(path: str) -> dict[str, float]:
    """The weights in a JSON or YAML file, by label.

    Raises:
        UserError: it cannot be read, or holds something else than a positive number for each label.
    """
    try:
        # JSON is YAML too. Read as text alone: YAML takes a label `no` for a boolean and a weight 1e-1 for a string.
        content = yaml.load(Path(path).read_text(encoding="utf-8"), TextLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("class-weights-unreadable", _FLAG, path, reason=error) from error
    except NOT_YAML as error:
        raise UserError("class-weights-unreadable", _FLAG, path, reason=without_its_text(error)) from None
    if not isinstance(content, Mapping):
        raise UserError("class-weights-unreadable", _FLAG, path, reason=f"it holds a {type(content).__name__}")
    weights: dict[str, float] = {}
    problems = Problems()
    for written, weight in content.items():
        label = normalise_label(written) or ""
        if label in weights:
            problems.append(problem("class-weight-twice", _FLAG, path, label=label))
        weights[label] = _number(weight)
        if not 0 < weights[label] < float("inf"):
            problems.append(problem("class-weight-not-positive", _FLAG, path, label=label, weight=weight))
    problems.raise_any()
    return weights


def _number(weight: object) -> float:
    """NaN where it is none."""
    try:
        return float(str(weight))
    except ValueError:
        return float("nan")

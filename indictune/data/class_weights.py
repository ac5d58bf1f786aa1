"""How much a row of each label counts in the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
import yaml

from indictune.config.strict_yaml import TextLoader
from indictune.credentials import NOT_YAML, without_its_text
from indictune.data.columns import normalise_label
from indictune.errors import Problems, UserError

BALANCED = "balanced"


def class_weights(choice: str | None, train_labels: Iterable[str], labels: Sequence[str]) -> dict[str, float] | None:
    """The weight of each label; None where all count alike.

    Args:
        choice: `--class_weights`: None, `balanced`, or a JSON or YAML file of `label: weight`.
        train_labels: label of every training row.
        labels: of the training rows.

    Raises:
        UserError: the file cannot be read, misses a label, names one that is not there, or holds something else than
            positive numbers.
    """
    if choice is None:
        return None
    return _balanced(train_labels, labels) if choice == BALANCED else _from_file(choice, labels)


def check_file(choice: str | None) -> None:
    """Check what is known of `--class_weights` before any row is read.

    Raises:
        UserError: the file cannot be read, or holds something else than a positive number for each label.
    """
    if choice is not None and choice != BALANCED:
        read_file(choice)


def as_tensor(weights: Mapping[str, float] | None, labels: Sequence[str]) -> torch.Tensor | None:
    """The weights in the order of the class ids, float32 [labels]."""
    return None if weights is None else torch.tensor([weights[label] for label in labels])


def _balanced(train_labels: Iterable[str], labels: Sequence[str]) -> dict[str, float]:
    """`rows / (labels x rows of the label)`: scikit-learn's `class_weight="balanced"`."""
    counts = Counter(train_labels)
    return {label: counts.total() / (len(labels) * counts[label]) for label in labels}


def _from_file(path: str, labels: Sequence[str]) -> dict[str, float]:
    weights = read_file(path)
    problems = Problems()
    for label in sorted(set(labels) - weights.keys()):
        problems.append(f"--class_weights {path}: label {label} has no weight.")
    for label in sorted(weights.keys() - set(labels)):
        problems.append(f"--class_weights {path}: {label} is no label of the training rows ({', '.join(labels)}).")
    problems.raise_any()
    return weights


def read_file(path: str) -> dict[str, float]:
    """The weights in a JSON or YAML file, by label.

    Raises:
        UserError: it cannot be read, or holds something else than a positive number for each label.
    """
    try:
        # JSON is YAML too. Read as text alone: YAML takes a label `no` for a boolean and a weight 1e-1 for a string.
        content = yaml.load(Path(path).read_text(encoding="utf-8"), TextLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from error
    except NOT_YAML as error:
        raise _unreadable(path, without_its_text(error)) from None
    if not isinstance(content, Mapping):
        raise UserError(f"--class_weights {path}: expected label: weight, found {type(content).__name__}.")
    weights = {normalise_label(label) or "": _number(weight) for label, weight in content.items()}
    problems = Problems()
    for label, times in Counter(normalise_label(label) or "" for label in content).items():
        if times > 1:
            problems.append(f"--class_weights {path}: label {label} has {times} weights, in different spellings.")
    for label, weight in content.items():
        if not 0 < _number(weight) < float("inf"):
            problems.append(f"--class_weights {path}: {label}: {weight}: expected a number above 0.")
    problems.raise_any()
    return weights


def _unreadable(path: str, reason: str) -> UserError:
    return UserError(
        f"--class_weights {path}: cannot be read: {reason}. Expected `{BALANCED}` or a JSON or YAML file of label: "
        "weight."
    )


def _number(weight: object) -> float:
    """NaN where it is none."""
    try:
        return float(weight) if isinstance(weight, str) else float("nan")
    except ValueError:
        return float("nan")

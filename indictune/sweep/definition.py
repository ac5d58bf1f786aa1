"""What a sweep tries: the flags that it varies, its repeats, and what tells it from another sweep."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from indictune.config.command_line import unknown_name
from indictune.errors import Problems, UserError
from indictune.files import json_or_nothing

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

RECORD = "sweep.json"
_LOG_FROM = 10.0  # a range whose ends are this factor apart is searched on a log scale
# What a sweep sets for each run, or what would change the rows from one setting to the next.
_FIXED = (
    *("output_dir", "resume_from_checkpoint", "push_to_hub", "task", "config", "seed", "data_seed"),
    *("dataset_name", "dataset_config_name", "dataset_revision", "dataset_splits", "validation_split"),
    *("train_file", "train_files", "validation_file", "test_file", "metric_for_best_model", "problem_type"),
)

Words = Mapping[str, Sequence[str]]  # of flags, by name


def read_space(
    flag: str, given: Mapping[str, str], known: Collection[str], problems: Problems
) -> dict[str, BaseDistribution]:
    """What `--grid` or `--search` names, such as `1e-5..3e-4` for `learning_rate` or `full,lora` for `method`.

    `known` are the names of the flags of a run. What is refused is added to `problems`.
    """
    found = {}
    for name, values in given.items():
        with problems.collecting():
            if name in _FIXED:
                raise UserError("sweep-sets", flag, f"{name}={values}", name=name)
            if name not in known:
                raise UserError(problems=[unknown_name(name, "--", known)])
            found[name] = _distribution(flag, name, values)
    return found


def _distribution(flag: str, name: str, given: str) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # in the extra

    values, ends = given.split(","), _range(given)
    if ends is None and len({*values} - {""}) == len(values) > 1:
        return CategoricalDistribution(values)
    if ends is not None and flag == "--search":
        (low, high), (first, last) = ends, map(float, ends)
        if -math.inf < first < last < math.inf:
            if low.isdecimal() and high.isdecimal():
                return IntDistribution(int(low), int(high))
            return FloatDistribution(first, last, log=0 < first * _LOG_FROM <= last)
    raise UserError("sweep-values", flag, f"{name}={given}")


def ends_of(values: str) -> list[str]:
    """The values that a flag is given, or both ends of its range."""
    return list(_range(values) or values.split(","))


def _range(values: str) -> tuple[str, str] | None:
    """Both ends of a range of numbers, such as `1e-5..3e-4`; None for other values, such as `../a,../b`."""
    low, _, high = values.partition("..")
    try:
        float(low), float(high)
    except ValueError:
        return None
    return low, high


def typed(value: float | str) -> str:
    """A value of a flag as a word of a command line."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class SweepPlan:
    """A sweep.

    Attributes:
        definition: everything that its results depend on, by name.
        grid: the settings that are tried, in order; empty if a sampler suggests `trials` settings.
        repeats: of each setting, by the name of the folder: the flags of the run, besides those of the setting.
        metric: whose mean over the repeats is the value of a setting; the highest is best if `maximises`.
        command: the command of a run, by the flags of a setting and a repeat, and its folder.
        recipe: the flags of a run on the rows that were named, for the recipe of the best setting.
    """

    folder: Path
    definition: Mapping[str, str]
    space: Mapping[str, BaseDistribution]
    grid: Sequence[Mapping[str, str]]
    trials: int
    repeats: Mapping[str, Words]
    metric: str
    maximises: bool
    storage: str
    command: Callable[[Words, Path], list[str]]
    recipe: Words

    @property
    def study_name(self) -> str:
        """A digest of the definition: sweeps of one definition share their trials."""
        return hashlib.sha256(json.dumps(self.definition, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def block(self) -> str:
        """The block of `metrics.json` and `predictions.jsonl` that a setting is scored by: of folds, the test rows."""
        return "test" if all("test_file" in flags for flags in self.repeats.values()) else "eval"

    def folder_of(self, trial: int, repeat: str) -> Path:
        """The folder of a run."""
        return self.folder / "trials" / f"{trial:04}" / repeat


def check_definition(folder: Path, definition: Mapping[str, str]) -> None:
    """Refuse a folder that holds another sweep; a `UserError` names what differs."""
    before = json_or_nothing(folder / RECORD).get("definition", definition)
    names = [name for name in sorted({*before, *definition}) if before.get(name) != definition.get(name)]
    if names:
        differing = "; ".join(f"{name} was {before.get(name)}, and is {definition.get(name)}" for name in names)
        raise UserError("sweep-other-definition", "--output_dir", folder, differing=differing)

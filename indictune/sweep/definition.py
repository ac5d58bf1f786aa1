"""What a sweep tries: the flags that it varies, its repeats, and what tells it from another sweep."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indictune.config.command_line import unknown_name
from indictune.errors import Problems, UserError
from indictune.files import json_or_nothing

if TYPE_CHECKING:
    from optuna import Trial

RECORD = "sweep.json"
BEST_RECIPE = "best.yaml"
_DIGITS = 4  # of a number that is suggested
_LOG_FROM = 10.0  # a range whose ends are this factor apart is searched on a log scale
# What a sweep sets for each run, or what would change the rows from one setting to the next.
OF_THE_SWEEP = (
    *("output_dir", "resume_from_checkpoint", "push_to_hub", "task", "config"),
    *("dataset_name", "dataset_config_name", "dataset_revision", "dataset_splits", "validation_split", "data_seed"),
    *("train_file", "train_files", "validation_file", "test_file", "metric_for_best_model", "problem_type"),
)

Words = Mapping[str, Sequence[str]]  # of flags, by name


@dataclass(frozen=True)
class Dimension:
    """A flag that a sweep varies: over values as they are typed, or, if there are none, over a range of numbers."""

    name: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_whole: bool = False

    @property
    def is_log(self) -> bool:
        """Whether a range is searched on a log scale."""
        return not self.is_whole and 0 < self.low * _LOG_FROM <= self.high

    @property
    def ends(self) -> tuple[str, ...]:
        """Values that are checked before anything runs: all that were typed, or both ends of a range."""
        return self.values or (self._shown(self.low), self._shown(self.high))

    def suggest(self, trial: Trial) -> str:
        """The value of a trial, as it is typed; the same again for a trial that was resumed."""
        if self.values:
            return str(trial.suggest_categorical(self.name, self.values))
        if self.is_whole:
            return str(trial.suggest_int(self.name, int(self.low), int(self.high)))
        return self._shown(trial.suggest_float(self.name, self.low, self.high, log=self.is_log))

    def _shown(self, value: float) -> str:
        return str(int(value)) if self.is_whole else f"{value:.{_DIGITS}g}"


def read_space(flag: str, words: Sequence[str], known: Collection[str], problems: Problems) -> list[Dimension]:
    """The dimensions that `--grid` or `--search` names, such as `learning_rate=1e-5..3e-4` or `method=full,lora`.

    `known` are the names of the flags of a run. Words that are refused are added to `problems`.
    """
    found = []
    for word in words:
        name, _, given = word.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        with problems.collecting():
            if name in OF_THE_SWEEP:
                raise UserError("sweep-sets", flag, word, name=name)
            if name not in known:
                raise UserError(problems=[unknown_name(name, "--", known)])
            found.append(_dimension(flag, word, name, given.strip()))
    return found


def _dimension(flag: str, word: str, name: str, given: str) -> Dimension:
    low, dots, high = given.partition("..")
    if not dots:
        values = tuple(value.strip() for value in given.split(","))
        if len(set(values)) < max(2, len(values)) or not all(values):
            raise UserError("sweep-values", flag, word, name=name)
        return Dimension(name, values)
    if flag == "--grid":
        raise UserError("sweep-grid-range", flag, word, name=name)
    try:
        numbers = float(low), float(high)
    except ValueError:
        raise UserError("sweep-range", flag, word, name=name) from None
    if not all(map(math.isfinite, numbers)) or numbers[0] >= numbers[1]:
        raise UserError("sweep-range", flag, word, name=name)
    return Dimension(name, (), *numbers, is_whole=all(end.strip().lstrip("+-").isdecimal() for end in (low, high)))


def combinations(dimensions: Sequence[Dimension]) -> list[dict[str, str]]:
    """All settings of a grid, the last dimension varying first; one empty setting without dimensions."""
    names = [each.name for each in dimensions]
    return [dict(zip(names, values, strict=True)) for values in product(*(each.values for each in dimensions))]


@dataclass(frozen=True)
class Repeat:
    """One of the runs by which a setting is tried.

    Attributes:
        name: of its folder, such as `seed-17` or `fold-0`.
        flags: of the run, beside those of the setting.
        fold: whose rows it is scored on; None without folds.
        seed: of the run.
    """

    name: str
    flags: Words
    fold: int | None
    seed: int


@dataclass(frozen=True)
class SweepPlan:
    """A sweep.

    Attributes:
        definition: everything that its results depend on, as JSON has it.
        is_grid: whether all combinations are tried, in order; else a sampler suggests `trials` settings.
        repeats: of each setting.
        metric: whose mean over the repeats is the value of a setting; the highest is best if `maximises`.
        prunes: whether a setting ends early whose evaluations are worse than the median of earlier ones.
        command: the command of a run, by the flags of a setting and a repeat, and its folder.
        recipe: the flags of a run on the rows that were named, for the recipe of the best setting.
    """

    folder: Path
    definition: Mapping[str, Any]
    dimensions: Sequence[Dimension]
    is_grid: bool
    trials: int
    repeats: Sequence[Repeat]
    metric: str
    maximises: bool
    prunes: bool
    keeps_models: bool
    storage: str
    command: Callable[[Words, Path], list[str]]
    recipe: Words

    @property
    def study_name(self) -> str:
        """A digest of the definition: sweeps of one definition share their trials."""
        return hashlib.sha256(json.dumps(self.definition, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def has_folds(self) -> bool:
        """Whether settings are scored on folds of the training rows."""
        return self.repeats[0].fold is not None

    @property
    def block(self) -> str:
        """The block of `metrics.json`, and the split of `predictions.jsonl`, that a setting is scored by."""
        return "test" if self.has_folds else "eval"

    @property
    def first_seed(self) -> int:
        """Of the repeats; the samplers' too."""
        return self.repeats[0].seed

    def folder_of(self, number: int) -> Path:
        """The folder of a trial, which has one for each repeat."""
        return self.folder / "trials" / f"{number:04}"

    def check_definition(self) -> None:
        """Refuse a folder that holds another sweep; a `UserError` names what differs."""
        before = json_or_nothing(self.folder / RECORD).get("definition")
        if before is not None and (differing := _differences(before, json.loads(json.dumps(self.definition)))):
            raise UserError("sweep-other-definition", "--output_dir", self.folder, differing="; ".join(differing))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What two definitions do not share, flag by flag."""
    old, new = ({**each, **(each.get("flags") or {}), "flags": None} for each in (before, now))
    names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    return [f"{name} was {_shown(old.get(name))}, and is {_shown(new.get(name))}" for name in names]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={each}" for name, each in value.items())
    return " ".join(value) if isinstance(value, list) else "not given" if value is None else str(value)

"""Which flags a sweep varies, and over what."""

from __future__ import annotations

import optuna
import pytest

from indictune.config.command_line import flags_of
from indictune.errors import Problems
from indictune.sweep.definition import Dimension, combinations, read_space

KNOWN = flags_of("classification")


def space(flag: str, *words: str) -> tuple[list[Dimension], list[str]]:
    """The dimensions of the words, and the codes of their problems."""
    problems = Problems()
    return read_space(flag, words, KNOWN, problems), [each.code for each in problems]


@pytest.mark.parametrize(
    ("word", "is_whole", "is_log", "ends"),
    [
        ("learning_rate=1e-5..3e-4", False, True, ("1e-05", "0.0003")),
        ("learning-rate=1e-4..3e-4", False, False, ("0.0001", "0.0003")),
        ("--num_train_epochs=2..60", True, False, ("2", "60")),
        ("warmup_steps=0..0.3", False, False, ("0", "0.3")),
    ],
)
def test_a_range(word: str, is_whole: bool, is_log: bool, ends: tuple[str, ...]) -> None:
    (found,), codes = space("--search", word)
    assert (found.is_whole, found.is_log, found.ends, codes) == (is_whole, is_log, ends, [])


def test_values_are_kept_as_they_are_typed_and_a_grid_has_all_combinations() -> None:
    found, codes = space("--grid", "learning_rate=1e-4,3e-4", "num_train_epochs=2,4")
    assert codes == []
    assert combinations(found) == [
        {"learning_rate": rate, "num_train_epochs": epochs} for rate in ("1e-4", "3e-4") for epochs in ("2", "4")
    ]
    assert combinations([]) == [{}]


@pytest.mark.parametrize(
    ("flag", "word", "code"),
    [
        ("--search", "lerning_rate=1..2", "unknown-name"),
        ("--search", "learning_rate", "sweep-values"),
        ("--search", "learning_rate=", "sweep-values"),
        ("--grid", "learning_rate=1e-4", "sweep-values"),
        ("--grid", "learning_rate=1e-4,1e-4", "sweep-values"),
        ("--grid", "learning_rate=1e-4,,2e-4", "sweep-values"),
        ("--grid", "learning_rate=1e-5..1e-4", "sweep-grid-range"),
        ("--search", "learning_rate=3e-4..1e-5", "sweep-range"),
        ("--search", "learning_rate=1e-5..1e-5", "sweep-range"),
        ("--search", "learning_rate=low..high", "sweep-range"),
        ("--search", "learning_rate=1e-5..nan", "sweep-range"),
        ("--search", "learning_rate=..1e-5", "sweep-range"),
        ("--search", "output_dir=a,b", "sweep-sets"),
        ("--grid", "train_file=a.csv,b.csv", "sweep-sets"),
    ],
)
def test_words_that_name_no_flag_or_no_range_are_refused(flag: str, word: str, code: str) -> None:
    assert space(flag, word) == ([], [code])


def test_all_bad_words_are_named_at_once() -> None:
    found, codes = space("--search", "a=1..2", "learning_rate=2..1", "seed=1..3")
    assert [each.name for each in found] == ["seed"]
    assert codes == ["unknown-name", "sweep-range"]


def test_what_is_suggested_lies_between_the_ends() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    rate, epochs = Dimension("learning_rate", low=1e-5, high=1e-3), Dimension("epochs", low=1, high=3, is_whole=True)
    trials = [study.ask() for _ in range(50)]
    rates = [float(rate.suggest(each)) for each in trials]
    assert min(rates) >= 1e-5
    assert max(rates) <= 1e-3
    assert sum(value < 1e-4 for value in rates) > 15  # by its logarithm
    assert {epochs.suggest(each) for each in trials} == {"1", "2", "3"}

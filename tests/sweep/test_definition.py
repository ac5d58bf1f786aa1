"""Which flags a sweep varies, and over what."""

from __future__ import annotations

import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from indictune.config.command_line import flags_of
from indictune.errors import Problems
from indictune.sweep.definition import read_space, typed

KNOWN = flags_of("classification")


def space(flag: str, name: str, values: str) -> tuple[dict[str, BaseDistribution], list[str]]:
    """What a flag varies over, and the codes of its problems."""
    problems = Problems()
    return read_space(flag, {name: values}, KNOWN, problems), [each.code for each in problems]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("learning_rate", "1e-5..3e-4", FloatDistribution(1e-5, 3e-4, log=True)),
        ("learning_rate", "1e-4..3e-4", FloatDistribution(1e-4, 3e-4)),
        ("num_train_epochs", "2..60", IntDistribution(2, 60)),
        ("warmup_steps", "0..0.3", FloatDistribution(0, 0.3)),
        ("learning_rate", "1e-4,3e-4", CategoricalDistribution(["1e-4", "3e-4"])),
        ("model_name_or_path", "../a,../b", CategoricalDistribution(["../a", "../b"])),
    ],
)
def test_a_range_and_values(name: str, values: str, expected: BaseDistribution) -> None:
    assert space("--search", name, values) == ({name: expected}, [])


@pytest.mark.parametrize(
    ("flag", "name", "values", "code"),
    [
        ("--search", "lerning_rate", "1..2", "unknown-name"),
        ("--search", "learning_rate", "", "sweep-values"),
        ("--grid", "learning_rate", "1e-4", "sweep-values"),
        ("--grid", "learning_rate", "1e-4,1e-4", "sweep-values"),
        ("--grid", "learning_rate", "1e-4,,2e-4", "sweep-values"),
        ("--grid", "learning_rate", "1e-5..1e-4", "sweep-values"),
        ("--search", "learning_rate", "3e-4..1e-5", "sweep-values"),
        ("--search", "learning_rate", "1e-5..1e-5", "sweep-values"),
        ("--search", "learning_rate", "low..high", "sweep-values"),
        ("--search", "learning_rate", "1e-5..nan", "sweep-values"),
        ("--search", "learning_rate", "1e-5..inf", "sweep-values"),
        ("--search", "learning_rate", "..1e-5", "sweep-values"),
        ("--search", "output_dir", "a,b", "sweep-sets"),
        ("--grid", "train_file", "a.csv,b.csv", "sweep-sets"),
        ("--search", "seed", "1..3", "sweep-sets"),
    ],
)
def test_words_that_name_no_flag_or_no_range_are_refused(flag: str, name: str, values: str, code: str) -> None:
    assert space(flag, name, values) == ({}, [code])


def test_all_bad_words_are_named_at_once() -> None:
    problems = Problems()
    given = {"a": "1..2", "learning_rate": "2..1", "num_train_epochs": "1..3"}
    assert list(read_space("--search", given, KNOWN, problems)) == ["num_train_epochs"]
    assert [each.code for each in problems] == ["unknown-name", "sweep-values"]


def test_numbers_are_typed_shortly_and_values_as_they_were_typed() -> None:
    assert [typed(each) for each in (0.000123456, 3, "1e-4")] == ["0.0001235", "3", "1e-4"]

"""Problems: collected, and raised once."""

from __future__ import annotations

import pickle

import pytest

from indictune.errors import Problems, UserError, problem

SEED = problem("expected-at-least", "--seed", -1, smallest=0)
FILE = problem("no-such-file", "--train_file", "t.csv")


def test_one_problem_is_its_own_message() -> None:
    error = UserError("expected-at-least", "--seed", -1, smallest=0)
    assert error.problems == [SEED]
    assert str(error) == "--seed -1: expected at least 0. Raise it, or leave the flag out. [expected-at-least]"


def test_a_way_out_that_is_given_replaces_the_catalogues() -> None:
    error = UserError("no-effect", "--optim_args", "a=1", "Use --optim adamw_torch.", other="--optim sgd")
    assert str(error) == "--optim_args a=1 has no effect with --optim sgd. Use --optim adamw_torch. [no-effect]"


def test_several_problems_are_numbered() -> None:
    error = UserError(problems=[SEED, FILE])
    assert str(error).splitlines() == ["2 problems:", f"  1. {SEED}", f"  2. {FILE}"]


def test_a_value_cannot_pass_for_a_line_of_ours() -> None:
    error = UserError("no-such-file", "--train_file", "x\nindictune: all is well\ty")
    assert str(error).startswith("--train_file x\\nindictune: all is well\\ty: ")


def test_collecting_keeps_every_problem_of_an_error_and_continues() -> None:
    problems = Problems()
    with problems.collecting():
        raise UserError(problems=[SEED])
    with problems.collecting():
        raise UserError(problems=[SEED, FILE])
    assert problems == [SEED, FILE]


def test_collecting_lets_our_own_errors_through() -> None:
    problems = Problems()
    with pytest.raises(ZeroDivisionError), problems.collecting():
        raise ZeroDivisionError
    assert problems == []


def test_raise_any_raises_all_problems_at_once_and_nothing_without_any() -> None:
    Problems().raise_any()
    with pytest.raises(UserError) as raised:
        Problems([SEED, FILE]).raise_any()
    assert raised.value.problems == [SEED, FILE]


def test_an_error_of_a_worker_process_keeps_its_problems() -> None:
    error = pickle.loads(pickle.dumps(UserError(problems=[SEED, FILE])))
    assert error.problems == [SEED, FILE]

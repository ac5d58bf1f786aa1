"""Problems: collected, and told once."""

from __future__ import annotations

import pytest

from indictune.errors import Problems, UserError


def test_one_problem_is_its_own_message() -> None:
    error = UserError("--seed x: expected a number.")
    assert error.problems == ["--seed x: expected a number."]
    assert str(error) == "--seed x: expected a number."


def test_several_problems_are_numbered() -> None:
    error = UserError(["first.", "second."])
    assert str(error) == "2 problems:\n  1. first.\n  2. second."


def test_what_a_problem_tells_of_makes_no_line_of_its_own() -> None:
    error = UserError("label x\nindictune: all is well\tdoes not occur.")
    assert str(error) == "label x\\nindictune: all is well\\tdoes not occur."


def test_collecting_keeps_every_problem_of_an_error_and_goes_on() -> None:
    problems = Problems()
    with problems.collecting():
        raise UserError(["a", "b"])
    with problems.collecting():
        raise UserError("c")
    assert problems == ["a", "b", "c"]


def test_a_problem_that_two_checks_find_is_told_once() -> None:
    problems = Problems(["a"])
    with problems.collecting():
        raise UserError(["a", "b"])
    assert problems == ["a", "b"]


def test_collecting_lets_errors_of_ours_through() -> None:
    problems = Problems()
    with pytest.raises(ZeroDivisionError), problems.collecting():
        raise ZeroDivisionError
    assert problems == []


def test_a_check_that_needs_what_was_refused_ends_there() -> None:
    problems = Problems()
    with problems.collecting():
        raise UserError("no such file")
    with problems.collecting():
        lines = len(lines)  # noqa: F821, F841
    assert problems == ["no such file"]


def test_a_name_that_is_not_bound_without_a_problem_is_an_error_of_ours() -> None:
    with pytest.raises(UnboundLocalError), Problems().collecting():
        rows = len(rows)  # type: ignore[has-type]  # noqa: F821, F841


def test_raise_any_raises_all_problems_at_once_and_nothing_without_any() -> None:
    Problems().raise_any()
    with pytest.raises(UserError) as raised:
        Problems(["a", "b"]).raise_any()
    assert raised.value.problems == ["a", "b"]

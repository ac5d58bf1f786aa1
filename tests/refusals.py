"""Expect a user error by its code."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from indictune.errors import UserError


def refused(
    code: str, *mentioned: str, flag: str | None = None
) -> AbstractContextManager[pytest.ExceptionInfo[UserError]]:
    """A block that raises a `UserError`.

    Args:
        code: of its first problem.
        mentioned: details in its message: values, names, numbers.
        flag: of its first problem; None for any.
    """

    def fits(error: UserError) -> bool:
        return error.code == code and flag in (None, error.flag) and all(each in error.message for each in mentioned)

    return pytest.raises(UserError, check=fits)

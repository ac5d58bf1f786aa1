"""User errors as tests compare them: flag, value and code, without the sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from indictune.errors import UserError


def problems_raised(call: Callable[[], Any]) -> list[str]:
    """Flag, value and code of each problem that a call raises."""
    with pytest.raises(UserError) as raised:
        call()
    return summaries(raised.value)


def summaries(error: UserError) -> list[str]:
    """Flag, value and code of each problem, on one line."""
    return [" ".join(str(part) for part in (each.flag, each.value, each.code) if part) for each in error.problems]

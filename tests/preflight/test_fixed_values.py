"""Settings of the Trainer that must keep their value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from indictune.config.arguments import SentimentTrainingArguments
from indictune.preflight.values import FIXED, check_fixed_values
from tests.plans import codes_of, plan_of

OTHER: dict[str, Any] = {name: not value if isinstance(value, bool) else "other" for name, (value, _) in FIXED.items()}


def test_the_defaults_keep_them(tmp_path: Path) -> None:
    assert check_fixed_values(plan_of()) == []
    completed = SentimentTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    kept = {name for name, (value, _) in FIXED.items() if getattr(completed, name) == value}
    assert FIXED.keys() - kept == {"accelerator_config"}  # transformers completes it


@pytest.mark.parametrize("name", list(FIXED))
def test_another_value_is_refused(name: str) -> None:
    (found,) = check_fixed_values(plan_of({name: OTHER[name]}))
    assert (found.code, found.flag, found.value) == ("setting-is-fixed", f"--{name}", OTHER[name])


def test_all_are_reported_at_once() -> None:
    assert len(codes_of(check_fixed_values, plan_of(OTHER))) == len(FIXED) == 18

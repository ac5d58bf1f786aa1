"""What a run of several ranks checks by itself, in under a second."""

from __future__ import annotations

import json

import pytest

from tests.ranks.launching import start, torchrun


@pytest.mark.more
def test_a_run_checks_its_collectives_in_under_a_second() -> None:
    done = start([*torchrun(2), "tests/doctor/quick_half.py"])
    seconds, warnings, refusal = json.loads(done.stdout.splitlines()[-1])
    assert seconds < 1
    assert warnings == []
    assert refusal.startswith("all-reduce: rank 1 got a wrong result: ")
    assert refusal.endswith("[collective-wrong]")

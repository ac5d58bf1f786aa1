"""On a GPU, `--profile_steps` counts kernels and copies, not what Python does meanwhile."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable

import pytest

from tests.ranks.launching import Run
from tests.ranks.test_profile import FLAGS, profile_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_kernels_are_the_compute(run_under: Callable[..., Run], strategy: str) -> None:
    plain, profiled = run_under(strategy, 1), run_under(strategy, 1, *FLAGS)
    assert profiled.series("loss") == pytest.approx(plain.series("loss"), rel=1e-3)
    (rank,) = profile_of(profiled)["ranks"]
    with gzip.open(profiled.folder / "profile" / "rank-0.json.gz", "rt", encoding="utf-8") as trace:
        events = json.load(trace)["traceEvents"]
    kernels = [event["dur"] for event in events if event.get("cat") == "kernel"]
    assert kernels
    assert 0 < rank["compute_s"] < rank["step_s"]  # a tiny model leaves the GPU idle
    assert rank["steps"] * rank["compute_s"] < 1.5 * sum(kernels) / 1e6

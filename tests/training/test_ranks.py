"""What a rank tells the others."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from indictune.training.ranks import Ranks


def test_the_end_is_told_though_the_watchdog_tells_at_the_same_time(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 0, 1, "attempt")
    for step in range(1, 300):
        together = threading.Barrier(2)
        watchdog = threading.Thread(target=lambda: (together.wait(), ranks.at_step(step)))  # noqa: B023
        watchdog.start()
        together.wait()
        ranks.ended("failed", f"after step {step}")
        watchdog.join()
        told = json.loads((tmp_path / ".ranks" / "0.json").read_text(encoding="utf-8"))
        assert (told["step"], told["end"]["message"]) == (step, f"after step {step}")

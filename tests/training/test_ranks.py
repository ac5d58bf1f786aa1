"""What a rank tells the others."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from indictune.training.ranks import Ranks


def test_the_end_is_told_though_the_watchdog_tells_at_the_same_time(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 0, 1, "attempt")
    together = threading.Barrier(2)

    def tell(step: int) -> None:
        together.wait()
        ranks.at_step(step)

    for step in range(1, 300):
        watchdog = threading.Thread(target=tell, args=(step,))
        watchdog.start()
        together.wait()
        ranks.ended("failed", f"after step {step}")
        watchdog.join()
        told = json.loads((tmp_path / ".ranks" / "0.json").read_text(encoding="utf-8"))
        assert (told["step"], told["end"]["message"]) == (step, f"after step {step}")

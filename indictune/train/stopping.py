"""How a training ends that was asked to stop."""

from __future__ import annotations

from indictune.stop_signals import Stopped


def stopped_after(step: int) -> Stopped:
    """The end of a run that has saved this step."""
    return Stopped(f"stopped after step {step}, which is saved.")

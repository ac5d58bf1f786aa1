"""Where a run resumes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ResumePoint:
    """What a run continues.

    Attributes:
        checkpoint: the checkpoint to resume from; None where the run starts afresh.
        best: the best checkpoint until then; None where there is none, or it is damaged.
    """

    checkpoint: Path | None = None
    best: Path | None = None

"""The states of all generators of random numbers that a run draws from."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import safe_globals


@dataclass(frozen=True)
class RandomStates:
    """The states when this was made: of this process, and of its GPU."""

    python: Any = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=np.random.get_state)
    cpu: torch.Tensor = field(default_factory=torch.get_rng_state)
    cuda: torch.Tensor | None = field(default_factory=lambda: torch.cuda.get_rng_state() if _has_gpu() else None)

    def restore(self) -> None:
        """Draw from now on as from then on."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and _has_gpu():
            torch.cuda.set_rng_state(self.cuda)


def save(folder: Path, args: TrainingArguments) -> None:
    """Write this rank's states to a checkpoint.

    The Trainer (5.23) writes the state of one GPU where plain python was started and those of all visible ones under
    a launcher, and goes on with neither where it looks for the other, or finds fewer GPUs. Here each rank has its own.

    Raises:
        OSError, RuntimeError: the disk does not take it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(vars(RandomStates()), _path(folder, args))


def load(folder: Path, args: TrainingArguments) -> None:
    """Go on with this rank's states in a checkpoint; as they are where other ranks than these wrote it.

    Raises:
        OSError, RuntimeError, pickle.UnpicklingError: they cannot be read.
    """
    path = _path(folder, args)
    if path.is_file():
        with safe_globals():  # type: ignore[no-untyped-call]
            RandomStates(**torch.load(path, weights_only=True)).restore()


def _path(folder: Path, args: TrainingArguments) -> Path:
    """The Trainer's names."""
    return folder / ("rng_state.pth" if args.world_size == 1 else f"rng_state_{args.process_index}.pth")


def _has_gpu() -> bool:
    return torch.cuda.is_available()

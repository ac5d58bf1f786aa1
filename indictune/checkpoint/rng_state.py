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
    """The states when this was made: of this process, and of its GPUs, in the order of `_gpus`."""

    python: Any = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=np.random.get_state)
    cpu: torch.Tensor = field(default_factory=torch.get_rng_state)
    cuda: list[torch.Tensor] = field(default_factory=lambda: [torch.cuda.get_rng_state(gpu) for gpu in _gpus()])

    def restore(self) -> None:
        """Draw from now on as from then on, on as many GPUs as there are now."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for gpu, state in zip(_gpus(), self.cuda, strict=False):
            torch.cuda.set_rng_state(state, gpu)


def save(folder: Path, args: TrainingArguments) -> None:
    """Write this rank's states to a checkpoint.

    The Trainer (5.23) writes the state of one GPU under plain python, and those of all visible GPUs under a launcher.
    It restores neither where it looks for the other, or finds fewer GPUs. Here each rank has its own file, under a
    name that the Trainer does not look for: it would restore them at another time.

    Raises:
        OSError, RuntimeError: the disk does not take it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(vars(RandomStates()), _path(folder, args))


def load(folder: Path, args: TrainingArguments) -> None:
    """Restore this rank's states from a checkpoint. They stay as they are where it has none of this rank.

    Raises:
        OSError, RuntimeError, pickle.UnpicklingError: they cannot be read.
    """
    path = _path(folder, args)
    if path.is_file():
        with safe_globals():  # type: ignore[no-untyped-call]
            states = torch.load(path, weights_only=True)
        RandomStates(**states).restore()


def _path(folder: Path, args: TrainingArguments) -> Path:
    return folder / f"random_states_{args.process_index}_of_{args.world_size}.pth"


def _gpus() -> list[int]:
    """Numbers of the GPUs that this process draws on: a rank of several on its own, one process perhaps on all, over
    which `--device_map` spreads its layers. Their generators stand on the host: to ask one touches no GPU."""
    if not torch.cuda.is_available():
        return []
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return [torch.cuda.current_device()]
    return list(range(torch.cuda.device_count()))

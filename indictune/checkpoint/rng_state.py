"""Save and restore the random number generators of a run."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainingArguments, set_seed
from transformers.trainer_pt_utils import safe_globals

from indictune.checkpoint.store import step_of


@dataclass(frozen=True)
class RandomStates:
    """The current states of this process and of its GPUs, in the order of `_gpus`."""

    python: Any = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=np.random.get_state)
    cpu: torch.Tensor = field(default_factory=torch.get_rng_state)
    cuda: list[torch.Tensor] = field(default_factory=lambda: [torch.cuda.get_rng_state(gpu) for gpu in _gpus()])

    def restore(self) -> None:
        """Restore the states, on the GPUs that there are now."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for gpu, state in zip(_gpus(), self.cuda, strict=False):
            torch.cuda.set_rng_state(state, gpu)


def save(folder: Path, args: TrainingArguments) -> None:
    """Write this rank's states to a checkpoint.

    The Trainer (5.23) saves one GPU under plain python and all visible GPUs under a launcher, and restores neither
    under the other. Each rank has its own file, which the Trainer ignores: it would restore it too early.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(vars(RandomStates()), _path(folder, args))


def load(folder: Path, args: TrainingArguments, is_same_split: bool) -> None:
    """Restore this rank's states from a checkpoint, or seed all ranks alike by its step.

    Ranks of a tensor group must draw the same dropout masks, or their copies of unsplit weights drift apart. Under
    another split, the states of these ranks may differ.

    Args:
        folder: the checkpoint.
        args: of the run.
        is_same_split: whether the axes of the run that wrote it were the same.
    """
    path = _path(folder, args)
    if not (is_same_split and path.is_file()):
        set_seed(args.seed + step_of(folder))
    else:
        with safe_globals():  # type: ignore[no-untyped-call]
            states = torch.load(path, weights_only=True)
        RandomStates(**states).restore()


def _path(folder: Path, args: TrainingArguments) -> Path:
    return folder / f"random_states_{args.process_index}_of_{args.world_size}.pth"


def _gpus() -> list[int]:
    """The GPUs that this process draws numbers on: its own, or all for a single process (`--device_map`)."""
    if not torch.cuda.is_available():
        return []
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return [torch.cuda.current_device()]
    return list(range(torch.cuda.device_count()))

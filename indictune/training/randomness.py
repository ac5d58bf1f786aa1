"""The states of all generators of random numbers that a run draws from."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RandomStates:
    """The states when this was made."""

    python: Any = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=np.random.get_state)
    cpu: torch.Tensor = field(default_factory=torch.get_rng_state)
    gpus: list[torch.Tensor] = field(default_factory=torch.cuda.get_rng_state_all)  # empty without a GPU

    def restore(self) -> None:
        """Draw from now on as from then on."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        torch.cuda.set_rng_state_all(self.gpus)

"""Files that tell when their code is run: each creates another file then."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from indictune.models import builtin

# All that a run reads or writes as a pickle, under any strategy.
PICKLES = (
    *("optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_0.pth", "training_args.bin", "pytorch_model.bin"),
    *("adapter_model.bin", "pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata", "optimizer.bin"),
    *("global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt", "global_step4/mp_rank_00_model_states.pt"),
)


@dataclass(frozen=True)
class Canary:
    """Code that creates `ran` when it is run."""

    ran: Path

    def __reduce__(self) -> tuple[type[object], tuple[str, str]]:
        return open, (str(self.ran), "w")  # type: ignore[return-value]

    @property
    def python(self) -> str:
        return f"open({str(self.ran)!r}, 'w').close()\n"

    def pickled(self, path: Path) -> None:
        """As pickle writes it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(self))

    def saved(self, path: Path) -> None:
        """As torch writes it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name == ".metadata":  # of DCP, by pickle alone
            self.pickled(path)
        else:
            torch.save(self, path)


def model_in(folder: Path) -> Path:
    """A copy of the small BERT."""
    return Path(shutil.copytree(builtin.resolve("builtin:tiny-indic-bert"), folder))

"""All state of a training run that a checkpoint holds, random generators included, without a trainer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import TrainerState, TrainingArguments, set_seed
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import safe_globals

from indictune.checkpoint.model_state import ModelState, engine_keeps
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


def save_generators(folder: Path, args: TrainingArguments) -> None:
    """Write this rank's states to a checkpoint.

    The Trainer (5.23) saves one GPU under plain python and all visible GPUs under a launcher, and restores neither
    under the other. Each rank has its own file, which the Trainer ignores: it would restore it too early.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(vars(RandomStates()), _path(folder, args))


def restore_generators(folder: Path, args: TrainingArguments, is_same_split: bool) -> None:
    """Restore this rank's states from a checkpoint, or seed all ranks alike by its step.

    Ranks of a tensor group must draw the same dropout masks, or their copies of unsplit weights drift apart. Under
    another split than that of the run that wrote the checkpoint, the states of these ranks may differ.
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


PROGRESS = "trainer_state.json"
SCHEDULER = "scheduler.pt"
SCALER = "scaler.pt"
COUNTERS = "unlogged_{rank}.json"
# What a rank has counted, so that a resumed run logs what it would have logged: `loss`, its sum since the last logged
# step, `since_step`; `task`, what the task logs in addition; `left_out`, the number of bad steps that were skipped or
# rolled back; `throughput`, rows, tokens and seconds since the run began.
Counters = dict[str, Any]


@dataclass
class TrainState:
    """The live state of a training run. All ranks must call its methods.

    Attributes:
        scaler: of the loss, under fp16; else None.
        progress: step, epoch and log history. The step is also the position in the rows: batches follow from it.
        exportable: returns the callbacks with a state to save.
        save_model: writes model and tokenizer to a folder, if they are kept whole.
        best: the best checkpoint so far, or None.
    """

    model: ModelState
    scheduler: Any
    scaler: Any
    progress: TrainerState
    exportable: Callable[[], Iterable[ExportableState]]
    save_model: Callable[[Path], None]
    best: Path | None = None

    def write(self, folder: Path, counters: Counters, with_shards: bool = True) -> None:
        """Write the state and this rank's counters to a folder; shards may be written later, from copies."""
        args = self.model.args
        self.save_model(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.model.write(folder, with_shards)
        if args.should_save:
            if not engine_keeps(self.scheduler):
                torch.save(self.scheduler.state_dict(), folder / SCHEDULER)
            if self.scaler is not None:
                torch.save(self.scaler.state_dict(), folder / SCALER)
            self._write_progress(folder)
        save_generators(folder, args)
        counted = json.dumps(counters)  # a float32 is exact as the float that JSON writes
        (folder / COUNTERS.format(rank=args.process_index)).write_text(counted, encoding="utf-8")

    def _write_progress(self, folder: Path) -> None:
        """Write `trainer_state.json`, from which transformers reads the position."""
        progress = self.progress
        progress.stateful_callbacks = cast(Any, {type(each).__name__: each.state() for each in self.exportable()})
        progress.best_model_checkpoint = None if self.best is None else str(self.best)
        try:
            progress.save_to_json(str(folder / PROGRESS))
        finally:
            progress.best_model_checkpoint = None  # else the Trainer would load it at the end of the training

    def restore(self, checkpoint: Path) -> None:
        """Restore weights, optimizer states, schedule and loss scale from a checkpoint of any strategy.

        The random states are restored later, when the first batch has been read. Raises as `ModelState.restore`.
        """
        self.model.restore(checkpoint)
        if not engine_keeps(self.scheduler):
            stored = torch.load(checkpoint / SCHEDULER, weights_only=True)
            groups = len(self.model.optimizer.param_groups)
            # All groups have the same learning rate. Another strategy may have divided the parameters otherwise.
            per_group = {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs"} & stored.keys()
            self.scheduler.load_state_dict(stored | {name: stored[name][:1] * groups for name in per_group})
        if self.scaler is not None and (checkpoint / SCALER).is_file():
            self.scaler.load_state_dict(torch.load(checkpoint / SCALER, weights_only=True))


def read_counters(checkpoint: Path, rank: int | None = None) -> list[Counters]:
    """The counters in a checkpoint on this disk: of one rank, or of all."""
    paths = sorted(checkpoint.glob(COUNTERS.format(rank="*" if rank is None else rank)))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

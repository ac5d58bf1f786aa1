"""Which checkpoints a run saves by its own plan, or begins with: any other is there because it was asked to stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers.trainer_utils import SaveStrategy

from indictune.checkpoint import store

if TYPE_CHECKING:
    from indictune.train.exact_trainer import ExactTrainer


def has_this_step(trainer: ExactTrainer) -> bool:
    """Whether the run would save this step if it were not asked to stop there."""
    strategy, state = trainer.args.save_strategy, trainer.state
    if strategy == SaveStrategy.BEST:
        return state.best_global_step == state.global_step
    if strategy == SaveStrategy.NO:
        return False
    every = state.save_steps if strategy == SaveStrategy.STEPS else trainer.batches.steps_per_epoch
    return state.global_step % every == 0 or state.global_step >= state.max_steps


def planned(output_dir: Path) -> list[Path]:
    """The run's folders with a checkpoint's name that it saved by its plan or began with, or that do not tell; the
    newest first."""
    manifests = {path: store.read_manifest(path) for path in store.listed(output_dir)}
    return [path for path, manifest in manifests.items() if manifest is None or manifest.planned]

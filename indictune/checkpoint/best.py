"""Which of its checkpoints a run calls the best."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers.trainer_utils import SaveStrategy

from indictune.checkpoint import abandoned, save_schedule, store

if TYPE_CHECKING:
    from indictune.train.exact_trainer import ExactTrainer


def is_compared(trainer: ExactTrainer) -> bool:
    """Whether what this step is evaluated to may be the best: under `--load_best_model_at_end`, where it is a step
    that the run saves by its own plan.

    Of any other step no weights are kept, or only because the run was asked to stop there: the model at its end would
    be another than that of a run which was not. Under `--save_strategy epoch` each evaluated step is saved
    (`check_best`), under `best` each that is the best.
    """
    if not trainer.args.load_best_model_at_end or trainer.args.save_strategy != SaveStrategy.STEPS:
        return True
    return save_schedule.has_this_step(trainer)


def name(trainer: ExactTrainer) -> None:
    """Name the best checkpoint in the state, while one is written: the Trainer has looked for it beside that."""
    state = trainer.state
    if state.best_global_step:
        path = store.path_of(Path(str(trainer.args.output_dir)), state.best_global_step)
        if state.best_global_step == state.global_step or path.is_dir():
            state.best_model_checkpoint = str(path)


def best_of(checkpoint: Path) -> Path | None:
    """The folder of the best checkpoint that a whole one names; None where it names none.

    It is beside it, or in what the run has left behind (`abandoned`), or in what it has left that behind for.
    """
    step = store.best_step(checkpoint)
    if step is None:
        return None
    beside = store.path_of(checkpoint.parent, step)
    of_the_run = abandoned.run_of(checkpoint)
    others = [store.path_of(folder, step) for folder in (of_the_run, *abandoned.folders(of_the_run))]
    found = [each for each in others if each.is_dir() and store.is_best_of(each, checkpoint)]
    return found[0] if found and not beside.is_dir() else beside

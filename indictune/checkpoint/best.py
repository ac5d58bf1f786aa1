"""Which of its checkpoints a run calls the best."""

from __future__ import annotations

from pathlib import Path

from indictune.checkpoint import abandoned, store


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

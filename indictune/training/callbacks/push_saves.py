"""Push the model of each checkpoint to the Hub, while the training continues."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.checkpoint import store
from indictune.hub.publish import Destination, PushError, model_files, published, reason_of, upload

logger = logging.getLogger(__name__)

_COPY = ".push"  # a folder in the run's with links to the files that are pushed: the checkpoint may be deleted


@dataclass(eq=False)
class PushSaves(TrainerCallback):
    """Pushes in a thread of rank 0. A checkpoint that is saved during a push is left out.

    A push that fails is a warning: the next save, or the end of the run, pushes again.
    """

    output_dir: Path
    to: Destination
    _thread: Thread | None = None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        checkpoint = store.path_of(self.output_dir, state.global_step)
        if not state.is_world_process_zero or not checkpoint.is_dir():  # a snapshot is in memory
            return
        if self._thread is not None and self._thread.is_alive():
            logger.info("%s is not pushed: the push before it is not finished", checkpoint.name)
            return
        copy, names = self.output_dir / _COPY, published(checkpoint, model_files(checkpoint))
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for name in names:
            _link(checkpoint / name, copy / name)
        title = f"Step {state.global_step}"
        self._thread = Thread(target=self._push, args=(copy, names, title), name="push", daemon=True)
        self._thread.start()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Wait for the last push: that of the finished model follows."""
        if self._thread is not None:
            self._thread.join()
            shutil.rmtree(self.output_dir / _COPY, ignore_errors=True)

    def _push(self, folder: Path, names: list[str], title: str) -> None:
        try:
            logger.info("%s: pushed to %s", title, upload(folder, names, self.to, title))
        except PushError as error:
            cause = error.__cause__ or error
            logger.warning("%s is not pushed: %s. The run continues.", title, reason_of(cause))


def _link(source: Path, target: Path) -> None:
    """Link a file, or copy it where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)

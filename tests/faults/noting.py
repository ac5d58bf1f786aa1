"""Run a training script and note the rows that it trains on; the variable MUTANT leaves something out.

    ROWS=FOLDER python tests/faults/noting.py SCRIPT FLAGS...

FOLDER gets a file for each rank and number of rows of the data set, with a line for each row that is read.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from indictune.checkpoint import model_state
from indictune.checkpoint.model_state import ModelState
from indictune.data.collation import IndexedRows, Row


def note_rows(folder: Path) -> None:
    """Arrange for the notes."""
    read = IndexedRows.__getitem__

    def noted(self: IndexedRows, index: int) -> Row:
        with (folder / f"{len(self)}-{os.environ.get('RANK', '0')}").open("a", encoding="utf-8") as file:
            file.write(f"{index}\n")
        return read(self, index)

    IndexedRows.__getitem__ = noted  # type: ignore[method-assign]


def fresh_states() -> None:
    """The optimizer forgets what it had summed up; the learning rate goes on."""

    def weights_alone(self: ModelState, checkpoint: Path) -> None:
        self.restore_weights(checkpoint)

    ModelState.restore = weights_alone  # type: ignore[method-assign]


def fresh_weights() -> None:
    """The weights are those that the first run began with."""
    model_state.load_weights = lambda model, checkpoint: None


MUTANTS = {"": lambda: None, "fresh_states": fresh_states, "fresh_weights": fresh_weights}

if __name__ == "__main__":
    note_rows(Path(os.environ["ROWS"]))
    MUTANTS[os.environ.get("MUTANT", "")]()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

"""A training script that notes what its model is fed: `fed.py SCRIPT FLAGS...`; the variable FED names the file."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from indictune.training.exact_trainer import ExactTrainer


def note(**words: Any) -> None:
    with Path(os.environ["FED"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(words) + "\n")


def watched(make: Any) -> Any:
    """`ExactTrainer.__init__`, whose trainer notes its dealing, and then each forward pass of its training."""

    def make_and_watch(trainer: ExactTrainer, *args: Any, **settings: Any) -> None:
        make(trainer, *args, **settings)
        batches = trainer.batches
        note(lengths=batches.lengths.tolist(), seed=batches.seed, accumulation_steps=batches.accumulation_steps)

        def note_pass(module: Any, _: Any, inputs: dict[str, Any]) -> None:
            if module.training:
                ends = inputs.get("cu_seq_lens_q")
                ends = None if ends is None else ends.tolist()
                note(step=trainer.state.global_step, shape=list(inputs["input_ids"].shape), ends=ends)

        model: Any = trainer.model
        model.register_forward_pre_hook(note_pass, with_kwargs=True)

    return make_and_watch


if __name__ == "__main__":
    ExactTrainer.__init__ = watched(ExactTrainer.__init__)  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

"""A rank that trains a tiny LLaMA for many steps, and notes the bytes it holds of its own after a few and at the end.

    [torchrun --nproc_per_node 2] tests/faults/many_steps.py FOLDER

FOLDER has the model below `base`, and gets `held-<rank>`: both numbers, without what could be given back.
"""

import ctypes
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState

sys.path.append(str(Path(__file__).parents[2]))  # a script has its own folder alone

from indictune.distributed.launch import read_launch
from indictune.distributed.process_group import start_process_group
from tests.faults.growing import held
from tests.training.tiny import answer_rows, tiny_trainer

FEW, MANY = 60, 210
# torch (2.13) keeps that many of the last collectives, 2,000 if nothing is said: full within some 300 steps.
FEW_COLLECTIVES = {"TORCH_FR_BUFFER_SIZE": "100"}


class Held(TrainerCallback):
    """The bytes after each of both."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step in (FEW, MANY):
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            self.bytes.append(held()["own"])


def main(folder: Path) -> None:
    launch = read_launch(os.environ)
    start_process_group(launch, os.environ, timeout_s=60)
    rows = answer_rows(*[5, 9] * launch.world_size)
    settings = {"per_device_train_batch_size": 2, "max_steps": MANY, "logging_steps": 10, "padded": False}
    trainer = tiny_trainer(str(folder / "base"), folder / "out", rows, **settings)
    assert trainer.args.world_size == launch.world_size
    noted = Held()
    trainer.add_callback(noted)
    trainer.train()
    (folder / f"held-{trainer.args.process_index}").write_text(json.dumps(noted.bytes), encoding="ascii")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

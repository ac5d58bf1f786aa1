"""Run scripts/train_sentiment.py on one rank, and count the bytes that it sends in each step.

`benchmarks/communication.py` starts it. It writes `$COUNTS/rank-<r>.json`. `$AS_TRAINER` keeps the Trainer's settings.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.config.arguments import DataArguments, ModelArguments, SentimentTrainingArguments
from indictune.config.recipe import read_recipe
from indictune.distributed.sharding import full_shapes, repeated_blocks
from indictune.supervise.execute import execute
from indictune.training import exact_trainer
from scripts import train_sentiment


class CountBytes(TrainerCallback):
    """Records the bytes written after each step; writes all at the end of training."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.bytes.append(written_bytes())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        noted = {"bytes": self.bytes, "parameters": parameters(others["model"])}
        path = Path(os.environ["COUNTS"]) / f"rank-{args.process_index}.json"
        path.write_text(json.dumps(noted), encoding="utf-8")


def written_bytes() -> int:
    """Bytes that this process has written, mostly to sockets (Linux)."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def parameters(model: nn.Module) -> list[dict[str, Any]]:
    """The whole `shape` of each trained parameter, and whether it is `in_a_unit` of FSDP: a block or the embedding."""
    blocks = tuple(repeated_blocks(model))
    units = [module for module in model.modules() if type(module).__name__ in blocks]
    units.append(model.get_input_embeddings())  # type: ignore[operator]
    inside = {id(parameter) for unit in units for parameter in unit.parameters()}
    sizes = full_shapes(model)
    return [
        {"shape": sizes[name], "in_a_unit": id(parameter) in inside}
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def main() -> int:
    """Run the script with the callback `CountBytes`."""
    train = vars(train_sentiment)["train"]

    def count_and_train(trainer: Any, *args: Any) -> Any:
        trainer.add_callback(CountBytes())
        return train(trainer, *args)

    if os.environ.get("AS_TRAINER"):
        setattr(exact_trainer, "set_up_communication", lambda *_: None)  # noqa: B010
    setattr(train_sentiment, "train", count_and_train)  # noqa: B010
    arguments = (ModelArguments, DataArguments, SentimentTrainingArguments)
    return execute(train_sentiment.main, read_recipe(sys.argv[1:], arguments))


if __name__ == "__main__":
    sys.exit(main())

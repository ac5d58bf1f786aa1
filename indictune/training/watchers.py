"""What watches a training run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import EarlyStoppingCallback

from indictune.training.exact import ExactTrainer
from indictune.training.nonfinite import StopOnNonFiniteLoss
from indictune.training.throughput import Throughput
from indictune.training.train_log import TrainLog


def watch(trainer: ExactTrainer, place: Callable[[int], str], output_dir: Path) -> Throughput:
    """Add the callbacks of a run to its trainer.

    Args:
        trainer: of the run.
        place: tells where a training row stands (`file:line`).
        output_dir: gets `train_log.jsonl`.

    Returns:
        The throughput, which counts while the run goes on.
    """
    throughput = Throughput(trainer.batches)
    trainer.add_callback(throughput)
    trainer.add_callback(TrainLog(output_dir / "train_log.jsonl", throughput))
    trainer.add_callback(StopOnNonFiniteLoss(trainer.nonfinite, trainer.batches, place))
    if trainer.args.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(trainer.args.early_stopping_patience))
    return throughput

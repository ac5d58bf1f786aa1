"""What watches a training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import EarlyStoppingCallback

from indictune.data.loading import Rows
from indictune.training.nonfinite import StopOnNonFiniteLoss
from indictune.training.throughput import Throughput
from indictune.training.train_log import TrainLog
from indictune.training.trainer import IndicTrainer


def watch(trainer: IndicTrainer, train: Rows, lengths: Sequence[int], output_dir: Path) -> Throughput:
    """Add the callbacks of a run to its trainer.

    Args:
        trainer: of the run.
        train: the training rows.
        lengths: tokens of each training row.
        output_dir: gets `train_log.jsonl`.

    Returns:
        The throughput, which counts while the run goes on.
    """
    throughput = Throughput(trainer.batches, lengths)
    trainer.add_callback(throughput)
    trainer.add_callback(TrainLog(output_dir / "train_log.jsonl", throughput))
    trainer.add_callback(StopOnNonFiniteLoss(trainer.loss, trainer.batches, train.place))
    if trainer.args.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(trainer.args.early_stopping_patience))
    return throughput

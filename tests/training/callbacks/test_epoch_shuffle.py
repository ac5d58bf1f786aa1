"""Each epoch deals the rows in an order of its own."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from transformers import TrainerControl, TrainerState

from indictune.config.arguments import IndicTrainingArguments
from indictune.data.batching import TrainingBatches
from indictune.training.callbacks.every_step import EpochShuffle


def test_two_epochs_have_the_same_rows_in_two_orders(tmp_path: Path) -> None:
    args = IndicTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    batches = TrainingBatches([5] * 12, 4, 1, 0, 1, seed=1)
    orders = []
    for step in (0, batches.steps_per_epoch):
        EpochShuffle(batches).on_epoch_begin(args, TrainerState(global_step=step), TrainerControl())
        orders.append(list(chain(*batches)))
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(12))
    assert orders[0] != orders[1]

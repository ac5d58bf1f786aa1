"""Batches on their way to the device."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from indictune.training.task_trainer import TaskTrainer


def test_tensors_go_and_everything_else_stays() -> None:
    trainer = cast(TaskTrainer, SimpleNamespace(args=SimpleNamespace(device=torch.device("meta"))))
    batch: dict[str, Any] = {"input_ids": torch.arange(6)[None], "max_length_q": 6}
    sent = TaskTrainer.on_device(trainer, batch)
    assert sent["input_ids"].is_meta
    assert sent["input_ids"].shape == (1, 6)
    assert sent["max_length_q"] == 6
    assert not batch["input_ids"].is_meta

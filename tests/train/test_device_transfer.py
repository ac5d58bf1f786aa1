"""Batches on their way to the device."""

from typing import Any

import torch

from indictune.train.device_transfer import sent_to_device


def test_tensors_go_and_everything_else_stays() -> None:
    batch: dict[str, Any] = {"input_ids": torch.arange(6)[None], "max_length_q": 6}
    sent = sent_to_device(batch, torch.device("meta"))
    assert sent["input_ids"].is_meta
    assert sent["input_ids"].shape == (1, 6)
    assert sent["max_length_q"] == 6
    assert not batch["input_ids"].is_meta

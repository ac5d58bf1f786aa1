"""Batches that are on their way to the device before anybody asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from indictune.data.collation import Row


class DeviceLoader(DataLoader[Row]):
    """A loader whose batches are copied from pinned memory without waiting.

    The Trainer's own copy waits for each tensor (5.23, `_prepare_input`), and finds these in place.

    Args:
        args: of the `DataLoader`.
        device: that batches go to.
        settings: of the `DataLoader`.
    """

    def __init__(self, *args: Any, device: torch.device, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._device = device

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield {
                name: value.to(self._device, non_blocking=True) if isinstance(value, torch.Tensor) else value
                for name, value in batch.items()
            }

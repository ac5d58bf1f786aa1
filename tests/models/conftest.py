"""What every test of models needs: no network, and tiny models in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from tests.models.tiny import CONFIGS, words_tokenizer


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    # The variable itself is read when the library is imported, which another test may have done already.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], str]:
    """A function: the folder of a tiny pre-trained model of an architecture, without a head, with its tokenizer."""

    def save(architecture: str) -> str:
        folder = tmp_path / f"base-{architecture}"
        torch.manual_seed(1)
        model: Any = AutoModel.from_config(CONFIGS[architecture]())  # type: ignore[no-untyped-call]
        model.save_pretrained(folder)
        words_tokenizer(None if architecture == "llama" else "[PAD]").save_pretrained(folder)
        return str(folder)

    return save

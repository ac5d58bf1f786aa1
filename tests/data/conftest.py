"""What several tests of readers, and of conversations, share."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from indictune.models import builtin


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a dataset called `set`. The test runs in its parent, with an empty cache of the library."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    return tmp_path / "set"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    """The built-in LLaMA's, without a chat template of a test before."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(builtin.resolve("builtin:tiny-indic-llama"))
    return tokenizer

"""How a classifier reads long texts, as its configuration records it."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from indictune.config.row_arguments import LongText

KEY = "text_reading"


def note_reading(config: PreTrainedConfig, long_text: LongText, max_length: int) -> None:
    """Record it for `config.json`: a model that was trained on windows gives the mean of their logits.

    A model that cuts texts, as every program does, records nothing.
    """
    if long_text == "truncate":
        vars(config).pop(KEY, None)  # of the model that the training starts from
    else:
        setattr(config, KEY, {"long_text": long_text, "max_length": max_length})


def recorded_reading(config: PreTrainedConfig) -> dict[str, Any]:
    """What `note_reading` recorded; empty for a model that cuts texts."""
    return dict(vars(config).get(KEY) or {})

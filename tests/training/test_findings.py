"""What `metrics.json` says of the training rows."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset
from transformers import BertConfig

from indictune.tasks.protocol import Tokens
from indictune.training.finish import data_facts


@pytest.mark.parametrize(
    "columns",
    [
        {"input_ids": [[1], [2], [3]]},
        {"input_ids": [[1, 2, 3], [4], [5]], "seq_lengths": [[2, 1], [1], [1]]},  # the first text has two windows
        {"input_ids": [[1, 2, 3], [4]], "seq_lengths": [[2, 1], [1]], "rows": [[7, 8], [9]]},  # the first is a pack
    ],
    ids=["plain", "windows", "packed"],
)
def test_each_training_row_is_counted_once(columns: dict[str, Any]) -> None:
    tokens = Tokens(Dataset.from_dict(columns), None, None, str)
    assert data_facts(tokens, BertConfig(), {})["rows"] == 3

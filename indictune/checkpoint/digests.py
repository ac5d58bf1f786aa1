"""Digests of the rows that a run trains on, and that it compares checkpoints on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import pyarrow as pa
from datasets import Dataset

from indictune.data.batching import TrainingBatches


def data_digest(dataset: Dataset, batches: TrainingBatches) -> str:
    """Of the rows, as tokens and labels, and of the order in which they are dealt."""
    return _rows_digest([batches.global_batch_size, batches.seed], dataset)


def validation_digest(dataset: Dataset) -> str:
    """Of the rows, as tokens, labels and languages, that a run compares its checkpoints on."""
    return _rows_digest(dataset["language"][:], dataset)


def _rows_digest(beginning: Sequence[object], dataset: Dataset) -> str:
    digest = hashlib.sha256(json.dumps(beginning).encode())
    for name in ("length", "input_ids", "labels"):
        for chunk in dataset.data[name].chunks:
            values = chunk.flatten() if pa.types.is_nested(chunk.type) else chunk
            digest.update(values.to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()

"""The digest of a step's rows: the same however they are spread, and another for other rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from accelerate.state import DistributedType
from safetensors.torch import save_file
from transformers import TrainerState

from indictune.config.plan import SINGLE
from indictune.data.batching import NO_ROW
from indictune.files import Record
from indictune.training.callbacks.parity_trace import ParityTrace

Row = tuple[list[int], int]  # tokens and label
A, B, C = ([1, 2, 3], 0), ([4, 5], 1), ([6], 1)


def save_model(folder: str, **_: Any) -> None:
    Path(folder).mkdir()
    save_file({"a": torch.ones(2)}, Path(folder, "model.safetensors"))


def rows_of(folder: Path, *steps: Sequence[Sequence[Row]]) -> list[int]:
    """The digest of each step's rows, given its micro-batches. Rows that do not count are added."""
    trainer = SimpleNamespace(
        args=SimpleNamespace(process_index=0, output_dir=str(folder), fp16=False, bf16=False, max_grad_norm=1.0),
        launch=SINGLE,
        model=torch.nn.Linear(2, 2),
        accelerator=SimpleNamespace(distributed_type=DistributedType.NO, unwrap_model=lambda model, **_: model),
        save_model=save_model,
    )
    trace = ParityTrace(cast(Any, trainer), Record(folder / "trace.jsonl"))
    loader = SimpleNamespace(collate_fn=len)
    trace.on_train_begin(train_dataloader=loader)
    number = 0
    for step, batches in enumerate(steps, 1):
        for batch in batches:
            rows: list[dict[str, Any]] = [{"input_ids": np.array([1, 1]), "labels": np.array(-100), "row": NO_ROW}]
            for tokens, label in batch:
                rows.append({"input_ids": np.array(tokens), "labels": np.array(label), "row": (number := number + 1)})
            assert loader.collate_fn(rows) == len(rows)
        trace.on_step_end(cast(Any, trainer.args), TrainerState(global_step=step), cast(Any, None))
    lines = (folder / "trace.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    return [json.loads(line)["rows"] for line in lines]


def test_the_digest_does_not_depend_on_how_rows_are_spread(tmp_path: Path) -> None:
    assert len(set(rows_of(tmp_path, [[A, B, C]], [[C], [B, A]], [[B], [], [A], [C]]))) == 1


@pytest.mark.parametrize("other", [[A, B], [A, B, B], [A, B, ([6], 0)], [A, B, ([7], 1)], [A, B, ([6, 6], 1)]])
def test_other_rows_have_another_digest(tmp_path: Path, other: list[Row]) -> None:
    first, second = rows_of(tmp_path, [[A, B, C]], [other])
    assert first != second

"""Record what the steps of a run follow from, for `indictune parity`."""

from __future__ import annotations

import shutil
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.data.batching import NO_ROW
from indictune.data.collation import Row
from indictune.distributed.collectives import gather_from_all
from indictune.distributed.devices import dtype_of
from indictune.distributed.parallelism import max_norm
from indictune.distributed.sharding import unwrapped
from indictune.files import Record
from indictune.tasks.protocol import Collator
from indictune.training.exact_trainer import ExactTrainer

_INITIAL = "initial-weights"  # removed once they are hashed


@dataclass(eq=False)
class ParityTrace(TrainerCallback):
    """Writes a line for the start and one for each step, on rank 0.

    The start has digests of the whole initial weights, the types, and the limit of the gradient's norm. A step has a
    digest of the rows of its global batch, however they are spread, the norm after clipping, and the use of random
    numbers. The loss is in `train_log.jsonl`. Rows are read in this process (`--dataloader_num_workers 0`).
    """

    trainer: ExactTrainer
    record: Record
    _rows = 0  # sum of the digests of rows since the last step
    _generator = 0
    _clipped: float | None = None
    _draws = False

    def on_train_begin(self, *_: Any, **more: Any) -> None:
        loader = more["train_dataloader"]
        loader.collate_fn = partial(self._collate, loader.collate_fn)
        model = unwrapped(self.trainer)
        types = {"compute": dtype_of(self.trainer.args), "matmul": torch.get_float32_matmul_precision()}
        types["weights"] = " ".join(sorted({str(each.dtype) for each in model.parameters()}))
        self._write({"step": 0, "weights": self._weights(), "types": types, "max_norm": max_norm(self.trainer)})

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._generator = self._state()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._draws = self._state() != self._generator
        self._clipped = self.trainer.parallelism.norm_after_clipping(self.trainer)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        own = (self.trainer.launch.data_rank, self._rows), torch.initial_seed()
        everyone = gather_from_all(own)
        digests = {rows for rows, _ in everyone}  # ranks of one group have the same rows
        rows, seeds = sum(digest for _, digest in digests) % 2**63, [seed for _, seed in everyone]
        known = {"clipped": self._clipped, "draws": self._draws, "generator": self._generator}
        self._write({"step": state.global_step, "rows": rows, **known, "seeds": seeds})
        self._rows = 0

    def _write(self, line: dict[str, Any]) -> None:
        if self.trainer.args.process_index == 0:
            self.record.append(line)

    def _collate(self, collator: Collator, rows: list[Row]) -> Any:
        self._rows += sum(_digest(row) for row in rows if row["row"] != NO_ROW)
        return collator(rows)

    def _state(self) -> int:
        """A digest of the generator that draws this rank's masks of dropout."""
        device = self.trainer.args.device
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return zlib.crc32(state.numpy().tobytes())

    def _weights(self) -> dict[str, int]:
        """A digest of each whole weight, on rank 0. All ranks must call it."""
        folder = Path(str(self.trainer.args.output_dir)) / _INITIAL
        self.trainer.save_model(str(folder), _internal_call=True)
        if self.trainer.args.process_index != 0:
            return {}
        found = {
            name: zlib.crc32(weight.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            for file in sorted(folder.glob("*.safetensors"))
            for name, weight in load_file(file).items()
        }
        shutil.rmtree(folder)
        return found


def _digest(row: Row) -> int:
    parts = [np.asarray(row[name], dtype=np.float64) for name in ("input_ids", "labels")]
    return zlib.crc32(parts[1].tobytes(), zlib.crc32(parts[0].tobytes()))

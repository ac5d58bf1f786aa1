"""The loss of each step of a small LLaMA: ours, whose rows run end to end, beside TRL's, which are padded."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.utils.import_utils import is_torch_tf32_available

from benchmarks.contenders import Contender, Job
from benchmarks.curves import TurnsWithAttention, compare_curves, show
from benchmarks.llama import SIZES, TRL_BATCH_SIZE, compete, write_model, write_rows
from benchmarks.parts import Note, Plan

STEPS, ROWS = 24, 8 * TRL_BATCH_SIZE  # that are seen again and again
LIKE = {
    "max_length": SIZES["tiny"].max_length,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch",
    "logging_steps": 1,
    "per_device_train_batch_size": TRL_BATCH_SIZE,
}


def compare(plan: Plan, note: Note) -> None:
    """A part: all weights are trained, on the same rows in the same order; the model has no dropout.

    An adapter would start from weights that each library draws for itself.
    """
    folder = plan.folder / "losses_of_llama"
    folder.mkdir()
    write_model(folder / "model", SIZES["tiny"].model, torch.float32)
    write_rows(folder / "chats.jsonl", ROWS, SIZES["tiny"].max_length, full_length=False)
    job = Job(folder / "model", folder / "chats.jsonl", STEPS, STEPS, folder)
    ours = {**LIKE, "method": "full", "global_batch_size": TRL_BATCH_SIZE}
    plain: dict[str, Any] = {**LIKE, "method": "full", "dtype": torch.float32}
    pairs = [
        (
            Contender("curve_of_ours", settings={**ours, "bf16": "false", "tf32": "false"}),
            Contender("curve_of_trl", "longest", {**plain, "bf16": False, "tf32": False}),
        ),
        (
            Contender("curve_of_ours_bf16", settings={**ours, "bf16": "true"}),
            Contender("curve_of_trl_bf16", "longest", {**plain, "bf16": True, "tf32": is_torch_tf32_available()}),
        ),
    ]
    found = compare_curves("trl", pairs, job, partial(compete, turns=TurnsWithAttention), note)
    show(found, "LLaMA", "TRL")

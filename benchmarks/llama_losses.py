"""The loss of each step of a small LLaMA in fp32: ours, whose rows run end to end, beside TRL's, which are padded."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.contenders import Contender, Job
from benchmarks.llama import SIZES, TRL_BATCH_SIZE, compete, write_model, write_rows
from benchmarks.parts import Note, Plan
from benchmarks.speed import run_alone

STEPS = 8
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
    write_rows(folder / "chats.jsonl", STEPS * TRL_BATCH_SIZE, SIZES["tiny"].max_length, full_length=False)
    job = Job(folder / "model", folder / "chats.jsonl", STEPS, STEPS, folder)
    in_fp32 = {"method": "full", "bf16": "false", "tf32": "false", "global_batch_size": TRL_BATCH_SIZE}
    ours = run_alone(Contender("curve_of_ours", settings={**LIKE, **in_fp32}), job, compete)
    note({"steps": STEPS, "ours": ours["losses"]})
    plain: dict[str, Any] = {"method": "full", "dtype": torch.float32, "bf16": False, "tf32": False}
    trl = run_alone(Contender("curve_of_trl", "longest", {**LIKE, **plain}, tuple(ours["order"])), job, compete)
    largest = max(abs(one - other) for one, other in zip(ours["losses"], trl["losses"], strict=True))
    padding = {"ours": ours["padding_fraction"], "trl": trl["padding_fraction"]}
    note({"trl": trl["losses"], "largest": largest, "padding": padding})
    print(f"LLaMA's loss in fp32, joined rows: {largest:.1e} from TRL's padded at most (aim: 1e-4)\n", flush=True)

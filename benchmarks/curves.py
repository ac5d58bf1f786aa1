"""Loss curves of ours and of upstream in fp32 on the same batches, which must agree and fall.

The classifier is compared with transformers' Trainer, a small LLaMA with TRL.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from benchmarks import llama
from benchmarks.classifier_gpu import LABELS, SIZES, SPECIAL, job_of
from benchmarks.compare_curves import AIM, judge, problems
from benchmarks.contenders import BATCH_SIZE, Contender, Job, compete
from benchmarks.runner import Target, run_alone
from benchmarks.speed import FP32, ROWS_OF_CURVE, STEPS_OF_CURVE, Row, write_rows
from benchmarks.timed_parts import Note, Plan

OURS_IN_FP32 = {"bf16": "false", "tf32": "false"}
UPSTREAM_IN_FP32 = {"bf16": False, "tf32": False}
LLAMA_STEPS, LLAMA_ROWS = 24, 8 * llama.TRL_BATCH_SIZE  # the rows are seen again and again
LLAMA_SETTINGS = {
    "method": "full",  # each library draws its own first weights of an adapter
    "max_length": llama.SIZES["tiny"].max_length,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch",
    "logging_steps": 1,
    "per_device_train_batch_size": llama.TRL_BATCH_SIZE,
}


def compare_curves(ours: Contender, upstream: Contender, job: Job, target: Target, note: Note) -> None:
    """Train ours, then upstream on our rows in their order; note the losses and whether they agree.

    Args:
        ours: our contender.
        upstream: the other one; its title names its losses.
        job: its lap is the whole run.
        target: what a process does.
        note: takes the findings.
    """
    one = run_alone(ours, job, target)
    other = run_alone(replace(upstream, order=tuple(one["order"])), job, target)
    found = judge(one["losses"], other["losses"])
    curves = {"ours": one["losses"], upstream.title: other["losses"]}
    padding = {"ours": one["padding_fraction"], upstream.title: other["padding_fraction"]}
    note({"steps": job.steps, **curves, **found, "padding": padding})
    print(f"losses in fp32: {found['largest']:.1e} from {upstream.title}'s at most (aim: {AIM:.0e})")
    print("".join(f"WARNING: {problem}.\n" for problem in problems(found)), end="", flush=True)


def compare_with_trainer(plan: Plan, note: Note) -> None:
    """Part: our classifier without dropout, and the padded Trainer, on a few rows that name their label."""
    job = job_of(plan, "losses", STEPS_OF_CURVE)
    rows = [json.loads(line) for line in job.train_file.read_text(encoding="utf-8").splitlines()[:ROWS_OF_CURVE]]
    own_file = write_rows([name_label(row) for row in rows], job.folder / "train.jsonl")
    job = replace(job, train_file=own_file, steps_per_lap=STEPS_OF_CURVE)
    common = {**FP32, "learning_rate": SIZES[plan.size].rate_of_curve}
    note({"rows": len(rows), "global_batch_size": BATCH_SIZE, "learning_rate": common["learning_rate"]})
    trainer = Contender("trainer", "longest", common | UPSTREAM_IN_FP32)
    compare_curves(Contender("ours", settings=common | OURS_IN_FP32), trainer, job, compete, note)


def name_label(row: Row) -> Row:
    """The row with each other word replaced by the word of its label."""
    words = row["text"].split()
    words[::2] = [f"w{len(SPECIAL) + LABELS.index(row['label'])}"] * len(words[::2])
    return {**row, "text": " ".join(words)}


def compare_with_trl(plan: Plan, note: Note) -> None:
    """Part: all weights of a small LLaMA, on rows joined end to end, and TRL's padded rows."""
    folder = plan.folder / "losses_of_llama"
    folder.mkdir()
    size = llama.SIZES["tiny"]
    llama.write_model(folder / "model", size.model, torch.float32)
    llama.write_rows(folder / "chats.jsonl", LLAMA_ROWS, size.max_length)
    job = Job(folder / "model", folder / "chats.jsonl", LLAMA_STEPS, LLAMA_STEPS, folder)
    ours: dict[str, Any] = {**LLAMA_SETTINGS, **OURS_IN_FP32, "global_batch_size": llama.TRL_BATCH_SIZE}
    trl: dict[str, Any] = {**LLAMA_SETTINGS, **UPSTREAM_IN_FP32, "dtype": torch.float32}
    compare_curves(Contender("ours", settings=ours), Contender("trl", "longest", trl), job, llama.compete, note)

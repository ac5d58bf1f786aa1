"""Loss curves of ours and of upstream on the same batches: in fp32, where they agree, and in bf16, which rounds.

The classifier is compared with transformers' Trainer and with itself compiled, a small LLaMA with TRL.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from transformers.utils.import_utils import is_torch_tf32_available

from benchmarks import llama
from benchmarks.agreement import AIM, judge, problems
from benchmarks.classifier_gpu import LABELS, SIZES, SPECIAL, job_of
from benchmarks.contenders import BATCH_SIZE, Contender, Job, compete
from benchmarks.parts import Note, Plan
from benchmarks.runner import Target, run_alone
from benchmarks.speed import FP32, ROWS_OF_CURVE, STEPS_OF_CURVE, Row, write_rows

OURS = {"ours": {"bf16": "false", "tf32": "false"}, "ours_bf16": {"bf16": "true"}}
UPSTREAM: dict[str, dict[str, Any]] = {
    "": {"bf16": False, "tf32": False},
    "_bf16": {"bf16": True, "tf32": is_torch_tf32_available()},
}
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


def compare_curves(
    upstream: str, pairs: Sequence[tuple[Contender, Contender]], job: Job, target: Target, note: Note
) -> None:
    """Train two pairs, first in fp32, then in bf16; note the findings of each pair at once.

    Args:
        upstream: its name in the findings.
        pairs: ours and upstream's, which gets our rows in their order.
        job: its lap is the whole run.
        target: what a process does.
        note: takes the findings.
    """
    found: dict[str, list[float]] = {}
    for (own, other), suffix in zip(pairs, ("", "_bf16"), strict=True):
        ours = run_alone(own, job, target)
        theirs = run_alone(replace(other, order=tuple(ours["order"])), job, target)
        found |= {f"ours{suffix}": ours["losses"], f"{upstream}{suffix}": theirs["losses"]}
        finding: dict[str, Any] = {"steps": job.steps, **found}
        if suffix:
            finding[f"mean_difference{suffix}"] = fmean(ours["losses"]) - fmean(theirs["losses"])
        else:
            judged = judge(ours["losses"], theirs["losses"])
            finding |= judged
            finding["padding"] = {"ours": ours["padding_fraction"], upstream: theirs["padding_fraction"]}
            print(f"losses in fp32: {judged['largest']:.1e} from {upstream}'s at most (aim: {AIM:.0e})")
            print("".join(f"WARNING: {problem}.\n" for problem in problems(judged)), end="", flush=True)
        note(finding)


def compare_with_trainer(plan: Plan, note: Note) -> None:
    """Part: our classifier without dropout, and the padded Trainer."""
    others = [Contender(f"trainer{suffix}", "longest", settings) for suffix, settings in UPSTREAM.items()]
    _compare_classifiers("losses", "trainer", others, plan, note)


def compare_with_compiled(plan: Plan, note: Note) -> None:
    """Part: our classifier without dropout, and the same compiled."""
    compiled = {"torch_compile": "true", "torch_compile_backend": SIZES[plan.size].compiler}
    others = [Contender(f"compiled_{title}", settings={**settings, **compiled}) for title, settings in OURS.items()]
    _compare_classifiers("compiled_losses", "compiled", others, plan, note)


def _compare_classifiers(name: str, upstream: str, others: Sequence[Contender], plan: Plan, note: Note) -> None:
    """Compare on a few rows that name their label, so that the model learns within some steps."""
    job = job_of(plan, name, STEPS_OF_CURVE)
    rows = [json.loads(line) for line in job.train_file.read_text(encoding="utf-8").splitlines()[:ROWS_OF_CURVE]]
    own_file = write_rows([name_label(row) for row in rows], job.folder / "train.jsonl")
    job = replace(job, train_file=own_file, steps_per_lap=STEPS_OF_CURVE)
    common = {**FP32, "learning_rate": SIZES[plan.size].rate_of_curve}
    note({"rows": len(rows), "global_batch_size": BATCH_SIZE, "learning_rate": common["learning_rate"]})
    pairs = [
        (Contender(title, settings=common | settings), replace(other, settings=common | other.settings))
        for (title, settings), other in zip(OURS.items(), others, strict=True)
    ]
    compare_curves(upstream, pairs, job, compete, note)


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
    llama.write_rows(folder / "chats.jsonl", LLAMA_ROWS, size.max_length, full_length=False)
    job = Job(folder / "model", folder / "chats.jsonl", LLAMA_STEPS, LLAMA_STEPS, folder)
    ours = {**LLAMA_SETTINGS, "global_batch_size": llama.TRL_BATCH_SIZE}
    theirs = {**LLAMA_SETTINGS, "dtype": torch.float32}
    pairs = [
        (Contender(title, settings=ours | settings), Contender(f"trl{suffix}", "longest", theirs | upstream))
        for (title, settings), (suffix, upstream) in zip(OURS.items(), UPSTREAM.items(), strict=True)
    ]
    compare_curves("trl", pairs, job, llama.compete, note)

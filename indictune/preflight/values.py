"""Values that transformers or torch would refuse only after rows are read, or that would train nothing."""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers.utils.import_utils import is_liger_kernel_available

from indictune.config.fields import check_ranges
from indictune.config.plan import AnyPlan, RunPlan
from indictune.errors import Problem, problem
from indictune.tasks.protocol import Task

# Arguments of torch's checkpoint function that JSON can hold (torch 2.13).
CHECKPOINTING = ("debug", "determinism_check", "early_stop", "preserve_rng_state", "use_reentrant")


def check_values(plan: AnyPlan) -> list[Problem]:
    """Refuse single values out of their range."""
    training = plan.training
    found = check_ranges(training)
    if training.save_total_limit is not None and training.save_total_limit < 1:
        found.append(problem("save-total-limit", "--save_total_limit", training.save_total_limit))
    if not 0 <= training.seed < 2**32:
        found.append(problem("seed-out-of-range", "--seed", training.seed))
    duration = "num_train_epochs" if training.max_steps < 0 else "max_steps"
    if not getattr(training, duration) > 0:
        found.append(problem("nothing-to-train", f"--{duration}", getattr(training, duration)))
    return found


def check_metric(plan: RunPlan[Any, Any], task: Task[Any, Any, Any]) -> list[Problem]:
    """Refuse to compare checkpoints by a metric that the task does not have."""
    metric = str(plan.training.metric_for_best_model).removeprefix("eval_")
    known, prefix = task.metrics(plan), task.language_metrics(plan)
    if metric in known or (prefix and metric.startswith(prefix)):
        return []
    expected = " or ".join([*known, *([f"{prefix}<language>"] if prefix else [])])
    return [problem("metric-unknown", "--metric_for_best_model", metric, expected=expected)]


def check_combinations(plan: AnyPlan) -> list[Problem]:
    """Refuse values that contradict each other, or have no effect."""
    training, found = plan.training, []
    if training.bf16 and training.fp16:
        found.append(problem("bf16-and-fp16", "--bf16 true and --fp16 true"))
    if training.accelerator_config is not None:
        found.append(problem("accelerator-config", "--accelerator_config"))
    prefetch = training.dataloader_prefetch_factor
    if prefetch is not None and training.dataloader_num_workers == 0:
        found.append(
            problem("no-effect", "--dataloader_prefetch_factor", prefetch, other="--dataloader_num_workers 0")
        )
    if training.use_liger_kernel and not is_liger_kernel_available():
        found.append(problem("liger-kernel-missing", "--use_liger_kernel", "true"))
    if getattr(training, "activation_offloading", False) and not torch.accelerator.is_available():
        found.append(problem("activation-offloading-without-gpu", "--activation_offloading", "true"))
    unknown = _unknown_checkpointing_settings(training.gradient_checkpointing_kwargs)
    known = ", ".join(CHECKPOINTING)
    found += [
        problem("checkpointing-setting", "--gradient_checkpointing_kwargs", each, known=known) for each in unknown
    ]
    return found


def _unknown_checkpointing_settings(given: dict[str, Any] | str | None) -> list[str]:
    try:
        settings = {} if given is None else json.loads(given) if isinstance(given, str) else given
        return sorted(settings.keys() - set(CHECKPOINTING))
    except (ValueError, AttributeError):
        return [str(given)]

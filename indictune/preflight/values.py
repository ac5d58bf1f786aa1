"""Values that transformers or torch would refuse only after rows are read, or that would train nothing."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils.import_utils import is_liger_kernel_available

from indictune.config.fields import AUTO, check_ranges
from indictune.config.plan import AnyPlan, RowArguments, RunPlan
from indictune.errors import Problem, problem
from indictune.tasks.protocol import Task


def check_values(plan: AnyPlan) -> list[Problem]:
    """Refuse values out of their range, or that the machine does not support."""
    training = plan.training
    found = check_ranges(training)
    duration = "num_train_epochs" if training.max_steps < 0 else "max_steps"
    if not getattr(training, duration) > 0:
        found.append(problem("nothing-to-train", f"--{duration}", getattr(training, duration)))
    if training.use_liger_kernel and not is_liger_kernel_available():
        found.append(problem("liger-kernel-missing", "--use_liger_kernel", "true"))
    if getattr(training, "activation_offloading", False) and not torch.accelerator.is_available():
        found.append(problem("activation-offloading-without-gpu", "--activation_offloading", "true"))
    return found


def check_metric(plan: RunPlan[Any, Any], task: Task[Any, Any, Any]) -> list[Problem]:
    """Refuse to compare checkpoints by a metric that the task does not have."""
    metric = str(plan.training.metric_for_best_model).removeprefix("eval_")
    known, prefixes = task.metrics(plan), task.metric_prefixes(plan)
    if metric in known or metric.startswith(prefixes):
        return []
    expected = " or ".join([*known, *(f"{prefix}<name>" for prefix in prefixes)])
    return [problem("metric-unknown", "--metric_for_best_model", metric, expected=expected)]


def check_long_texts(data: RowArguments, task: Task[Any, Any, Any]) -> list[Problem]:
    """Refuse the options of texts that get one label, for another task."""
    if task.takes_long_texts:
        return []
    given = {"--long_text": vars(data).get("long_text", "truncate"), "--max_length": data.max_length}
    return [
        problem("long-text-of-another-task", flag, value)
        for flag, value in given.items()
        if value in ("head_tail", "window", AUTO)
    ]

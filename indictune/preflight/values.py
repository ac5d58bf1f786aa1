"""Values that transformers or torch would refuse only after rows are read, or that would train nothing."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils.import_utils import is_liger_kernel_available

from indictune.config.command_arguments import EvaluateArguments
from indictune.config.fields import AUTO, check_ranges
from indictune.config.plan import AnyPlan, RowArguments, RunPlan
from indictune.data.languages import scripts_of
from indictune.errors import Problem, problem
from indictune.evaluation.score_names import RATIOS, WRITTEN, near_names, score_names
from indictune.tasks.objective import facts_of
from indictune.tasks.protocol import Task, Tokens

METRIC = "--metric_for_best_model"


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
    known = task.metrics(plan)
    prefixes = tuple(f"{score}_" for score in (*task.group_scores(plan), *task.label_scores(plan)))
    if metric in known or metric.startswith(prefixes):
        return []
    near = near_names(metric, [*known, *(f"{prefix}<name>" for prefix in prefixes)])
    return [problem("metric-unknown", METRIC, metric, near=near)]


def check_metric_of_rows(metric: str, tokens: Tokens) -> list[Problem]:
    """Refuse a language, script, range of lengths or label that no row has: the first evaluation would fail.

    Args:
        metric: that `check_metric` knows.
        tokens: with validation rows.
    """
    metric, rows, labels = metric.removeprefix("eval_"), tokens.validation, tokens.labels
    assert rows is not None
    origins, samples = tokens.origins.get("validation"), tokens.samples
    of_written = WRITTEN if samples is not None and samples.rows is not None else ()
    starts = tuple(f"{score}_" for score in (*tokens.scores, *(RATIOS if labels else ()), *of_written))
    if not metric.startswith(starts):
        return []
    scripts = None if origins is None else scripts_of(origins.texts, rows["language"][:])
    known = score_names(tokens.scores, labels, facts_of(rows, scripts).groups())
    if samples is not None and samples.rows is not None:
        known |= score_names(WRITTEN, (), samples.facts().groups())
    if metric in known:
        return []
    return [problem("metric-of-unseen-language", METRIC, metric, near=near_names(metric, known))]


def check_samples(data: EvaluateArguments, task: Task[Any, Any, Any]) -> list[Problem]:
    """Refuse to let a model write answers that writes none."""
    asked = data.num_sample_generations
    return (
        [problem("writes-no-answers", "--num_sample_generations", asked)] if asked and not task.writes_answers else []
    )


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

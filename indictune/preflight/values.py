"""Values of the training that transformers or torch would refuse late, or that would break a promise."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import Trainer, get_scheduler
from transformers.training_args import ParallelMode
from transformers.utils.import_utils import is_liger_kernel_available

from indictune.config.arguments import BY_EVALUATIONS
from indictune.config.plan import AnyPlan, RowArguments, RunPlan
from indictune.config.shared_arguments import AUTO, EvaluationArguments, check_ranges
from indictune.data.languages import scripts_of
from indictune.distributed.upstream import bitsandbytes_optimizers
from indictune.errors import Problem, Problems, UserError, missing_extra, problem
from indictune.evaluation.breakdown import RATIOS, WRITTEN, near_names, score_names
from indictune.preflight.derive import has_score
from indictune.tasks.protocol import Task, Tokens, row_facts
from indictune.upstream import check_combination, numbers_in

METRIC = "--metric_for_best_model"


def check_values(plan: AnyPlan) -> list[Problem]:
    """Refuse values out of their range, or that the machine does not support."""
    training = plan.training
    found = check_ranges(vars(training))
    duration = "num_train_epochs" if training.max_steps < 0 else "max_steps"
    if not getattr(training, duration) > 0:
        found.append(problem("nothing-to-train", f"--{duration}", getattr(training, duration)))
    if training.use_liger_kernel and not is_liger_kernel_available():
        found.append(problem("liger-kernel-missing", "--use_liger_kernel", "true"))
    if getattr(training, "activation_offloading", False) and not torch.accelerator.is_available():
        found.append(problem("activation-offloading-without-gpu", "--activation_offloading", "true"))
    return found


def check_metric(plan: RunPlan[Any, Any], task: Task[Any, Any, Any]) -> list[Problem]:
    """Refuse `--metrics` that fail, and to compare checkpoints by a metric that the run does not have."""
    metric, found = str(plan.training.metric_for_best_model).removeprefix("eval_"), Problems()
    own = found.attempt(own_scores_of_plan, plan, task, plan.training.metrics)
    if own is None or has_score(task, plan, metric):
        return found
    if metric in own:
        is_known = "greater_is_better" in plan.recipe.values
        return [] if is_known else [problem("metric-without-direction", METRIC, metric)]
    grouped = (*task.group_scores(plan), *task.label_scores(plan))
    near = near_names(metric, [*task.metrics(plan), *own, *(f"{score}_<name>" for score in grouped)])
    return [problem("metric-unknown", METRIC, metric, near=near)]


def own_scores_of_plan(plan: RunPlan[Any, Any], task: Task[Any, Any, Any], given: Sequence[str]) -> list[str]:
    """The names of the scores by `--metrics`, which are tried; a `UserError` if a metric cannot be used."""
    if not given:
        return []
    from indictune.evaluation.own_metrics import FLAG, names_of_scores

    compares = task.compares(plan)
    if compares is None:
        raise UserError("metric-without-predictions", FLAG, " ".join(given))
    return names_of_scores(given, plan.model.trust_remote_code, compares, partial(has_score, task, plan))


def check_metric_of_rows(metric: str, tokens: Tokens) -> list[Problem]:
    """Refuse a language, script, range of lengths or label that no validation row has: an evaluation would fail."""
    metric, rows, labels = metric.removeprefix("eval_"), tokens.validation, tokens.labels
    assert rows is not None
    origins, samples = tokens.origins.get("validation"), tokens.samples
    of_written = WRITTEN if samples is not None and samples.rows is not None else ()
    starts = tuple(f"{score}_" for score in (*tokens.scores, *(RATIOS if labels else ()), *of_written))
    if not metric.startswith(starts):
        return []
    scripts = None if origins is None else scripts_of(origins.texts, rows["language"][:])
    known = score_names(tokens.scores, labels, row_facts(rows, scripts).groups())
    if samples is not None and samples.rows is not None:
        known |= score_names(WRITTEN, (), samples.facts().groups())
    if metric in known:
        return []
    return [problem("metric-of-unseen-language", METRIC, metric, near=near_names(metric, known))]


def check_samples(data: EvaluationArguments, task: Task[Any, Any, Any]) -> list[Problem]:
    """Refuse to let a model write answers that writes none."""
    asked = 0 if task.writes_answers else data.num_sample_generations
    return [problem("writes-no-answers", "--num_sample_generations", asked)] if asked else []


def check_long_texts(data: RowArguments, task: Task[Any, Any, Any]) -> list[Problem]:
    """Refuse the options of texts that get one label, for another task."""
    long_text, refused = vars(data).get("long_text", "truncate"), list[tuple[str, object]]()
    refused += [("--long_text", long_text)] if long_text != "truncate" and not task.takes_long_texts else []
    refused += [("--max_length", AUTO)] if data.max_length == AUTO and not task.fits_max_length else []
    return [problem("long-text-of-another-task", *each) for each in refused]


FIXED = {
    "average_tokens_across_devices": (True, "the loss is exact over all processes"),
    "dataloader_drop_last": (False, "every row is used once an epoch"),
    "dataloader_persistent_workers": (False, "the order of an epoch must not depend on where a run stopped"),
    "auto_find_batch_size": (False, "--global_batch_size fixes the batch"),
    "train_sampling_strategy": ("random", "the rows of a global batch are the same under every strategy"),
    "logging_nan_inf_filter": (False, "a NaN loss stops the run"),
    "prediction_loss_only": (False, "evaluations need the predictions"),
    "batch_eval_metrics": (False, "metrics are computed once, over all rows"),
    "eval_do_concat_batches": (True, "metrics are computed over all rows"),
    "eval_use_gather_object": (False, "results of rows are gathered as tensors"),
    "neftune_noise_alpha": (None, "its noise depends on how a global batch is cut"),
    "ignore_data_skip": (False, "a resumed run continues after its last row"),
    "restore_callback_states_from_checkpoint": (True, "a resumed run keeps the count of early stopping"),
    "save_only_model": (False, "a checkpoint holds everything that a resume needs"),
    "save_on_each_node": (False, "the run finds out whether nodes share a disk"),
    "eval_on_start": (False, "a resumed run would evaluate once more"),
    "enable_jit_checkpoint": (False, "a signal saves a checkpoint anyway"),
    "accelerator_config": (None, "accelerate does not deal the rows here"),
}


def check_fixed_values(plan: AnyPlan) -> list[Problem]:
    """Refuse settings of the Trainer that would break what a run promises."""
    given = {name: getattr(plan.training, name) for name in FIXED}
    return [
        problem("setting-is-fixed", f"--{name}", given[name], fixed=value, reason=reason)
        for name, (value, reason) in FIXED.items()
        if given[name] != value
    ]


def check_optimizer(plan: AnyPlan) -> list[Problem]:
    """Refuse an optimizer or a schedule that cannot be made."""
    refused_already = not plan.training.learning_rate >= 0
    return [] if refused_already else [*_try_optimizer(plan), *_try_schedule(plan)]


def _try_optimizer(plan: AnyPlan) -> list[Problem]:
    optim, settings_given = plan.training.optim, plan.training.optim_args
    if (missing := missing_extra("--optim", optim, "train", "bitsandbytes")) and optim in bitsandbytes_optimizers():
        return missing
    args: Any = SimpleNamespace(**vars(plan.training), parallel_mode=ParallelMode.NOT_PARALLEL)
    if args.optim_target_modules is not None:
        args.optim_target_modules = "all-linear"  # the named modules are not in this model
    model: Any = nn.Sequential(nn.Linear(1, 1))
    try:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if not {"params", "model", "optimizer_dict"} & settings.keys():  # such an optimizer chooses its weights
            kind(model.parameters(), **settings)
    except Exception as error:
        given = f" --optim_args {settings_given}" if settings_given else ""
        return [problem("optimizer-cannot-be-made", "--optim", f"{optim}{given}", reason=_reason(error))]
    return []


def _try_schedule(plan: AnyPlan) -> list[Problem]:
    name, given = plan.training.lr_scheduler_type, plan.training.lr_scheduler_kwargs
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), plan.training.learning_rate)
    try:
        settings = numbers_in(json.loads(given)) if isinstance(given, str) else given
        get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=1, scheduler_specific_kwargs=settings)
    except Exception as error:
        shown = f"{name} --lr_scheduler_kwargs {given}" if given else str(name)
        return [problem("schedule-cannot-be-made", "--lr_scheduler_type", shown, reason=_reason(error))]
    return []


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().rstrip('.')}"


_MOMENTS = ("no", "steps", "epoch")
STRATEGIES = {"logging": _MOMENTS, "eval": _MOMENTS, "save": (*_MOMENTS, "best")}


def check_schedule(plan: AnyPlan) -> list[Problem]:
    """Refuse unknown moments, and settings that need evaluations in a run without them."""
    training, found = plan.training, []
    if str(training.eval_strategy) == "no":
        found += _need_evaluations(plan, "needs-evaluations")
    for what, known in STRATEGIES.items():
        strategy, steps = getattr(training, f"{what}_strategy"), getattr(training, f"{what}_steps")
        if what == "eval" and steps is None:
            steps = training.logging_steps  # as transformers does
        if strategy not in known:
            expected = f"{', '.join(known[:-1])} or {known[-1]}"
            found.append(problem("strategy-unknown", f"--{what}_strategy", strategy, expected=expected))
        elif strategy == "steps" and not (0 < steps < 1 or (steps >= 1 and steps == int(steps))):
            found.append(problem("steps-expected", f"--{what}_steps", f"{steps:g}"))
    return found


def check_evaluations(plan: AnyPlan, has_validation: bool) -> list[Problem]:
    """Check the training arguments when validation rows are known. Without rows, nothing is evaluated."""
    if has_validation:
        return check_arguments(plan)
    without = plan.derive(eval_strategy="no", load_best_model_at_end=False)
    return _need_evaluations(plan, "needs-validation-rows") or check_arguments(without)


def _need_evaluations(plan: AnyPlan, code: str) -> list[Problem]:
    training, found = plan.training, []
    if training.early_stopping_patience is not None:
        found.append(problem(code, "--early_stopping_patience", training.early_stopping_patience))
    if training.lr_scheduler_type in BY_EVALUATIONS:
        found.append(problem(code, "--lr_scheduler_type", str(training.lr_scheduler_type)))
    return found


def check_arguments(plan: AnyPlan) -> list[Problem]:
    """Let transformers check how training arguments fit together, among them the steps of saving and evaluating."""
    if check_schedule(plan) or check_ranges(vars(plan.training)):  # reported already
        return []
    training = copy.copy(plan.training)
    training.eval_steps = training.eval_steps or training.logging_steps
    training.use_cpu = not plan.gpus
    try:
        check_combination(training)
    except ValueError as error:
        return [problem("value-refused", reason=" ".join(str(error).split()).rstrip("."))]
    return []

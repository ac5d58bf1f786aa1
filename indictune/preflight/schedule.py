"""When a run logs, evaluates and saves, and which checkpoints it compares."""

from __future__ import annotations

import copy

from indictune.config.arguments import BY_EVALUATIONS
from indictune.config.fields import check_ranges
from indictune.config.plan import AnyPlan
from indictune.errors import Problem, problem

STRATEGIES = {
    "logging": ("no", "steps", "epoch"),
    "eval": ("no", "steps", "epoch"),
    "save": ("no", "steps", "epoch", "best"),
}


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
    """Let transformers check the combination of training arguments, the moments of saving and evaluating among others.

    Its own call of `_validate_args` (5.23) comes only after the rows are prepared.
    """
    if check_schedule(plan) or check_ranges(plan.training):  # reported already
        return []
    training = copy.copy(plan.training)
    training.eval_steps = training.eval_steps or training.logging_steps
    training.use_cpu = not plan.gpus
    try:
        training._validate_args()  # type: ignore[no-untyped-call]
    except ValueError as error:
        return [problem("value-refused", reason=" ".join(str(error).split()).rstrip("."))]
    return []

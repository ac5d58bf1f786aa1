"""When a run logs, evaluates and saves, and which checkpoints it compares."""

from __future__ import annotations

from indictune.config.arguments import BY_EVALUATIONS
from indictune.config.plan import AnyPlan
from indictune.errors import Problem, problem

STRATEGIES = {
    "logging": ("no", "steps", "epoch"),
    "eval": ("no", "steps", "epoch"),
    "save": ("no", "steps", "epoch", "best"),
}


def check_schedule(plan: AnyPlan) -> list[Problem]:
    """Refuse moments that do not exist, and settings that need evaluations in a run without them."""
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
    """Check what a run compares, once it is known whether there are validation rows."""
    return check_best(plan) if has_validation else _need_evaluations(plan, "needs-validation-rows")


def _need_evaluations(plan: AnyPlan, code: str) -> list[Problem]:
    training, found = plan.training, []
    if training.early_stopping_patience is not None:
        found.append(problem(code, "--early_stopping_patience", training.early_stopping_patience))
    if training.lr_scheduler_type in BY_EVALUATIONS:
        found.append(problem(code, "--lr_scheduler_type", str(training.lr_scheduler_type)))
    return found


def check_best(plan: AnyPlan) -> list[Problem]:
    """Refuse to look for the best checkpoint where saved steps are not evaluated."""
    training = plan.training
    saves, evaluates = training.save_strategy, training.eval_strategy
    are_known = saves in STRATEGIES["save"] and evaluates in STRATEGIES["eval"]  # else `check_schedule` refuses
    if not training.load_best_model_at_end or saves == "best" or not are_known:
        return []
    if saves != evaluates:
        return [problem("best-needs-evaluation", "--save_strategy", saves, other=f"--eval_strategy {evaluates}")]
    save_steps, eval_steps = training.save_steps, training.eval_steps or training.logging_steps
    if saves == "steps" and min(save_steps, eval_steps) > 0 and not _is_multiple(save_steps, eval_steps):
        return [problem("best-needs-multiple", "--save_steps", f"{save_steps:g}", eval_steps=eval_steps)]
    return []


def _is_multiple(number: float, of: float) -> bool:
    """Of steps, or of shares of all steps."""
    in_millionths = 1_000_000 if number < 1 and of < 1 else 1  # as transformers (5.23) counts shares
    return (number < 1) == (of < 1) and (number * in_millionths) % (of * in_millionths) == 0

"""What cannot run where ranks split the tokens of a row: a check of the plan, before anything is loaded."""

from __future__ import annotations

from indictune.config.plan import AnyPlan
from indictune.errors import Problem, problem
from indictune.models.unpadded import CAUSAL, why_not_joined


def check_context(plan: AnyPlan) -> list[Problem]:
    """Refuse models and flags that context parallelism does not have."""
    if plan.launch.axes.context == 1:
        return []
    reason, config = None, plan.model_config
    if plan.head != "ForCausalLM":
        reason = "it classifies texts, which are short"
    elif config is not None:
        reason = why_not_joined(plan.model, config, CAUSAL)
    refused = [("--model_name_or_path", plan.model.model_name_or_path, reason)] if reason else []
    if plan.training.torch_compile:
        refused.append(("--torch_compile", "true", "no test compares it with one process"))
    strategy = plan.launch.strategy
    return [problem("not-under-context", flag, value, strategy=strategy, reason=why) for flag, value, why in refused]

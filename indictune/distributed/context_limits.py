"""What cannot run where ranks split the tokens of a row: a check of the plan, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

from indictune.config.plan import AnyPlan
from indictune.errors import Problem, problem
from indictune.models.unpadded import CAUSAL, why_not_joined

_OTHER_FILE = "Use accelerate_configs/ddp.yaml or fsdp2.yaml"
_LEAVE_OUT = "Leave out the flag, or use accelerate_configs/fsdp2.yaml"


def check_context(plan: AnyPlan) -> list[Problem]:
    """Refuse models and flags that context parallelism does not have."""
    if plan.launch.axes.context == 1:
        return []
    model, config, found = plan.model, plan.model_config, list[Problem]()
    if plan.head != "ForCausalLM":
        found.append(_refused(plan, "--model_name_or_path", model.model_name_or_path, "it classifies short texts"))
    elif config is not None and (reason := why_not_joined(model, config, CAUSAL)):
        is_flag = why_not_joined(replace(model, attn_implementation=None), config, CAUSAL) is None
        name = "attn_implementation" if is_flag else "model_name_or_path"
        value = getattr(model, name)
        found.append(_refused(plan, f"--{name}", value, reason, _LEAVE_OUT if is_flag else _OTHER_FILE))
    if plan.training.torch_compile:
        found.append(_refused(plan, "--torch_compile", "true", "no test compares it with one process", _LEAVE_OUT))
    return found


def _refused(plan: AnyPlan, flag: str, value: object, reason: str, instead: str = _OTHER_FILE) -> Problem:
    strategy = plan.launch.strategy
    return problem("not-under-context", flag, value, strategy=strategy, reason=reason, instead=instead)

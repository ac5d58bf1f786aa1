"""What a run needs from others: a token and a repository on the Hub, packages of loggers."""

from __future__ import annotations

from huggingface_hub import get_token
from transformers.integrations.integration_utils import get_available_reporting_integrations

from indictune.config.plan import AnyPlan
from indictune.errors import Problem, problem
from indictune.hub.push import name_of, problems_of_name


def check_hub(plan: AnyPlan) -> list[Problem]:
    """Refuse to train towards a push that cannot succeed: no token, or no valid name of a repository."""
    training, found = plan.training, []
    if not training.push_to_hub:
        return []
    if get_token() is None:
        found.append(problem("hub-token-missing", "--push_to_hub"))
    name = name_of(training.hub_model_id, plan.output_dir)
    flag, value = ("--hub_model_id", name) if training.hub_model_id else ("--output_dir", plan.output_dir)
    return found + problems_of_name(name, flag, value)


def check_loggers(plan: AnyPlan) -> list[Problem]:
    """Refuse a logger that transformers does not know or that is not installed."""
    names = plan.training.report_to
    if names in (["none"], ["all"]):
        return []
    available = get_available_reporting_integrations()  # type: ignore[no-untyped-call]
    installed = ", ".join(available)
    missing = [name for name in names if name not in available]
    return [problem("logger-missing", "--report_to", name, installed=installed) for name in missing]

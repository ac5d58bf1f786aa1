"""What a run needs of others: a token for the Hub, and the packages of loggers."""

from __future__ import annotations

from collections.abc import Sequence

from huggingface_hub import get_token
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from indictune.errors import Problems, UserError


def check_services(push_to_hub: bool, report_to: Sequence[str]) -> None:
    """Check what a run needs of others.

    Raises:
        UserError: all problems of `check_hub_token` and `check_loggers`.
    """
    problems = Problems()
    with problems.collecting():
        check_hub_token(push_to_hub)
    with problems.collecting():
        check_loggers(report_to)
    problems.raise_any()


def check_hub_token(push_to_hub: bool) -> None:
    """Refuse to train for hours towards a push that cannot be.

    Raises:
        UserError: a push was asked for, and there is no token.
    """
    if push_to_hub and get_token() is None:
        raise UserError("--push_to_hub: there is no Hugging Face token. Set HF_TOKEN, or type `hf auth login` once.")


def check_loggers(report_to: Sequence[str]) -> None:
    """Refuse a logger that transformers does not know, or whose package is not there.

    Raises:
        UserError: all such loggers, with what to type.
    """
    problems = []
    available = get_available_reporting_integrations()  # type: ignore[no-untyped-call]
    for name in report_to:
        if name in ("none", "all"):
            continue
        if name not in INTEGRATION_TO_CALLBACK:
            problems.append(f"--report_to {name}: expected none, {', '.join(INTEGRATION_TO_CALLBACK)}.")
        elif name not in available:
            problems.append(f"--report_to {name}: its package is not installed: pip install {name}.")
    if problems:
        raise UserError(problems)

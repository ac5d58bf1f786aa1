"""What a run needs of others: a token for the Hub, and the packages of loggers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from indictune.errors import Problems, UserError
from indictune.hub.push import name_of


def check_services(planned: Callable[[str], Any], output_dir: Path) -> None:
    """Check what a run needs of others.

    Args:
        planned: the value that a field of the training arguments will have.
        output_dir: of the run.

    Raises:
        UserError: all problems of `check_hub_token`, `check_repository` and `check_loggers`.
    """
    problems = Problems()
    with problems.collecting():
        check_hub_token(planned("push_to_hub"))
    with problems.collecting():
        if planned("push_to_hub"):
            check_repository(planned("hub_model_id"), output_dir)
    with problems.collecting():
        check_loggers(planned("report_to"))
    problems.raise_any()


def check_hub_token(push_to_hub: bool) -> None:
    """Refuse to train for hours towards a push that cannot be.

    Raises:
        UserError: a push was asked for, and there is no token.
    """
    if push_to_hub and get_token() is None:
        raise UserError("--push_to_hub: there is no Hugging Face token. Set HF_TOKEN, or type `hf auth login` once.")


def check_repository(hub_model_id: str | None, output_dir: Path) -> None:
    """Refuse a repository that the Hub cannot have.

    Raises:
        UserError: its name, which is the folder's where none is given, has signs that no name has.
    """
    name = name_of(hub_model_id, output_dir)
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        given = f"--hub_model_id {name}" if hub_model_id else f"--push_to_hub: --output_dir {output_dir}"
        said = str(error).strip().rstrip(".:")
        raise UserError(f"{given}: is no name of a repository ({said}). Give --hub_model_id YOU/NAME.") from error


def check_loggers(report_to: Sequence[str]) -> None:
    """Refuse a logger that transformers does not know, or whose package is not there.

    Raises:
        UserError: all such loggers, with what to type.
    """
    problems = []
    available = get_available_reporting_integrations()  # type: ignore[no-untyped-call]
    for name in report_to:
        if name in ("none", "all"):
            if len(report_to) > 1:
                problems.append(
                    f"--report_to {' '.join(report_to)}: {name} stands alone; leave it out, or the others."
                )
            continue
        if name not in INTEGRATION_TO_CALLBACK:
            problems.append(f"--report_to {name}: expected none, {', '.join(INTEGRATION_TO_CALLBACK)}.")
        elif name not in available:
            problems.append(f"--report_to {name}: its package is not installed: pip install {name}.")
    if problems:
        raise UserError(problems)

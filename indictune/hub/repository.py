"""Make the repository on the Hub when a run begins."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from indictune.checkpoint import store
from indictune.config.arguments import IndicTrainingArguments
from indictune.errors import UserError, problem

logger = logging.getLogger(__name__)


def make_repository(args: IndicTrainingArguments, make: Callable[[], None]) -> None:
    """Make the repository, so that no run trains towards a push that cannot be.

    A resumed run continues where the Hub cannot be reached: its push makes the repository too.

    Args:
        args: of the run.
        make: makes it.

    Raises:
        UserError: it could not be made, for a run that has saved nothing yet.
    """
    folder = Path(str(args.output_dir))
    try:
        make()
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".: ")
        found = problem("no-repository", "--push_to_hub", name_of(args.hub_model_id, folder), reason=reason)
        if not store.listed(folder):
            raise UserError(problems=[found]) from error
        logger.warning("%s This run continues, and its push at the end tries again.", found)


def name_of(hub_model_id: str | None, output_dir: Path) -> str:
    """The name of the repository, as the Trainer chooses it (5.23). Without a namespace it is in the user's own."""
    return hub_model_id or output_dir.absolute().name

"""The push to the Hub: the repository when a run begins, its files when it is finished."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import HfApi
from transformers import Trainer

from indictune.checkpoint import store
from indictune.config.arguments import IndicTrainingArguments
from indictune.errors import UserError
from indictune.files import METRICS, NOT_PUSHED, write_json
from indictune.hub.card import CARD, write_card
from indictune.models.atomic_folder import MODEL_FILES

logger = logging.getLogger(__name__)


def name_of(hub_model_id: str | None, output_dir: Path) -> str:
    """The name of the repository, as the Trainer chooses it (5.23). Without a namespace it is in the user's own."""
    return hub_model_id or output_dir.absolute().name


def make_repository(args: IndicTrainingArguments, make: Callable[[], None]) -> None:
    """Make the repository, so that no run trains towards an impossible push.

    A resumed run continues without the Hub: its push makes the repository too.

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
        refusal = UserError("no-repository", "--push_to_hub", name_of(args.hub_model_id, folder), reason=reason)
        if not store.listed(folder):
            raise refusal from error
        logger.warning("%s This run continues, and its push at the end tries again.", refusal.message)


def begin_push(trainer: Trainer, saved: Collection[str]) -> None:
    """Write a list of what is not pushed yet: a run that is killed while it ends would not be pushed otherwise.

    Args:
        trainer: of the run.
        saved: names of the files that this run saved as its model.
    """
    if trainer.is_world_process_zero():
        folder = Path(str(trainer.args.output_dir))
        name = trainer.hub_model_id or name_of(trainer.args.hub_model_id, folder)
        trainer.hub_model_id = name  # type: ignore[assignment]  # unset if the Hub did not answer when the run began
        write_json(folder / NOT_PUSHED, published(folder, saved))


def push(folder: Path, args: IndicTrainingArguments) -> None:
    """Upload what a finished run has not pushed yet, if anything: its model, card and metrics.

    The Trainer's own `push_to_hub` uploads the whole folder except checkpoints (5.23): logs, the recipe with paths of
    this machine, and `training_args.bin`, a pickle.

    Args:
        folder: of the run.
        args: name the repository.

    Raises:
        RuntimeError: the Hub refused, or did not answer.
    """
    not_pushed = folder / NOT_PUSHED
    if not not_pushed.is_file() or not_pushed.is_symlink():
        return
    if not (folder / CARD).is_file():  # the run was killed just before
        write_card(folder, args.hub_model_id)
    try:
        hub = HfApi()
        made = hub.create_repo(name_of(args.hub_model_id, folder), private=args.hub_private_repo, exist_ok=True)
        hub.upload_folder(
            repo_id=made.repo_id,
            folder_path=folder,
            commit_message="End of training",
            allow_patterns=published(folder, json.loads(not_pushed.read_text(encoding="utf-8"))),
            revision=args.hub_revision,
        )
    except Exception as error:
        raise RuntimeError(
            f"The model is whole in {folder}; the push failed: {error} "
            "The same command with --resume_from_checkpoint auto tries again."
        ) from error
    not_pushed.unlink()


def published(folder: Path, saved: Collection[str]) -> list[str]:
    """The files of a finished run that a push uploads: its model, card and metrics.

    The folder may also hold files of the user, of whatever names.

    Args:
        folder: of the run.
        saved: names of the files that it saved as its model.

    Returns:
        Names, without links: they may lead anywhere.
    """
    model = [name for name in saved if any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)]
    names = {*model, CARD, METRICS}
    return sorted(name for name in names if (folder / name).is_file() and not (folder / name).is_symlink())

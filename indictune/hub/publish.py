"""What a push to the Hub sends, whether the token may send it, and the push of a run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from transformers import Trainer

from indictune.checkpoint import store
from indictune.config.arguments import IndicTrainingArguments
from indictune.errors import Problem, UserError, problem
from indictune.evaluation.breakdown import EVALUATION
from indictune.files import BASELINE, METRICS, NOT_PUSHED, write_json
from indictune.hub.card import CARD, write_card
from indictune.hub.upload import Destination, reason_of, retried, status_of, upload
from indictune.models.adapters import config_file
from indictune.models.atomic_folder import MODEL_FILES

logger = logging.getLogger(__name__)

# Besides the model. Not the predictions: they hold the texts.
_DOCUMENTS = (CARD, METRICS, EVALUATION, BASELINE, "report.html", "figures/*.png")


def repository_name(hub_model_id: str | None, output_dir: Path) -> str:
    """The name of the repository, as the Trainer chooses it (5.23). Without a namespace it is in the user's own."""
    return hub_model_id or output_dir.absolute().name


def problems_of_name(name: str, flag: str, value: object, way_out: str | None = None) -> list[Problem]:
    """The problem of a repository's name that the Hub does not allow, as one of a flag's value."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return [problem("repository-name", flag, value, way_out, reason=str(error).strip().rstrip(".:"))]
    return []


def make_repository(trainer: Trainer, make: Callable[[], None]) -> None:
    """Make the repository and ask whether the token may write to it, so that no run trains towards an impossible push.

    A resumed run continues without the Hub: its push makes the repository too.

    Args:
        trainer: of the run.
        make: makes it, and gives the trainer its name.

    Raises:
        UserError: it could not be made or is not the user's, for a run that has saved nothing yet.
    """
    folder = Path(str(trainer.args.output_dir))
    try:
        retried(make)
        if trainer.is_world_process_zero():
            check_write(str(trainer.hub_model_id))
    except Exception as error:
        refusal = refusal_of(error, "--push_to_hub", repository_name(trainer.args.hub_model_id, folder))
        if not store.checkpoints_in(folder):
            raise refusal from error
        logger.warning("%s This run continues, and its push at the end tries again.", refusal.message)


def check_write(repo_id: str) -> None:
    """Ask the Hub whether the token may write to a repository.

    Raises:
        HfHubHTTPError: it may not.
    """
    retried(partial(HfApi().auth_check, repo_id, write=True))


def refusal_of(error: Exception, flag: str, name: str) -> UserError:
    """An error of the Hub as a problem of the user's, by its status."""
    codes = {401: "hub-token-refused", 403: "no-write-permission"}
    return UserError(codes.get(status_of(error) or 0, "no-repository"), flag, name, reason=reason_of(error))


def begin_push(trainer: Trainer, saved: Collection[str]) -> None:
    """Write a list of what is not pushed yet: a run that is killed while it ends would not be pushed otherwise.

    Args:
        trainer: of the run.
        saved: names of the files that this run saved as its model.
    """
    if trainer.is_world_process_zero():
        folder = Path(str(trainer.args.output_dir))
        name = trainer.hub_model_id or repository_name(trainer.args.hub_model_id, folder)
        trainer.hub_model_id = name  # type: ignore[assignment]  # unset if the Hub did not answer when the run began
        write_json(folder / NOT_PUSHED, published(folder, saved))


def publish_run(folder: Path, args: IndicTrainingArguments) -> None:
    """Upload what a finished run has not pushed yet, if anything: its model, card, metrics and report.

    The Trainer's own `push_to_hub` uploads the whole folder except checkpoints (5.23): logs, the recipe with paths of
    this machine, and `training_args.bin`, a pickle.

    Args:
        folder: of the run.
        args: name the repository.

    Raises:
        PushError: the Hub refused, or did not answer.
    """
    not_pushed = folder / NOT_PUSHED
    if not not_pushed.is_file() or not_pushed.is_symlink():
        return
    to = destination_of(folder, args)
    if not (folder / CARD).is_file():  # the run was killed just before
        write_card(folder, to.repo_id)
    saved = json.loads(not_pushed.read_text(encoding="utf-8"))
    url = upload(folder, published(folder, saved), to, "End of training")
    logger.info("Pushed to %s", url)
    not_pushed.unlink()


def destination_of(folder: Path, args: IndicTrainingArguments) -> Destination:
    """Where a run pushes to."""
    return Destination(repository_name(args.hub_model_id, folder), args.hub_private_repo, args.hub_revision)


def published(folder: Path, saved: Collection[str]) -> list[str]:
    """The files of a model's folder that a push uploads: its model, card, metrics, report and pictures.

    The folder may also hold files of the user, of whatever names.

    Args:
        folder: of the model.
        saved: names of the files that may be of the model.

    Returns:
        Names, without links: they may lead anywhere.
    """
    model = [folder / name for name in saved if any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)]
    documents = [path for pattern in _DOCUMENTS for path in folder.glob(pattern)]
    paths = [path for path in (*model, *documents) if path.is_file() and not path.is_symlink()]
    return sorted({path.relative_to(folder).as_posix() for path in paths if not path.parent.is_symlink()})


def model_files(folder: Path) -> list[str]:
    """Names in a folder that may be of its model: Python files only for a model that brings its own code."""
    config = json.loads(config_file(folder).read_text(encoding="utf-8"))
    names = (path.name for path in folder.iterdir())
    return [
        name
        for name in names
        if (name.startswith(("model", "adapter_model")) if ".safetensors" in name else True)
        and (not name.endswith(".py") or "auto_map" in config)
    ]

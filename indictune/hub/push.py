"""Upload the files of a finished run to the Hub."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers import Trainer

from indictune.files import NOT_PUSHED, write_whole
from indictune.hub.card import write_card
from indictune.hub.repository import name_of
from indictune.models.atomic_folder import MODEL_FILES

logger = logging.getLogger(__name__)

# What a command says of a push.
OF_A_PUSH = ("push_to_hub", "hub_model_id", "hub_revision", "hub_private_repo")


def begin_push(trainer: Trainer, saved: Collection[str]) -> list[str]:
    """Write the card, and that the run is not pushed yet: once it is finished, nothing else would tell.

    Args:
        trainer: of the run.
        saved: names of the files that this run saved as its model.

    Returns:
        The files to push.
    """
    if not trainer.is_world_process_zero():
        return []
    folder = Path(str(trainer.args.output_dir))
    name = trainer.hub_model_id or name_of(trainer.args.hub_model_id, folder)
    trainer.hub_model_id = name  # type: ignore[assignment]  # the Hub may have been away when this run went on
    write_card(trainer, name.rpartition("/")[2])
    names = sorted({*published(folder, saved), "metrics.json"})
    command = _by_hand(name, folder, vars(trainer.args), names)
    told = f"The model is whole in {folder}, and is not pushed. Try `{command}`; "
    write_whole(folder / NOT_PUSHED, told + "without --push_to_hub, this run is done.")
    return names


def push(trainer: Trainer, names: Collection[str]) -> None:
    """Upload the finished run: its model, its card and its metrics, and nothing else. All ranks must call it.

    Not by the Trainer's own `push_to_hub`, which uploads the whole folder but for checkpoints (5.23): logs, the recipe
    with this machine's paths, and `training_args.bin`, a pickle.

    Args:
        trainer: after all is written.
        names: of the files, from `begin_push`.

    Raises:
        RuntimeError: the Hub refused, or could not be reached; it says how to try again.
    """
    if not trainer.is_world_process_zero():
        return
    args, hub = trainer.args, HfApi()
    folder = Path(str(args.output_dir))
    assert trainer.hub_model_id is not None
    try:
        made = hub.create_repo(trainer.hub_model_id, private=args.hub_private_repo, exist_ok=True)
        hub.upload_folder(
            repo_id=made.repo_id,
            folder_path=folder,
            commit_message="End of training",
            allow_patterns=list(names),
            revision=args.hub_revision,
        )
    except Exception as error:
        again = _by_hand(trainer.hub_model_id, folder, vars(args), names)
        raise RuntimeError(f"The model is whole in {folder}; the push failed: {error} Try `{again}`.") from error
    (folder / NOT_PUSHED).unlink()


def asked_in_vain(folder: Path, asked: Mapping[str, Any], trained: Mapping[str, Any]) -> str:
    """What there is to say of a finished run that a command asks to push, and that was not to be pushed there.

    Args:
        folder: of the run.
        asked: `OF_A_PUSH`, as the command has them.
        trained: the configuration of the run.

    Returns:
        Also what pushes it; empty where there is nothing to say.
    """
    changed = [name for name in OF_A_PUSH if asked[name] != trained.get(name) and name != "hub_private_repo"]
    if not asked["push_to_hub"] or not changed:
        return ""
    name = name_of(asked["hub_model_id"], folder)
    command = _by_hand(name, folder, asked, published(folder, [path.name for path in folder.iterdir()]))
    return (
        f"--push_to_hub: the run in {folder} is finished, and was not to be pushed to {name}. Type `{command}`, if "
        "all that it names is the run's own; without --push_to_hub, this run is done."
    )


def published(folder: Path, saved: Collection[str]) -> list[str]:
    """The files of a finished run that a push uploads, of what the run itself wrote: the folder may hold files of its
    user's, of whatever names.

    Args:
        folder: of the run.
        saved: names of the files that it saved as its model.

    Returns:
        Names, without links: they may lead anywhere.
    """
    model = [name for name in saved if any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)]
    names = {*model, "README.md", "metrics.json"}
    return sorted(name for name in names if (folder / name).is_file() and not (folder / name).is_symlink())


def _by_hand(name: str, folder: Path, asked: Mapping[str, Any], names: Collection[str]) -> str:
    """The command that pushes these files."""
    revision = [] if asked["hub_revision"] is None else ["--revision", asked["hub_revision"]]
    private = ["--private"] if asked["hub_private_repo"] else []
    includes = [word for each in names for word in ("--include", each)]
    return shlex.join(["hf", "upload", name, str(folder), *private, *revision, *includes])

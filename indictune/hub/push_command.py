"""`indictune push`: upload a finished model to the Hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, get_token

from indictune.cache_folders import check_outside_checkpoints
from indictune.config.command_arguments import PushArguments
from indictune.config.recipe import read_arguments
from indictune.console_text import printable
from indictune.credentials import without_tokens
from indictune.errors import Problems, UserError, problem
from indictune.files import NOT_PUSHED, write_whole
from indictune.hub.card import CARD, write_card
from indictune.hub.card_facts import is_hub_name
from indictune.hub.publish import check_write, model_files, problems_of_name, published, refusal_of
from indictune.hub.upload import Destination, PushError, retried, upload
from indictune.models.adapters import base_of, config_file
from indictune.models.trusted_files import ADAPTER_CONFIG
from indictune.report.report_page import REPORT, write_without_texts

COMMAND = "indictune push"


def push_command(argv: Sequence[str]) -> int:
    """`indictune push DIR REPO_ID [--private --revision R --create_pr]`; returns the exit code, 1 if the push failed.

    Raises:
        UserError: all problems of the flags and the folder, or the Hub does not let this token write there.
    """
    words = list(argv)
    if len(words) > 1 and not any(word.startswith("-") for word in words[:2]):
        words.insert(1, "--repo_id")
    args = read_arguments(words, PushArguments, "--folder")
    folder = Path(args.folder)
    problems = Problems()
    for check in (_check_folder, _check_base):
        with problems.collecting():
            check(folder)
    with problems.collecting():
        _check_hub(args.repo_id)
    problems.raise_any()
    repository = _check_write(args)
    if not (folder / CARD).is_file():
        write_card(folder, repository)
    _name_repository(folder, repository)
    _leave_texts_out(folder)
    names = published(folder, model_files(folder))
    size = sum((folder / name).stat().st_size for name in names) / 1e6
    print(f"Uploading {len(names)} files ({size:,.1f} MB) to {repository}: {', '.join(names)}", flush=True)
    try:
        to = Destination(repository, args.private or None, args.revision, args.create_pr)
        url = upload(folder, names, to, "Upload by indictune push")
    except PushError as error:
        print(printable(without_tokens(f"indictune: {error}")), file=sys.stderr)
        return 1
    (folder / NOT_PUSHED).unlink(missing_ok=True)
    print(printable(f"Pushed to {url}"))
    return 0


def _check_folder(folder: Path) -> None:
    """Refuse a folder without a model, and a checkpoint, which must stay as it is."""
    if not config_file(folder).is_file() or not list(folder.glob("*.safetensors")):
        raise UserError("nothing-to-push", COMMAND, folder)
    check_outside_checkpoints(folder, COMMAND)


def _check_base(folder: Path) -> None:
    """Refuse an adapter on a base of this machine: its files name a folder here."""
    if (folder / ADAPTER_CONFIG).is_file() and not is_hub_name(base_of(folder).name):
        raise UserError("push-of-local-base", COMMAND, model=base_of(folder).name)


def _check_hub(repo_id: str) -> None:
    problems = Problems(problems_of_name(repo_id, COMMAND, repo_id, "Use a name such as you/name."))
    if get_token() is None:
        problems.append(problem("hub-token-missing", COMMAND))
    problems.raise_any()


def _check_write(args: PushArguments) -> str:
    """Make the repository and ask whether the token may write to it; returns its name with the namespace.

    A pull request needs no right to write, nor a repository of one's own.
    """
    try:
        if args.create_pr:
            return args.repo_id
        made = retried(lambda: HfApi().create_repo(args.repo_id, private=args.private or None, exist_ok=True))
        check_write(made.repo_id)
        return made.repo_id
    except Exception as error:
        raise refusal_of(error, COMMAND, args.repo_id) from error


def _leave_texts_out(folder: Path) -> None:
    """Write the report of a run again without texts of its rows, and say so."""
    if write_without_texts(folder, folder):
        print(
            printable(
                f"{REPORT} goes up without the texts of your rows. `indictune report {folder}` shows them again."
            )
        )


def _name_repository(folder: Path, repository: str) -> None:
    """Let the card's program name the repository, where it names the folder."""
    text = (folder / CARD).read_text(encoding="utf-8")
    line = f"MODEL = {json.dumps(folder.absolute().name, ensure_ascii=False)}\n"
    if line in text:
        write_whole(folder / CARD, text.replace(line, f"MODEL = {json.dumps(repository)}\n"))

"""`indictune push`: upload a finished model to the Hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, get_token
from safetensors import safe_open

from indictune.config.arguments import ModelArguments
from indictune.config.early_values import name_problems
from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import Checked, flag
from indictune.console_text import printable
from indictune.credentials import holds_token, without_tokens
from indictune.errors import Problem, Problems, UserError, problem
from indictune.files import NOT_PUSHED, check_outside_checkpoints, write_whole
from indictune.hub import publish
from indictune.hub.card import CARD, write_card
from indictune.hub.card_facts import is_hub_name
from indictune.models.adapters import base_of, config_file
from indictune.models.trusted_files import ADAPTER_CONFIG, BROKEN, explained, weights_files
from indictune.prediction.served_classifier import check_finished
from indictune.report.report_page import REPORT, write_without_texts

_COMMAND = "indictune push"


@dataclass
class PushFlags(Checked):
    """Which finished model goes to which repository of the Hub."""

    model: str = flag("", "The --output_dir of a finished run, or a merged model. May be given as a bare first word.")
    repo_id: str = flag("", "The repository, as you/name. It is made if it is missing. May be a bare second word.")
    private: bool = flag(False, "Make the repository private, if it is made.")
    revision: str | None = flag(None, "Branch, which is made if it is missing, or refs/pr/N. Default: main.")
    create_pr: bool = flag(False, "Open a pull request in a repository that exists. It needs no right to write there.")

    def check(self) -> Iterator[Problem]:
        """Refuse a missing folder or repository, and two targets."""
        yield from super().check()
        if not self.model or not self.repo_id:
            missing = "--repo_id" if self.model else "--model"
            yield problem("argument-missing", missing, usage="indictune push FOLDER YOU/NAME")
        if self.create_pr and self.revision is not None:
            yield problem("push-revision-or-pr", "--revision", self.revision)


def run_push(flags: Mapping[str, list[str]]) -> int:
    """Upload a finished model; exit code 1 if the push failed."""
    folders = [] if "model" in flags else flags.get("", [])[:1]
    repositories = flags.get("", [])[len(folders) :]
    if repositories:
        flags = {"repo_id": repositories, **flags, "": folders}
    args = read_arguments(flags, PushFlags, "model")
    folder = Path(args.model)
    problems = Problems()
    problems.attempt(_check_folder, folder)
    if config_file(folder).is_file():
        problems.attempt(check_publishable, folder, _COMMAND)
    problems.attempt(_check_base, folder)
    problems.extend(name_problems(args.repo_id, _COMMAND, args.repo_id, "Use a name such as you/name."))
    if get_token() is None:
        problems.append(problem("hub-token-missing", _COMMAND))
    problems.raise_any()
    repository = _check_write(args)
    if not (folder / CARD).is_file():
        write_card(folder, repository)
    _name_repository(folder, repository)
    names = publish.published(folder, publish.model_files(folder))
    size = sum((folder / name).stat().st_size for name in names) / 1e6
    print(f"Uploading {len(names)} files ({size:,.1f} MB) to {repository}: {', '.join(names)}", flush=True)
    try:
        to = publish.Destination(repository, args.private or None, args.revision, args.create_pr)
        with publish.staged(folder, names) as copy:
            if write_without_texts(folder, copy):
                print(f"{REPORT} goes up without the texts of your rows.")
            url = publish.upload(folder, names, to, "Upload by indictune push", copy)
    except publish.PushError as error:
        print(printable(without_tokens(f"indictune: {error}")), file=sys.stderr)
        return 1
    (folder / NOT_PUSHED).unlink(missing_ok=True)
    print(printable(f"Pushed to {url}"))
    return 0


def _check_folder(folder: Path) -> None:
    """Refuse a folder without a model, and a checkpoint, which must stay as it is."""
    if not config_file(folder).is_file() or not list(folder.glob("*.safetensors")):
        raise UserError("nothing-to-push", _COMMAND, folder)
    check_outside_checkpoints(folder, _COMMAND)


def check_publishable(folder: Path, flag: str) -> None:
    """Refuse a run that has not finished, weights that are broken or hold NaN, and a token in `README.md`."""
    problems = Problems()
    problems.attempt(check_finished, folder, flag)
    if not (folder / ADAPTER_CONFIG).is_file():
        problems.attempt(weights_files, folder, flag)
    for name in publish.published(folder, publish.model_files(folder)):
        if name.endswith(".safetensors"):
            weights = ModelArguments(str(folder / name))
            with problems.collecting(), explained(weights, *BROKEN, flag=flag), safe_open(folder / name, "pt") as file:
                broken = [key for key in file.keys() if file.get_tensor(key).isnan().any()]  # noqa: SIM118
                problems.extend(problem("weights-not-numbers", flag, folder / name, weight=key) for key in broken[:1])
        elif name == CARD and holds_token((folder / CARD).read_text(encoding="utf-8", errors="replace")):
            problems.append(problem("token-in-card", flag, folder / CARD))
    problems.raise_any()


def _check_base(folder: Path) -> None:
    """Refuse an adapter on a base of this machine: its files name a folder here."""
    if (folder / ADAPTER_CONFIG).is_file() and not is_hub_name(base_of(folder).name):
        raise UserError("push-of-local-base", _COMMAND, model=base_of(folder).name)


def _check_write(args: PushFlags) -> str:
    """Make the repository and ask whether the token may write to it; returns its name with the namespace.

    A pull request needs no right to write, nor a repository of one's own.
    """
    try:
        if args.create_pr:
            return args.repo_id
        made = publish.retried(lambda: HfApi().create_repo(args.repo_id, private=args.private or None, exist_ok=True))
        publish.check_write(made.repo_id)
        return made.repo_id
    except Exception as error:
        raise publish.refusal_of(error, _COMMAND, args.repo_id) from error


def _name_repository(folder: Path, repository: str) -> None:
    text = (folder / CARD).read_text(encoding="utf-8")
    line = f"MODEL = {json.dumps(folder.absolute().name, ensure_ascii=False)}\n"
    if line in text:
        write_whole(folder / CARD, text.replace(line, f"MODEL = {json.dumps(repository)}\n"))

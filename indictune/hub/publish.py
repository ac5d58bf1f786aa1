"""What a push to the Hub sends, whether the token may send it, and the upload while the Hub comes and goes."""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import httpx2
from huggingface_hub import HfApi, set_client_factory
from huggingface_hub.errors import HfHubHTTPError
from transformers import Trainer

from indictune.checkpoint import store
from indictune.config.arguments import IndicTrainingArguments
from indictune.errors import UserError
from indictune.evaluation.breakdown import EVALUATION
from indictune.files import BASELINE, METRICS, NOT_PUSHED, write_json
from indictune.hub.card import CARD, write_card
from indictune.models.adapters import config_file
from indictune.models.atomic_folder import MODEL_FILES
from indictune.upstream import hub_client

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

WAITS_S = (1, 2, 4, 8, 16)  # between the attempts; huggingface_hub (2.4) tries some requests again by itself
_LONGEST_WAIT_S = 300
_BUSY = (408, 409, 429)  # statuses of a Hub that may take the same request later, besides those from 500
_TIMEOUT_S = 300.0  # without which huggingface_hub (2.4) waits for ever


class PushError(RuntimeError):
    """A push failed. The folder is as it was; the message ends with the command that continues it."""


@dataclass(frozen=True)
class Destination:
    """Where files go."""

    repo_id: str  # without a namespace it is in the user's own
    private: bool | None = None  # whether only its owner sees a repository that is made; None leaves that to the Hub
    revision: str | None = None  # the branch, or the reference of a pull request; None is the default branch
    create_pr: bool = False

    def command(self, folder: Path) -> str:
        """The command that pushes a folder there."""
        words = ["indictune", "push", str(folder), self.repo_id]
        words += ["--private", "true"] if self.private else []
        words += ["--revision", self.revision] if self.revision else []
        words += ["--create_pr", "true"] if self.create_pr else []
        return shlex.join(words)


@contextmanager
def staged(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """A temporary folder with links to some files of a folder. A link that is written over leaves its file alone."""
    with TemporaryDirectory(prefix="indictune-push-") as temporary:
        for name in names:
            Path(temporary, name).parent.mkdir(parents=True, exist_ok=True)
            Path(temporary, name).symlink_to((folder / name).absolute())
        yield Path(temporary)


def upload(folder: Path, names: Sequence[str], to: Destination, message: str, source: Path | None = None) -> str:
    """Upload some files of a folder in one commit or more; returns the address of the commit or the pull request.

    Their contents are those in `source`, by default the folder itself.

    A file that the Hub has already is not sent again, so an upload that failed goes on when it is called again. The
    repository and the branch are made if they are missing. A `PushError` if the Hub refused, or did not answer.
    """
    hub = HfApi()
    set_client_factory(_client)
    request = None
    try:
        made = retried(partial(hub.create_repo, to.repo_id, private=to.private, exist_ok=True))
        to = replace(to, repo_id=made.repo_id)
        if to.revision and not to.revision.startswith("refs/"):
            retried(partial(hub.create_branch, to.repo_id, branch=to.revision, exist_ok=True))
        if to.create_pr:
            request = retried(partial(hub.create_pull_request, to.repo_id, message))
            to = replace(to, create_pr=False, revision=request.git_reference)
        send = partial(hub.upload_folder, repo_id=to.repo_id, folder_path=source or folder, revision=to.revision)
        commit = retried(partial(send, allow_patterns=list(names), commit_message=message))
    except Exception as error:
        said = f"The model is whole in {folder}; the push failed: {reason_of(error)}. Continue with:"
        raise PushError(f"{said}\n  {to.command(folder)}") from error
    return commit.commit_url if request is None else request.url


def retried(call: Callable[[], _Result]) -> _Result:
    """What a call to the Hub returns. It is repeated while the Hub is busy or away, after longer and longer waits."""
    for wait_s in WAITS_S:
        try:
            return call()
        except Exception as error:
            if not is_passing(error):
                raise
            asked = next((each.response.headers.get("Retry-After", "") for each in _refusals(error)), "")
            wait_s = max(wait_s, min(int(asked) if asked.isdecimal() else 0, _LONGEST_WAIT_S))
            logger.warning("The Hub: %s. Trying again in %d s.", reason_of(error), wait_s)
            time.sleep(wait_s)
    return call()


def is_passing(error: BaseException) -> bool:
    """Whether the Hub is busy or away, rather than refuses."""
    if (status := status_of(error)) is not None:
        return status >= 500 or status in _BUSY
    passing = (httpx2.TransportError, ConnectionError, TimeoutError, json.JSONDecodeError)
    return any(isinstance(each, passing) for each in _chain(error))


def status_of(error: BaseException) -> int | None:
    """The status of the HTTP answer that an error is about; None for another error."""
    return next((each.response.status_code for each in _refusals(error)), None)


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".: ")


def _refusals(error: BaseException) -> Iterator[HfHubHTTPError]:
    return (each for each in _chain(error) if isinstance(each, HfHubHTTPError))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _client() -> httpx2.Client:
    client = hub_client()
    client.timeout = httpx2.Timeout(_TIMEOUT_S, connect=30.0)
    return client


# Besides the model. Not the predictions: they hold the texts.
_DOCUMENTS = (CARD, METRICS, EVALUATION, BASELINE, "report.html", "figures/*.png")


def repository_name(hub_model_id: str | None, output_dir: Path) -> str:
    """The name of the repository, as the Trainer chooses it (5.23). Without a namespace it is in the user's own."""
    return hub_model_id or output_dir.absolute().name


def make_repository(trainer: Trainer, make: Callable[[], None]) -> None:
    """Make the repository and ask whether the token may write to it, so that no run trains towards an impossible push.

    A resumed run continues without the Hub: its push makes the repository too.

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
    """Ask the Hub whether the token may write to a repository; an `HfHubHTTPError` if not."""
    retried(partial(HfApi().auth_check, repo_id, write=True))


def refusal_of(error: Exception, flag: str, name: str) -> UserError:
    """An error of the Hub as a problem of the user's, by its status."""
    codes = {401: "hub-token-refused", 403: "no-write-permission"}
    return UserError(codes.get(status_of(error) or 0, "no-repository"), flag, name, reason=reason_of(error))


def begin_push(trainer: Trainer, saved: Collection[str]) -> None:
    """Write a list of what is not pushed yet: a run that is killed while it ends would not be pushed otherwise."""
    if trainer.is_world_process_zero():
        folder = Path(str(trainer.args.output_dir))
        name = trainer.hub_model_id or repository_name(trainer.args.hub_model_id, folder)
        trainer.hub_model_id = name  # type: ignore[assignment]  # unset if the Hub did not answer when the run began
        write_json(folder / NOT_PUSHED, published(folder, saved))


def publish_run(folder: Path, args: IndicTrainingArguments) -> None:
    """Upload what a finished run has not pushed yet, if anything: its model, card, metrics and report.

    The Trainer's own `push_to_hub` uploads the whole folder except checkpoints (5.23): logs, the recipe with paths of
    this machine, and `training_args.bin`, a pickle. A `PushError` if the Hub refused, or did not answer.
    """
    from indictune.report.report_page import write_without_texts  # slow to import

    not_pushed = folder / NOT_PUSHED
    if not not_pushed.is_file() or not_pushed.is_symlink():
        return
    to = destination_of(folder, args)
    if not (folder / CARD).is_file():  # the run was killed just before
        write_card(folder, to.repo_id)
    names = published(folder, json.loads(not_pushed.read_text(encoding="utf-8")))
    with staged(folder, names) as copy:
        write_without_texts(folder, copy)
        url = upload(folder, names, to, "End of training", copy)
    logger.info("Pushed to %s", url)
    not_pushed.unlink()


def destination_of(folder: Path, args: IndicTrainingArguments) -> Destination:
    """Where a run pushes to."""
    return Destination(repository_name(args.hub_model_id, folder), args.hub_private_repo, args.hub_revision)


def published(folder: Path, saved: Collection[str]) -> list[str]:
    """The files of a model's folder that a push uploads: its model, card, metrics, report and pictures.

    The folder may also hold files of the user, of whatever names. `saved` are those that may be of the model. Links
    are left out: they may lead anywhere.
    """
    model = [folder / name for name in saved if any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)]
    documents = [path for pattern in _DOCUMENTS for path in folder.glob(pattern)]
    paths = [path for path in (*model, *documents) if path.is_file() and not path.is_symlink()]
    return sorted({path.relative_to(folder).as_posix() for path in paths if not path.parent.is_symlink()})


def model_files(folder: Path) -> list[str]:
    """Names in a folder that may be of its model: Python files only for a model that brings its own code."""
    config = json.loads(config_file(folder).read_text(encoding="utf-8"))
    names = (path.name for path in folder.iterdir() if "auto_map" in config or path.suffix != ".py")
    return [name for name in names if ".safetensors" not in name or name.startswith(("model", "adapter_model"))]

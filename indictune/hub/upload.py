"""Upload files of a folder to the Hub, again and again while it is away."""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx2
from huggingface_hub import HfApi, set_client_factory
from huggingface_hub.errors import HfHubHTTPError

from indictune.upstream import hub_client

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

WAITS_S = (1, 2, 4, 8, 16)  # between the attempts; huggingface_hub (2.4) tries some requests again by itself
_LONGEST_WAIT_S = 300
_BUSY = (408, 409, 429)  # statuses of a Hub that may take the same request later, besides those from 500
_SILENCE_S = 300.0  # without which huggingface_hub (2.4) waits for ever


class PushError(RuntimeError):
    """A push failed. The folder is as it was; the message ends with the command that continues it."""


@dataclass(frozen=True)
class Destination:
    """Where files go.

    Attributes:
        repo_id: name of the repository; without a namespace it is in the user's own.
        private: whether only its owner sees a repository that is made; None leaves that to the Hub.
        revision: the branch or the reference of a pull request; None is the default branch.
        create_pr: open a pull request, instead of changing the branch.
    """

    repo_id: str
    private: bool | None = None
    revision: str | None = None
    create_pr: bool = False

    def command(self, folder: Path) -> str:
        """The command that pushes a folder there."""
        words = ["indictune", "push", str(folder), self.repo_id]
        words += ["--private", "true"] if self.private else []
        words += ["--revision", self.revision] if self.revision else []
        words += ["--create_pr", "true"] if self.create_pr else []
        return shlex.join(words)


def upload(folder: Path, names: Sequence[str], to: Destination, message: str) -> str:
    """Upload some files of a folder in one commit or more; returns the address of the commit or the pull request.

    A file that the Hub has already is not sent again, so an upload that failed goes on when it is called again.

    Args:
        folder: that holds the files. It is not changed.
        names: of the files, relative to the folder.
        to: where they go. The repository and the branch are made if they are missing.
        message: title of the commit.

    Raises:
        PushError: the Hub refused, or did not answer.
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
        send = partial(hub.upload_folder, repo_id=to.repo_id, folder_path=folder, revision=to.revision)
        commit = retried(partial(send, allow_patterns=list(names), commit_message=message))
    except Exception as error:
        said = f"The model is whole in {folder}; the push failed: {reason_of(error)}. Continue with:"
        raise PushError(f"{said}\n  {to.command(folder)}") from error
    return commit.commit_url if request is None else request.url


def retried(call: Callable[[], _Result]) -> _Result:
    """What a call to the Hub returns. It is repeated while the Hub is busy or away, after longer and longer waits.

    Raises:
        Exception: of the call, if the Hub refused it, or after the last attempt.
    """
    for wait_s in WAITS_S:
        try:
            return call()
        except Exception as error:
            if not is_passing(error):
                raise
            wait_s = max(wait_s, min(_asked_wait_s(error), _LONGEST_WAIT_S))
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
    return next((each.response.status_code for each in _chain(error) if isinstance(each, HfHubHTTPError)), None)


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".: ")


def _asked_wait_s(error: BaseException) -> int:
    """How long the Hub asks to wait, in seconds."""
    answers = (each.response for each in _chain(error) if isinstance(each, HfHubHTTPError))
    asked = next((answer.headers.get("Retry-After", "") for answer in answers), "")
    return int(asked) if asked.isdecimal() else 0


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def _client() -> httpx2.Client:
    client = hub_client()
    client.timeout = httpx2.Timeout(_SILENCE_S, connect=30.0)
    return client

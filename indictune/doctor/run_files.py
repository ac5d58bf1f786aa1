"""The files of a run: its rows, the disk of `--output_dir`, and its repository of the Hub."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from indictune.config.plan import AnyPlan
from indictune.credentials import without_tokens
from indictune.data.read.open_files import files_named
from indictune.data.read.row_sources import SPLITS, entries_of
from indictune.distributed.devices import meta_of
from indictune.doctor.check_lines import Outcome
from indictune.errors import UserError
from indictune.planning.memory import checkpoint_of_node

OUTPUT_CHECK = "--output_dir"
_WRITTEN_BYTES = 32 << 20
_CHUNK = os.urandom(1 << 20)  # a file system may compress zeros
_SLOW_S = 600.0  # to write a checkpoint
ROWS_CHECK = "rows"
_READ_WHOLE, _PARTS, _PART_BYTES = 256 << 20, 64, 1 << 20  # bytes, parts, bytes
_DIGITS = 12
_UNREADABLE = "unreadable"
_HUB = "Hub"
_LATER, _SERVER_ERROR = (408, 429), 500  # the token is not at fault
_AGAIN = "The push at the end needs the network of rank 0. `indictune train` of the finished run pushes again."
_CURE_OF_TOKEN = "Make a token that may write at https://huggingface.co/settings/tokens, and set HF_TOKEN."


def nearest_folder(folder: Path) -> Path:
    """The folder, or the nearest one around it that exists. Nothing is made."""
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())


def disk_line(plan: AnyPlan, timed: bool) -> Outcome:
    """Whether the checkpoints of a run fit, and, if `timed`, how fast a disk writes them."""
    folder = nearest_folder(plan.output_dir)
    meta = meta_of(plan) if plan.training.save_strategy != "no" else None
    size = 0 if meta is None else checkpoint_of_node(plan, meta)
    kept = 1 + (plan.training.save_total_limit or 1)
    try:
        free = shutil.disk_usage(folder).free
        enough = free >= max(size, _WRITTEN_BYTES)
        rate = write_rate(folder) if timed and enough else 0.0
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror}"
        return Outcome(OUTPUT_CHECK, "fail", text, "Check its permissions and quota.")
    found = f"{free / 1e9:,.1f} GB free"
    if size:
        found += f"; a checkpoint takes {size / 1e9:,.2f} GB, and there are {kept} at once"
    if free < size * kept or not enough:
        cure = "Use a folder on another disk, or a smaller --save_total_limit."
        return Outcome(OUTPUT_CHECK, "warn" if enough else "fail", found, cure)
    found += f"; it writes {rate / 1e6:,.0f} MB/s" if rate else ""
    if rate and size / rate > _SLOW_S:
        slow = f"{found}: {size / rate:,.0f} s for a checkpoint"
        return Outcome(OUTPUT_CHECK, "warn", slow, "Use a faster disk, or --async_save.")
    return Outcome(OUTPUT_CHECK, "ok", found)


def write_rate(folder: Path) -> float:
    """Bytes a second, fsync included, of a file that is then deleted.

    Raises:
        OSError: it cannot be written.
    """
    file = folder / f".doctor-{uuid.uuid4().hex}"
    began = time.perf_counter()
    try:
        with file.open("wb") as written:
            for _ in range(_WRITTEN_BYTES // len(_CHUNK)):
                written.write(_CHUNK)
            written.flush()
            os.fsync(written.fileno())
        return _WRITTEN_BYTES / (time.perf_counter() - began)
    finally:
        file.unlink(missing_ok=True)


def row_digests(configuration: Mapping[str, Any]) -> dict[str, str]:
    """Flag of rows -> the files, bytes and digest behind it.

    A file above 256 MiB has the digest of its size and of 64 parts of it: the whole would take long. Names do not
    count, as nodes may have the files in different folders.
    """
    found = {}
    for split in SPLITS:
        if named := configuration.get(f"{split}_file"):
            found[f"content of --{split}_file"] = _digest_of(named, split)
    if entries := configuration.get("train_files"):
        found["content of --train_files"] = _digest_of(entries, "train", has_weights=True)
    return found


def row_line(digests: Mapping[str, str]) -> Outcome:
    """Whether the files of `row_digests` can be read."""
    by_flag = {name.removeprefix("content of "): each for name, each in digests.items()}
    missing = [f"{flag} is {each}" for flag, each in by_flag.items() if _UNREADABLE in each]
    if missing:
        return Outcome(ROWS_CHECK, "fail", "; ".join(missing), "Check the paths and permissions on this node.")
    found = [f"{flag}: {each}" for flag, each in by_flag.items()]
    return Outcome(ROWS_CHECK, "ok", "; ".join(found) or "no files are named")


def _digest_of(named: Any, split: str, has_weights: bool = False) -> str:
    try:
        if has_weights:
            files = [file for each in entries_of(named) for file in each.files]
        else:
            files = list(files_named(named, split)[1])
        digest = hashlib.sha256()
        size = sum(_add_file(digest, Path(file)) for file in files)
    except OSError as error:
        return f"{_UNREADABLE}: {error.filename}: {error.strerror}"
    except UserError as error:
        return f"{_UNREADABLE}: {error}"
    return f"{len(files)} file(s), {size:,} bytes, digest {digest.hexdigest()[:_DIGITS]}"


def _add_file(digest: Any, path: Path) -> int:
    size = path.stat().st_size
    step = _PART_BYTES if size <= _READ_WHOLE else size // _PARTS
    digest.update(str(size).encode())
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(_PART_BYTES))
    return size


def hub_line(repository: str | None) -> Outcome:
    """Whether a push to a repository, with or without a namespace, can succeed; None if the run does not push."""
    if repository is None:
        return Outcome(_HUB, "ok", "not asked: the run does not push")
    if constants.HF_HUB_OFFLINE:
        found = f"not asked about {repository}: HF_HUB_OFFLINE is set"
        cure = "The push at the end needs the network: unset it, or leave out --push_to_hub."
        return Outcome(_HUB, "warn", found, cure)
    if get_token() is None:
        return Outcome(_HUB, "fail", "there is no token", "Set HF_TOKEN, or run `hf auth login` once.")
    try:
        api = HfApi()
        user = api.whoami()
        name = repository if "/" in repository else f"{user['name']}/{repository}"
        try:
            api.auth_check(name, write=True)
        except RepositoryNotFoundError:  # the run makes it
            return _may_make(name, user)
        return Outcome(_HUB, "ok", f"{user['name']} may write to {name}")
    except HfHubHTTPError as error:
        reason = without_tokens(str(error).partition("\n")[0])
        if error.response.status_code in _LATER or error.response.status_code >= _SERVER_ERROR:
            return Outcome(_HUB, "warn", f"does not answer: {reason}", _AGAIN)
        return Outcome(_HUB, "fail", f"refused access to {repository}: {reason}", _CURE_OF_TOKEN)
    except Exception as error:  # no network: what the client raises depends on its version
        return Outcome(_HUB, "warn", f"does not answer ({type(error).__name__})", _AGAIN)


def _may_make(name: str, user: dict[str, object]) -> Outcome:
    """Whether the token may make a repository in a namespace: the user's own, or that of an organisation."""
    auth = user.get("auth")
    token = auth.get("accessToken") if isinstance(auth, dict) else None
    role = token.get("role") if isinstance(token, dict) else None
    orgs = user.get("orgs")
    own = [str(user["name"]), *(str(each["name"]) for each in (orgs if isinstance(orgs, list) else []))]
    if role == "read" or name.partition("/")[0] not in own:
        why = "the token may only read" if role == "read" else f"the token belongs to {', '.join(own)}"
        return Outcome(_HUB, "fail", f"{name} does not exist, and cannot be made: {why}", _CURE_OF_TOKEN)
    return Outcome(_HUB, "ok", f"{name} does not exist yet; the run makes it")

"""A folder with a model is written whole or not at all."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from safetensors import SafetensorError

from indictune.cache_folders import check_outside_checkpoints
from indictune.errors import UserError
from indictune.models.symlinks import leads_out

logger = logging.getLogger(__name__)

_LOCK = ".lock"

TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*.jinja", "chat_template.json"),
    # Vocabularies, by the names that the classes of transformers 5.23 give them; a test looks for others.
    *("vocab.*", "vocab-*.json", "*_vocab.json", "merges.txt", "bpe.codes", "dict.txt", "*.model", "*.spm"),
    *("prophetnet.tokenizer", "byte_maps.json", "emoji.json", "normalizer.json"),
    *("word_shape.json", "word_pronunciation.json"),
)


def check_free(folder: Path, flag: str) -> None:
    """Refuse to write over anything, or into a checkpoint.

    Args:
        folder: that a model goes to.
        flag: by which the user named it.

    Raises:
        UserError: it is there, and not an empty folder; or it is in a checkpoint, or cannot
            give way to another.
    """
    check_outside_checkpoints(folder, flag)
    if not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise UserError(f"{flag} {folder}: is there already, and not an empty folder; choose another.")
    if os.path.ismount(os.path.realpath(folder)) or folder.samefile("."):
        raise UserError(
            f"{flag} {folder}: is a mount point or the folder that the command is typed in, which no other folder can "
            "take the place of; name a new folder in it."
        )


@contextmanager
def whole_folder(folder: Path, flag: str, size_bytes: int, way_out: str) -> Iterator[Path]:
    """A block that makes a model in the folder that it is given, which then becomes `folder`, by a rename.

    What it writes beside that one is taken away again, and everything where it fails. Where it is killed, that stands
    in a hidden folder beside `folder`, until the next one that writes there.

    Args:
        folder: that a model goes to, or a link to it.
        flag: by which the user named it.
        size_bytes: of the model.
        way_out: what to do where there is no room.

    Raises:
        UserError: there is no room, or no right to write, or another process writes it; or a file cannot be read or
            written in the block.
    """
    place = Path(os.path.realpath(folder))
    unfinished = place.with_name(f".{place.name}.unfinished")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = _taken(unfinished, f"{flag} {folder}")
    except OSError as error:
        raise UserError(f"{flag} {folder}: cannot be made ({error.strerror}); name another.") from error
    was_there = place.stat() if place.is_dir() else None
    try:
        free_bytes = shutil.disk_usage(place.parent).free
        if free_bytes < size_bytes:
            raise UserError(
                f"{flag} {folder}: the model needs {size_bytes / 1e9:.1f} GB, and {place.parent} has "
                f"{free_bytes / 1e9:.1f} GB left; {way_out}."
            )
        if was_there is not None:
            place.rmdir()  # what does not give way is to be told now, and not when all is written
        model = unfinished / "model"
        yield model
        model.rename(place)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{flag} {folder}: could not be written: {error}. Nothing is left of it; the same command begins again."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        lock.close()
        if was_there is not None:
            place.mkdir(exist_ok=True)
            _share_as(place, was_there)


def _share_as(folder: Path, there: os.stat_result) -> None:
    """Give a folder the group and the rights of the one whose place it has taken, as far as this user may.

    Where that one gave its group to what was made in it (setgid), so does this one, and its files have that group.
    """
    for path in (folder, *(folder.rglob("*") if there.st_mode & stat.S_ISGID else ())):
        with suppress(OSError):
            os.chown(path, -1, there.st_gid, follow_symlinks=False)
    with suppress(OSError):
        folder.chmod(stat.S_IMODE(there.st_mode))


def _taken(unfinished: Path, named: str) -> TextIO:
    """Take a folder for this process, and remove what a killed one has left in it.

    The lock is the kernel's, and ends with its process, however that ends.

    Args:
        unfinished: folder, there or not.
        named: flag and folder, for messages.

    Returns:
        The file that is locked.

    Raises:
        UserError: another process has it, or what has its name was not made by this user.
        OSError: it cannot be made.
    """
    try:
        unfinished.mkdir(mode=0o700)  # and ours then, whomever the file system names as its owner (NFS of root, CIFS)
    except FileExistsError:
        if unfinished.is_symlink() or unfinished.stat().st_uid != os.geteuid():
            told = f"{named}: {unfinished} is in its way, a link or another user's; remove it, or name another."
            raise UserError(told) from None
    lock = os.fdopen(
        os.open(unfinished / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+", encoding="utf-8"
    )
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.close()
        raise UserError(f"{named}: another command writes it; wait for its end, or name another.") from None
    except OSError as error:  # a file system that has no locks
        logger.debug("%s: %s", lock.name, error)
    for left in unfinished.iterdir():
        if left.name != _LOCK:
            shutil.rmtree(left, ignore_errors=True)
    return lock


def copy_files(source: Path, patterns: Sequence[str], folder: Path) -> None:
    """Copy the files of a folder whose names fit one of some patterns, as far as there are any.

    A link that leads out of the folder is left: nobody could tell what it brings into a model that is given away.
    """
    for pattern in patterns:
        for path in source.glob(pattern):
            if path.is_file() and not leads_out(path, source):
                shutil.copyfile(path, folder / path.name)


def let_read(model: Path) -> None:
    """Let whoever may read a model's configuration read its weights: safetensors (0.8) lets their owner alone."""
    mode = min(model.glob("*config.json")).stat().st_mode
    for path in model.glob("*.safetensors"):
        if path.stat().st_mode != mode:
            with suppress(OSError):  # a file system may refuse modes: CIFS, exFAT
                path.chmod(mode)

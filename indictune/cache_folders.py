"""The cache that later runs read again, and the folders that nobody may write to."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from indictune.errors import UserError

MANIFEST = "manifest.json"  # of a checkpoint: what it holds, and nothing else may be there
_OF_A_CHECKPOINT = (MANIFEST, "trainer_state.json")  # both: other programs have a manifest.json too

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
REFUSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_CLOSED = REFUSED | {errno.ENOTDIR, errno.EEXIST}


def cache_folder() -> Path:
    """The folder of built-in models and prepared rows: `$INDICTUNE_CACHE`, or `~/.cache/indictune`."""
    return Path(os.environ.get("INDICTUNE_CACHE") or "~/.cache/indictune").expanduser()


@contextmanager
def kept_in(folder: Path, what: str) -> Iterator[None]:
    """A block that reads and writes a folder below `cache_folder`.

    Args:
        folder: for the message.
        what: is kept there, such as "The rows".

    Raises:
        UserError: the disk is full, or the folder cannot be written to.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM | _CLOSED:
            raise
        raise UserError("cache-not-written", "INDICTUNE_CACHE", folder, what=what, reason=error.strerror) from error


def checkpoint_around(folder: str | Path) -> Path | None:
    """The checkpoint that a folder is, or would be in, links followed; None without one."""
    leads_to = Path(os.path.realpath(folder))
    for each in (leads_to, *leads_to.parents):
        if all(os.path.isfile(each / name) for name in _OF_A_CHECKPOINT):
            return each
    return None


def check_outside_checkpoints(folder: str | Path, flag: str) -> None:
    """Refuse to write into a checkpoint.

    Args:
        folder: to write to; it need not exist.
        flag: that names it.

    Raises:
        UserError: it is in a checkpoint, or is one.
    """
    checkpoint = checkpoint_around(folder)
    if checkpoint is not None:
        raise UserError("folder-in-checkpoint", flag, folder, checkpoint=checkpoint)

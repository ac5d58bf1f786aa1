"""Where things are kept that later runs read again."""

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
    """Built-in models and prepared rows are kept here: `$INDICTUNE_CACHE`, or `~/.cache/indictune`."""
    return Path(os.environ.get("INDICTUNE_CACHE") or "~/.cache/indictune").expanduser()


@contextmanager
def kept_in(folder: Path, what: str) -> Iterator[None]:
    """A block that reads and writes a folder below `cache_folder`.

    Args:
        folder: that is told.
        what: is kept there, for messages, such as "The rows".

    Raises:
        UserError: the disk does not take it, or the folder is closed.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM | _CLOSED:
            raise
        way_out = "Make room there, or name" if error.errno in NO_ROOM else "Name"
        raise UserError(
            f"{what} cannot be kept in {folder}: {error.strerror}. {way_out} a folder on another disk by "
            "INDICTUNE_CACHE."
        ) from error


def checkpoint_around(folder: str | Path) -> Path | None:
    """The checkpoint that a folder is, or would be in, by way of links too; None where there is none."""
    leads_to = Path(os.path.realpath(folder))
    for each in (leads_to, *leads_to.parents):
        if all(os.path.isfile(each / name) for name in _OF_A_CHECKPOINT):
            return each
    return None


def check_outside_checkpoints(folder: str | Path, flag: str) -> None:
    """Refuse to write into a checkpoint.

    Args:
        folder: that something is written to; it need not be there yet.
        flag: by which the user named it.

    Raises:
        UserError: it is in a checkpoint, or is one.
    """
    checkpoint = checkpoint_around(folder)
    if checkpoint is not None:
        raise UserError(
            f"{flag} {folder}: is in the checkpoint {checkpoint}, and one with a file more is damaged; name a folder "
            "outside of it."
        )

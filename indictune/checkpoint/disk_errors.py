"""Report a disk on which a checkpoint, a model or another file of a run cannot be written."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from indictune.checkpoint import store
from indictune.files import NO_ROOM

logger = logging.getLogger(__name__)


class SaveError(RuntimeError):
    """A checkpoint or the model could not be written. The checkpoints before it are whole."""


@contextmanager
def reporting(output_dir: Path, what: str, unfinished: Path, needed_bytes: Callable[[], int]) -> Iterator[None]:
    """A block that writes a checkpoint or the model. If it fails, the unfinished part is removed.

    Args:
        output_dir: of the run.
        what: is written: `checkpoint-<step>`, or `the model`.
        unfinished: the folder that it is written to.
        needed_bytes: estimates its size; called only after a failure.

    Raises:
        SaveError: with the error in the library's words, and the needed and the free bytes.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        free = shutil.disk_usage(unfinished.parent).free
        shutil.rmtree(unfinished, ignore_errors=True)
        if not isinstance(error, OSError):
            logger.exception("%s could not be written", what)
        raise SaveError(
            f"{what} could not be written to {unfinished.parent}: {_reason(error)}. It needs about {needed_bytes():,} "
            f"bytes, and {free:,} are free. {_way_out(output_dir, what)}"
        ) from error


def message_of(error: OSError, output_dir: Path) -> str | None:
    """The message for a file of a run that could not be written; None for any other error."""
    if error.filename is None:
        return None
    is_closed = error.errno in (errno.EACCES, errno.EPERM) and Path(error.filename).is_relative_to(output_dir)
    if error.errno not in {*NO_ROOM, errno.EROFS} and not is_closed:
        return None
    return f"{error.filename} could not be written: {error.strerror}. {_way_out(output_dir)}"


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:  # torch's own, around those of the ranks
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _way_out(output_dir: Path, unwritten: str = "") -> str:
    """How to continue. `unwritten` may be there, whole, and gone after the next power cut."""
    others = [path for path in store.checkpoints_in(output_dir) if path.name != unwritten]
    whole = [path.name for path in others if not store.damage(path, thorough=False)]
    last = f"{whole[0]} is whole" if whole else "There is no earlier checkpoint"
    return f"{last}. When it can be written, --resume_from_checkpoint auto continues the run."

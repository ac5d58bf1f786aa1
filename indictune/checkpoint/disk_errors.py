"""Report a disk on which a checkpoint, a model or another file of a run cannot be written."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from indictune.cache_folders import NO_ROOM
from indictune.checkpoint import store
from indictune.errors import UserError


class SaveError(RuntimeError):
    """A checkpoint or the model could not be written. The checkpoints before it are whole."""


@contextmanager
def reporting(output_dir: Path, what: str, unfinished: str, bytes_in_memory: int) -> Iterator[None]:
    """A block that writes a checkpoint or the model. If the disk fails, the unfinished part is removed.

    Args:
        output_dir: of the run.
        what: is written: `checkpoint-<step>`, or `the model`.
        unfinished: name of the folder that it is written to.
        bytes_in_memory: size of what is written; a checkpoint needs as much as the last one, if there is one.

    Raises:
        SaveError: the disk is full, closed or broken, in whatever words the library reports it.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        shutil.rmtree(output_dir / unfinished, ignore_errors=True)
        of_last = _bytes_of_last(output_dir) if unfinished == store.UNFINISHED else None
        needed = bytes_in_memory if of_last is None else of_last
        cause = _cause(error, output_dir, needed)
        if cause is None:
            raise
        reason = cause.strerror if cause.filename is None else f"{cause.filename}: {cause.strerror}"
        free = f", and {shutil.disk_usage(output_dir).free:,} are free" if cause.errno in NO_ROOM else ""
        raise SaveError(
            f"{what} could not be written to {output_dir}: {reason}. It needs {needed:,} bytes{free}. "
            f"{_way_out(cause, output_dir, what)}"
        ) from error


def refused(output_dir: Path, error: OSError) -> UserError:
    """The refusal of a folder that takes no file before a run begins.

    Args:
        output_dir: of the run.
        error: of the first file.
    """
    needed = _bytes_of_last(output_dir)
    size = "" if needed is None else f" A checkpoint needs {needed:,} bytes."
    return UserError("output-dir-not-writable", "--output_dir", output_dir, reason=error.strerror, size=size)


def message_of(error: OSError, output_dir: Path) -> str | None:
    """The message for a file that could not be written; None for any other error.

    Args:
        error: that ends the run.
        output_dir: of the run.
    """
    if error.filename is None:
        return None
    is_closed = error.errno in (errno.EACCES, errno.EPERM) and Path(error.filename).is_relative_to(output_dir)
    if error.errno not in {*NO_ROOM, errno.EROFS} and not is_closed:
        return None
    return f"{error.filename} could not be written: {error.strerror}. {_way_out(error, output_dir)}"


def _bytes_of_last(output_dir: Path) -> int | None:
    """Size of the newest checkpoint; None if there is none."""
    manifests = map(store.read_manifest, store.listed(output_dir))
    return next((manifest.bytes for manifest in manifests if manifest is not None), None)


def _cause(error: BaseException, output_dir: Path, needed: int) -> OSError | None:
    """Why the disk fails; None if it is not the disk's fault.

    torch and safetensors have their own words for a full disk ("basic_ios::clear: iostream error"), so the disk itself
    is tested.
    """
    if isinstance(error, CheckpointException):  # torch's own, around those of the ranks
        causes = [_cause(failure[0], output_dir, needed) for failure in error.failures.values()]
        return next(filter(None, causes), None)
    if isinstance(error, OSError) and error.strerror:
        return error
    number = re.search(r"\(os error (\d+)\)", str(error))  # in the words of safetensors
    if number:
        return OSError(int(number[1]), os.strerror(int(number[1])))
    if shutil.disk_usage(output_dir).free < needed:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        with tempfile.TemporaryFile(dir=output_dir) as probe:
            probe.write(b"0")
            probe.truncate(needed)  # the size of files may be limited
    except OSError as found:
        return OSError(found.errno, found.strerror)  # without the probe's name
    return None


def _way_out(cause: OSError, output_dir: Path, unwritten: str = "") -> str:
    """How to continue. `unwritten` may be there, whole, and gone after the next power cut."""
    others = [path for path in store.listed(output_dir) if path.name != unwritten]
    whole = [path.name for path in others if not store.damage(path, thorough=False)]
    last = f"{whole[0]} is whole" if whole else "There is no earlier checkpoint"
    mended = "there is room" if cause.errno in NO_ROOM else "it can be written"
    return f"{last}. When {mended}, --resume_from_checkpoint auto continues the run."

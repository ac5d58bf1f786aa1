"""What is told of a disk that does not take a checkpoint, a model or another file of a run."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from indictune.cache_folders import NO_ROOM
from indictune.checkpoint import store
from indictune.errors import UserError

BY_AUTO = "--resume_from_checkpoint auto"
_BY_THE_SAME = "the same command"


class SaveError(RuntimeError):
    """A checkpoint or the model could not be written. The checkpoints before it are whole."""


def telling(output_dir: Path, step: int, bytes_in_memory: int) -> AbstractContextManager[None]:
    """A block that writes the checkpoint of a step: where it cannot, the part that was written is removed.

    Args:
        output_dir: of the run.
        step: whose checkpoint it is.
        bytes_in_memory: of what is saved, which stands for a checkpoint's where there is none.

    Raises:
        SaveError: in place of what the libraries say of a disk that does not take it.
    """
    return _telling(
        output_dir, store.UNFINISHED, f"checkpoint-{step}", lambda: _bytes_of_last(output_dir) or bytes_in_memory
    )


def telling_of_copy(output_dir: Path, what: str, needed: int) -> AbstractContextManager[None]:
    """A block that copies what a run takes along or leaves behind: where it cannot, what was copied is removed.

    Args:
        output_dir: of the run.
        what: is copied.
        needed: its bytes.

    Raises:
        SaveError: in place of what the libraries say of a disk that does not take it.
    """
    return _telling(output_dir, store.UNFINISHED, what, lambda: needed, _BY_THE_SAME)


def telling_of_names(output_dir: Path, what: str, needed: int) -> AbstractContextManager[None]:
    """A block in which what was copied gets its place, as `telling_of_copy`; the copies stay, for the run's own may be
    moved away by then, and `copying.recover` finds them."""
    return _telling(output_dir, None, what, lambda: needed, _BY_THE_SAME)


def telling_of_model(output_dir: Path, needed: int) -> AbstractContextManager[None]:
    """A block that writes the trained model: where it cannot, the part that was written is removed.

    Args:
        output_dir: of the run.
        needed: bytes of the weights.

    Raises:
        SaveError: in place of what the libraries say of a disk that does not take it.
    """
    return _telling(output_dir, store.UNFINISHED_MODEL, "the model", lambda: needed)


@contextmanager
def _telling(
    output_dir: Path, unfinished: str | None, what: str, needed: Callable[[], int], goes_on: str = BY_AUTO
) -> Iterator[None]:
    """`needed` is asked for when the disk has not taken it."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        if unfinished is not None:
            shutil.rmtree(output_dir / unfinished, ignore_errors=True)
        _tell(error, what, output_dir, needed(), goes_on)
        raise


def refused(output_dir: Path, error: OSError) -> UserError:
    """What to tell of a folder that takes no file before a run begins, and what its checkpoints need elsewhere.

    Args:
        output_dir: of the run.
        error: of the first file.
    """
    needed = _bytes_of_last(output_dir)
    told = "" if needed is None else f", and a checkpoint needs {needed:,} bytes"
    return UserError(f"--output_dir {output_dir}: cannot be written to ({error.strerror}){told}; name another folder.")


def message_of(error: OSError, output_dir: Path) -> str | None:
    """What to tell of a file that there was no room for, or of one of the run's own that was closed to it.

    Args:
        error: that ends the run.
        output_dir: of the run.

    Returns:
        A sentence, or None where the error is another one, or names no file.
    """
    if error.filename is None:
        return None
    is_closed = error.errno in (errno.EACCES, errno.EPERM) and Path(error.filename).is_relative_to(output_dir)
    if error.errno not in {*NO_ROOM, errno.EROFS} and not is_closed:
        return None
    return f"{_file_of(error)} could not be written: {error.strerror}. {_way_out(error, output_dir)}"


def _tell(error: BaseException, what: str, output_dir: Path, needed: int, goes_on: str = BY_AUTO) -> None:
    """Raise `SaveError`, where the disk is to blame."""
    cause = _cause(error, output_dir, needed)
    if cause is not None:
        file = _file_of(cause)
        told = cause.strerror if file is None else f"{file}: {cause.strerror}"
        free = f", and {shutil.disk_usage(output_dir).free:,} are free" if cause.errno in NO_ROOM else ""
        raise SaveError(
            f"{what} could not be written to {output_dir}: {told}. It needs {needed:,} bytes{free}. "
            f"{_way_out(cause, output_dir, what, goes_on)}"
        ) from error


def _file_of(error: OSError) -> str | None:
    """The file that an error names; of a copy that there was no room for not the first, which is only read."""
    file: str | None = error.filename
    return error.filename2 or file if error.errno in NO_ROOM else file


def _bytes_of_last(output_dir: Path) -> int | None:
    """Of the newest checkpoint; None where there is none."""
    for checkpoint in store.listed(output_dir):
        manifest = store.read_manifest(checkpoint)
        if manifest is not None:
            return manifest.bytes
    return None


def _cause(error: BaseException, output_dir: Path, needed: int) -> OSError | None:
    """Why the disk does not take it; None where it is no fault of the disk.

    torch and safetensors tell of a full disk in words of their own ("basic_ios::clear: iostream error"), so the disk
    is asked itself.
    """
    if isinstance(error, CheckpointException):  # torch's own, around those of the ranks
        causes = [_cause(failure[0], output_dir, needed) for failure in error.failures.values()]
        return next(filter(None, causes), None)
    if isinstance(error, OSError) and error.strerror:
        return error
    told = re.search(r"\(os error (\d+)\)", str(error))  # in the words of safetensors
    if told:
        return OSError(int(told[1]), os.strerror(int(told[1])))
    if shutil.disk_usage(output_dir).free < needed:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        with tempfile.TemporaryFile(dir=output_dir) as probe:
            probe.write(b"0")
            probe.truncate(needed)  # where files may not grow so large
    except OSError as found:
        return OSError(found.errno, found.strerror)  # its name is the probe's
    return None


def _way_out(cause: OSError, output_dir: Path, unwritten: str = "", goes_on: str = BY_AUTO) -> str:
    """From where a run goes on; what is `unwritten` may be there, whole, and after the next power cut not."""
    others = [path for path in store.listed(output_dir) if path.name != unwritten]
    whole = [path.name for path in others if not store.damage(path, thorough=False)]
    last = f"{whole[0]} is whole" if whole else "There is no earlier checkpoint"
    mended = "there is room" if cause.errno in NO_ROOM else "it can be written"
    return f"{last}; when {mended}, {goes_on} goes on."

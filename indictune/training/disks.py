"""What is told of a disk that does not take a checkpoint."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from indictune.training import checkpoints


class SaveError(RuntimeError):
    """A checkpoint could not be written. Those before it are whole."""


@contextmanager
def telling(output_dir: Path, step: int, bytes_in_memory: int) -> Iterator[None]:
    """A block that writes the checkpoint of a step: where it cannot, the part that was written is removed.

    Args:
        output_dir: of the run.
        step: whose checkpoint it is.
        bytes_in_memory: of what is saved, which stands for a checkpoint's where there is none.

    Raises:
        SaveError: in place of what the libraries say of a disk that does not take it.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        shutil.rmtree(output_dir / checkpoints.UNFINISHED, ignore_errors=True)
        needed = _bytes_of_last(output_dir) or bytes_in_memory
        cause = _cause(error, output_dir, needed)
        if cause is None:
            raise
        raise SaveError(_message(output_dir, step, cause, needed)) from error


def _bytes_of_last(output_dir: Path) -> int | None:
    """Of the newest checkpoint; None where there is none."""
    for checkpoint in checkpoints.listed(output_dir):
        manifest = checkpoints.read_manifest(checkpoint)
        if manifest is not None:
            return manifest.bytes
    return None


def _cause(error: BaseException, output_dir: Path, needed: int) -> str | None:
    """Why the disk does not take it; None where it is no fault of the disk.

    torch and safetensors tell of a full disk in words of their own ("basic_ios::clear: iostream error"), so the disk
    is asked itself.
    """
    if isinstance(error, CheckpointException):  # torch's own, around those of the ranks
        causes = [_cause(failure[0], output_dir, needed) for failure in error.failures.values()]
        return next(filter(None, causes), None)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    told = re.search(r"\(os error (\d+)\)", str(error))  # in the words of safetensors
    if told:
        return os.strerror(int(told[1]))
    if shutil.disk_usage(output_dir).free < needed:
        return "No space left on device"
    try:
        with tempfile.TemporaryFile(dir=output_dir) as probe:
            probe.write(b"0")
            probe.truncate(needed)  # where files may not grow so large
    except OSError as found:
        return str(found.strerror)
    return None


def _message(output_dir: Path, step: int, cause: str, needed: int) -> str:
    free = shutil.disk_usage(output_dir).free
    whole = [path.name for path in checkpoints.listed(output_dir) if not checkpoints.damage(path, thorough=False)]
    last = f"{whole[0]} is whole" if whole else "There is no earlier one"
    return (
        f"checkpoint-{step} could not be written to {output_dir}: {cause}. It needs {needed:,} bytes, and "
        f"{free:,} are free. {last}; when there is room, --resume_from_checkpoint auto goes on."
    )

"""Refuse to read checkpoints that somebody else may have written: they hold pickles, which can run code."""

from __future__ import annotations

import os
from pathlib import Path

from indictune.errors import UserError


def check_trusted(
    checkpoint: Path, output_dir: Path, trust_checkpoint: bool, flag: str = "--resume_from_checkpoint"
) -> None:
    """Refuse a checkpoint that is not this run's own, or that others can write to.

    Args:
        checkpoint: the folder to read.
        output_dir: of the run, whose checkpoints are its own.
        trust_checkpoint: whether the user trusts it.
        flag: by which the user named it.

    Raises:
        UserError: `checkpoint-not-trusted`.
    """
    if trust_checkpoint:
        return
    why = why_not_own(checkpoint, output_dir)
    if why is not None:
        raise UserError("checkpoint-not-trusted", flag, checkpoint, reason=why)


def why_not_own(checkpoint: Path, output_dir: Path) -> str | None:
    """Why others may have written a checkpoint; None if only this user's run can."""
    run = output_dir.resolve()
    if checkpoint.resolve().parent != run or checkpoint.is_symlink():
        return f"it is not in this run's --output_dir {output_dir}"
    found = map(_open_to_others, (run, checkpoint, *sorted(checkpoint.rglob("*"))))
    return next(filter(None, found), None)


def _open_to_others(path: Path) -> str | None:
    """How others may write to a file or folder; None if they cannot."""
    found = path.lstat()
    if found.st_uid != os.getuid():
        return f"{path} belongs to another user"
    if path.is_symlink():
        return f"{path} is a link"
    if found.st_mode & 0o022:
        return f"{path} can be written by other users (`chmod go-w {path}` ends that)"
    return None

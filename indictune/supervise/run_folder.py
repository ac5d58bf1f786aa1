"""The files that a run leaves beside its model: what it was, how it went, what came out."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from indictune.cache_folders import check_outside_checkpoints
from indictune.errors import UserError
from indictune.files import NOT_PUSHED, write_json

logger = logging.getLogger(__name__)

State = Literal["ok", "user_error", "failed", "resumable"]

# Any of these shows that a run has trained here. Logs, a status and a recipe alone may come from a command that was
# mistyped, and must not keep the corrected one from its folder.
TRACES = ("metrics.json", "train_log.jsonl", "trainer_state.json")
# A run's beside the log of a rank, which every disk of a run has; else they may be a model of the user's.
WEIGHTS = ("model.safetensors", "adapter_model.safetensors")
# What a finished run writes beside those, and its user may have written.
WRITTEN_OVER = ("README.md", "config.json", *WEIGHTS)

# What a run opens in its folder to write to it; all else is written elsewhere and put in place.
_OPENED = (
    *("train_log.jsonl", "nonfinite.jsonl", "rejected.jsonl", "logs", "logs/*", "runs"),
    *(".lock", ".unfinished-checkpoint", ".unfinished-model"),
    "README.md",  # the Trainer's card of what is pushed (transformers 5.23)
)


def write_status(output_dir: Path, state: State, message: str) -> None:
    """`status.json`: how the latest command on this folder ended. Exit codes do not survive launchers."""
    write_json(output_dir / "status.json", {"state": state, "message": message})


def status_since(output_dir: Path, since: float) -> dict[str, str]:
    """`status.json`, where it was written after `since`, in seconds since 1970; else nothing."""
    status = output_dir / "status.json"
    try:
        return dict(json.loads(status.read_text(encoding="utf-8"))) if status.stat().st_mtime >= since else {}
    except (OSError, ValueError):
        return {}


def stopped_at(output_dir: Path) -> float:
    """When the latest command on this folder was asked to stop, in seconds since 1970; 0 where it ended otherwise."""
    status = output_dir / "status.json"
    try:
        is_resumable = json.loads(status.read_text(encoding="utf-8"))["state"] == "resumable"
        return status.stat().st_mtime if is_resumable else 0.0
    except (OSError, ValueError):
        return 0.0


def forget_status(output_dir: Path) -> None:
    """Take an earlier command's status away, so that a run which is killed does not leave another's."""
    (output_dir / "status.json").unlink(missing_ok=True)


def not_pushed(output_dir: Path) -> str:
    """What there is to say of a finished run that was to be pushed and is not; empty where there is nothing."""
    mark = output_dir / NOT_PUSHED
    return mark.read_text(encoding="utf-8") if mark.is_file() and not mark.is_symlink() else ""


def check_takes_files(output_dir: Path) -> None:
    """Make a file in a folder, and remove it.

    Raises:
        OSError: the folder takes none. What is in it may be open for writing all the same.
    """
    tempfile.TemporaryFile(dir=output_dir).close()


def check_folder(output_dir: Path) -> None:
    """Refuse a folder that a run cannot write to and stay inside.

    Raises:
        UserError: it is a file or in a checkpoint, has a name that libraries cannot write to, or holds links where a
            run writes.
    """
    check_outside_checkpoints(output_dir, "--output_dir")
    shown = str(output_dir).encode("utf-8", errors="backslashreplace").decode("utf-8")
    if shown != str(output_dir):
        raise UserError(
            f"--output_dir {shown}: is no UTF-8, and weights cannot be saved under such a name; name another folder."
        )
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError(f"--output_dir {output_dir}: is a file; expected a folder.")
    # By `glob` a plain name is not there where it is a link to nothing (Python 3.11).
    paths = [path for pattern in _OPENED for path in (output_dir / pattern, *sorted(output_dir.glob(pattern)))]
    found = [path for path in paths if path.is_symlink()]
    if found:
        raise UserError(
            f"--output_dir {output_dir}: {found[0].relative_to(output_dir)} is a link, and a run writes to nothing "
            "outside its folder; remove the link, or choose another --output_dir."
        )


def check_free(output_dir: Path, resume_from_checkpoint: str | None, replaceable: Collection[str] = ()) -> None:
    """Refuse to write over another run, or files of one's own.

    Args:
        output_dir: of this run.
        resume_from_checkpoint: as given; with it, the run that is there is this one.
        replaceable: files of an earlier command of this kind, which may be written anew.

    Raises:
        UserError: the folder holds a run, and no checkpoint of it was asked for; it holds no run, and files that a
            run would write.
    """
    are_a_runs = bool(replaceable) or any(output_dir.glob("logs/rank-*.log"))
    traces = TRACES + WEIGHTS if are_a_runs else TRACES
    held = [name for name in traces if name not in replaceable and (output_dir / name).exists()]
    held += [path.name for path in sorted(output_dir.glob("checkpoint-*"))]
    if held and resume_from_checkpoint is None:
        way_out = "choose another --output_dir"
        if not replaceable:
            way_out += ", or go on with it by --resume_from_checkpoint auto"
        raise UserError(f"--output_dir {output_dir}: holds another run ({', '.join(held[:3])}); {way_out}.")
    own = [name for name in WRITTEN_OVER if (output_dir / name).exists()]
    if own and not held and not replaceable:
        raise UserError(
            f"--output_dir {output_dir}: holds no run, and has {' and '.join(own)}, which the run would write over; "
            "choose another --output_dir."
        )

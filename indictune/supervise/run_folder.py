"""The state of a run's folder: may a run write there, and how did its last command end."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from indictune.cache_folders import check_outside_checkpoints
from indictune.config.flag_table import STATUS_FILE
from indictune.credentials import without_tokens
from indictune.errors import Problem, UserError
from indictune.files import METRICS, write_json
from indictune.stop_signals import EXIT_RESUMABLE

State = Literal["ok", "user_error", "failed", "resumable"]

STATUS = "status.json"
EXIT_CODES: dict[State, int] = {"ok": 0, "failed": 1, "user_error": 2, "resumable": EXIT_RESUMABLE}
# Each shows that a run trained here. Logs, a status and a recipe alone may be those of a mistyped command.
_OF_A_RUN = (METRICS, "train_log.jsonl", "trainer_state.json")
# A run overwrites these too, and they may be the user's own.
_OVERWRITTEN = ("README.md", "config.json", "model.safetensors", "adapter_model.safetensors")
# What a run opens in its folder for writing. All other files are written elsewhere and moved into place.
_OPENED = (
    *("train_log.jsonl", "nonfinite.jsonl", "rejected.jsonl", "logs", "logs/*", "runs"),
    *(".lock", ".unfinished-checkpoint", ".unfinished-model"),
    "figures",  # of the report
    "README.md",  # the Trainer's card of what is pushed (transformers 5.23)
)


def write_status(output_dir: Path | None, state: State, message: str, problems: Sequence[Problem] = ()) -> None:
    """Write `status.json`: how the latest command on this folder ended. Exit codes do not survive launchers.

    Args:
        output_dir: the folder; None for none. A caller from Python gets the same in a file of its own.
        state: how the command ended.
        message: for the user.
        problems: of which the message tells.
    """
    content: dict[str, Any] = {"state": state, "message": message}
    if problems:
        texts = [{"code": each.code, "flag": each.flag, "text": without_tokens(str(each))} for each in problems]
        content["problems"] = texts
    if asked := os.environ.get(STATUS_FILE):
        write_json(Path(asked), content)
    if output_dir is not None:
        write_json(output_dir / STATUS, content)


def status_since(output_dir: Path, since: float) -> dict[str, str]:
    """`status.json`, if it was written after `since`, in seconds since 1970; else an empty dict."""
    status = output_dir / STATUS
    try:
        return dict(json.loads(status.read_text(encoding="utf-8"))) if status.stat().st_mtime >= since else {}
    except (OSError, ValueError):
        return {}


def check_folder(output_dir: Path) -> None:
    """Refuse a folder that a run cannot write to and stay inside.

    Raises:
        UserError: it is a file or in a checkpoint, has a name that libraries cannot write to, or holds links where a
            run writes.
    """
    check_outside_checkpoints(output_dir, "--output_dir")
    if output_dir.exists() and not output_dir.is_dir():
        raise UserError("folder-expected", "--output_dir", output_dir)
    # By `glob` a plain name is not there where it is a link to nothing (Python 3.11).
    paths = [path for pattern in _OPENED for path in (output_dir / pattern, *sorted(output_dir.glob(pattern)))]
    for path in paths:
        if path.is_symlink():
            raise UserError("output-dir-has-link", "--output_dir", output_dir, link=path.relative_to(output_dir))


def holds_files(output_dir: Path) -> bool:
    """Whether a new run would overwrite something there."""
    try:
        check_free(output_dir, None)
    except UserError:
        return True
    return False


def check_free(output_dir: Path, resume_from_checkpoint: str | None, replaceable: Collection[str] = ()) -> None:
    """Refuse to overwrite another run, or files of the user.

    Args:
        output_dir: of this run.
        resume_from_checkpoint: as given; with it, a run that is there is this one.
        replaceable: files of an earlier command of this kind, which may be overwritten.

    Raises:
        UserError: the folder holds files that this run would overwrite.
    """
    names = _OF_A_RUN if replaceable else _OF_A_RUN + _OVERWRITTEN
    held = [name for name in names if name not in replaceable and (output_dir / name).exists()]
    held += [path.name for path in sorted(output_dir.glob("checkpoint-*"))]
    is_run = bool(set(held) - {*_OVERWRITTEN}) or any(output_dir.glob("logs/rank-*.log"))
    if held and (resume_from_checkpoint is None or not is_run):
        way_out = None if is_run and not replaceable else "Use another folder."
        raise UserError("output-dir-holds-files", "--output_dir", output_dir, way_out, held=", ".join(held[:3]))

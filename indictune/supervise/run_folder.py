"""The files that a run leaves beside its model: what it was, how it went, what came out."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import yaml

from indictune.cache_folders import NO_ROOM, REFUSED, check_outside_checkpoints
from indictune.errors import UserError
from indictune.models.atomic_folder import TOKENIZER_FILES

logger = logging.getLogger(__name__)

State = Literal["ok", "user_error", "failed", "resumable"]

AUTO = "auto"
NOTHING_TO_DO = "this run is finished; there is nothing to resume."
RECIPE = "recipe.yaml"
# There while a finished run is to be pushed and is not. What to type instead stands in it.
NOT_PUSHED = ".not_pushed"
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

# What a model needs to be used, of what a run saves; `training_args.bin`, a pickle, is not among it.
OF_A_MODEL = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "*.py"),
    *("adapter_config.json", "base_config.json", "base_model.json"),
    *TOKENIZER_FILES,
)


def write_whole(path: Path, text: str) -> None:
    """Write a file that is either the old one or the new one, never a part.

    Raises:
        OSError: it names the file, what the file needs where the disk does not take it, and of a full one what is
            free.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    content = _encoded(text)
    with _naming(path, content):
        temporary.unlink(missing_ok=True)  # what an unpacked folder brings under that name may be a link
        try:
            with temporary.open("xb") as file:
                file.write(content)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _encoded(text: str) -> bytes:
    """A text as UTF-8. Half a surrogate pair, which a file's name or a row may hold, is written as an escape: JSON
    gives it back as it was."""
    return text.encode("utf-8", errors="backslashreplace")


@contextmanager
def _naming(path: Path, content: bytes) -> Iterator[None]:
    """A block that writes a file; the error of a full disk names none, and no error tells the bytes."""
    try:
        yield
    except OSError as error:
        told = str(error.strerror)
        if error.errno in NO_ROOM | REFUSED:
            told += f". It needs {len(content):,} bytes"
        if error.errno in NO_ROOM:
            told += f", and {shutil.disk_usage(path.parent).free:,} are free"
        raise OSError(error.errno, told, str(path)) from error


class Record:
    """A file of JSON lines that grows. What the disk does not take waits for the next line; no run ends by it.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = ""
        self._warned = False

    def append(self, line: str) -> None:
        """Add a line, after those that wait; the first time that the disk does not take them, warn."""
        self._waiting += line
        size = None
        try:
            size = self.path.stat().st_size if self.path.exists() else 0
            content = _encoded(self._waiting)
            with _naming(self.path, content):
                _add(self.path, content)
        except OSError as error:
            with suppress(OSError):
                if size is not None:
                    os.truncate(self.path, size)  # a part of a line
            if not self._warned:
                logger.warning(
                    "%s cannot be written: %s. The run goes on; lines wait for room", self.path, error.strerror
                )
            self._warned = True
        else:
            self._waiting = ""

    def end(self) -> None:
        """Write what waits, at the end of a run, or tell that it is missing."""
        if self._waiting:
            self.append("")
        if self._waiting:
            logger.warning("%s lacks its last %d lines: there was no room", self.path, self._waiting.count("\n"))


def json_line(entry: Mapping[str, Any]) -> str:
    """A line of such a file."""
    return json.dumps(_as_json(entry), ensure_ascii=False, allow_nan=False) + "\n"


def _as_json(value: Any) -> Any:
    """The same without NaN and infinity, which JSON has not; as texts, `float` and pandas read them."""
    if isinstance(value, Mapping):
        return {name: _as_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _add(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def write_json(path: Path, content: Any) -> None:
    """Write JSON that people can read, whole or not at all."""
    write_whole(path, json.dumps(_as_json(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def keep_lines(path: Path, keeps: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Drop lines of a file of JSON lines, such as those of steps that are done again, and lines that were cut off.

    Args:
        path: of the file, where there is one.
        keeps: tells which lines are kept.

    Returns:
        The lines that are left.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    kept = [line for line in lines if _is_kept(line, keeps)]
    write_whole(path, "".join(f"{line}\n" for line in kept))
    return [json.loads(line) for line in kept]


def _is_kept(line: str, keeps: Callable[[dict[str, Any]], bool]) -> bool:
    """Whether a line is; not one that a killed run has left unfinished."""
    try:
        return keeps(json.loads(line))
    except (ValueError, KeyError, TypeError):
        return False


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


def write_recipe(output_dir: Path, configuration: dict[str, Any]) -> None:
    """`recipe.yaml`: the whole configuration as resolved."""
    write_whole(output_dir / RECIPE, yaml.safe_dump(configuration, allow_unicode=True, sort_keys=True))


def is_finished(output_dir: Path) -> bool:
    """Whether a run has ended here: its metrics are written last. An empty file may be what a power cut left of it."""
    mark = output_dir / "metrics.json"
    return mark.is_file() and mark.stat().st_size > 0


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

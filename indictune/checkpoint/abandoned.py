"""What a run leaves behind when it goes on from an earlier step than its last, or from elsewhere.

It stands in `abandoned-<number>` below `--output_dir`: the newest checkpoint there is not the run's newest, and none
gives way to one that the run saves.
"""

from __future__ import annotations

import shutil
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from indictune.checkpoint import store
from indictune.data.cache import write_through
from indictune.models.atomic_folder import MODEL_FILES

PREFIX = "abandoned-"
_MARK_OF_THE_END = "metrics.json"
_RECORDS = ("train_log.jsonl", "nonfinite.jsonl")
_UNFINISHED = f"{store.UNFINISHED}/abandoned"  # which a killed run leaves to `copying.recover`


def number_of(folder: Path) -> int:
    """The number in the name of such a folder; 0 where it is none."""
    number = folder.name.removeprefix(PREFIX)
    return int(number) if folder.name.startswith(PREFIX) and number.isascii() and number.isdigit() else 0


def folders(output_dir: Path) -> list[Path]:
    """What a run has left behind, the latest first."""
    found = [path for path in output_dir.glob(f"{PREFIX}*") if number_of(path) > 0]
    return sorted(found, key=number_of, reverse=True)


def run_of(checkpoint: Path) -> Path:
    """The `--output_dir` of the run that a checkpoint stands in, or that has left it behind."""
    folder = checkpoint.parent
    return folder.parent if number_of(folder) else folder


def is_own(output_dir: Path, checkpoint: Path) -> bool:
    """Whether a checkpoint stands in a run's folder, and has not been left behind."""
    own = output_dir / checkpoint.name
    return own.exists() and own.samefile(checkpoint)


def not_gone_on_from(output_dir: Path, checkpoint: Path | None) -> list[Path]:
    """What is in a run's folder and not of the steps that it goes on from.

    That is checkpoints of later steps, and of a finished run its mark and its model, but for code, which is the same;
    all checkpoints and records where it goes on from another folder.

    Args:
        output_dir: of the run.
        checkpoint: that it goes on from; None where it starts afresh.

    Returns:
        In an order in which what is left is one run's wherever the moving is cut: checkpoints the newest first.
    """
    step, names = 0, [_MARK_OF_THE_END, *_model_in(output_dir)]
    if checkpoint is not None:
        step = store.step_of(checkpoint)
        if not is_own(output_dir, checkpoint):
            step, names = -1, [*names, *_RECORDS]
    found = [output_dir / name for name in names if (output_dir / name).exists()]
    return found + [path for path in store.listed(output_dir) if store.step_of(path) > step]


def _model_in(output_dir: Path) -> list[str]:
    """The files of a finished run's model, also where their moving was cut: its mark has gone before them."""
    found = {path.name for pattern in MODEL_FILES for path in output_dir.glob(pattern) if path.suffix != ".py"}
    if (output_dir / _MARK_OF_THE_END).exists():
        return sorted(found)
    gone_before = next((folder for folder in folders(output_dir) if (folder / _MARK_OF_THE_END).exists()), None)
    return [] if gone_before is None else sorted(name for name in found if not (gone_before / name).exists())


def copy_records(output_dir: Path) -> None:
    """Copy a run's records to where `move` finds them: those that stay lose the steps that are done again.

    Raises:
        OSError: the disk does not take it.
    """
    folder = output_dir / _UNFINISHED
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    for record in (output_dir / name for name in _RECORDS):
        if record.exists():
            shutil.copyfile(record, folder / record.name)
            write_through(folder / record.name)


def bytes_of_records(output_dir: Path) -> int:
    """That `copy_records` needs."""
    return sum((output_dir / name).stat().st_size for name in _RECORDS if (output_dir / name).exists())


def move(paths: Iterable[Path], folder: Path) -> None:
    """Move files and folders into a new one beside them, which has what `copy_records` has written. It takes no room.

    Raises:
        OSError: the disk does not take it.
    """
    unfinished = folder.parent / _UNFINISHED
    unfinished.rename(folder)
    for path in paths:
        mode = path.stat().st_mode
        if path.is_dir() and mode & stat.S_IRWXU != stat.S_IRWXU:
            path.chmod(mode | stat.S_IRWXU)  # a folder that is closed to its owner cannot be moved
        path.rename(folder / path.name)
    write_through(folder)
    write_through(folder.parent)
    with suppress(OSError):
        unfinished.parent.rmdir()  # where no checkpoint was copied


def told(names: Sequence[str], folder: Path) -> str:
    """What the user should know of what was moved.

    Args:
        names: of files and folders, in the order of `not_gone_on_from`.
        folder: in which they are now. Checkpoints are read until one is whole.
    """
    checkpoints = [folder / name for name in names if store.step_of(Path(name)) >= 0]
    newest = next((path for path in checkpoints if not store.damage(path)), None)
    way_back = "" if newest is None else f" --resume_from_checkpoint {newest} goes on from it."
    return f"Moved to {folder}, because this run does not go on from it: {', '.join(names)}.{way_back}"


def notes(output_dir: Path) -> list[str]:
    """What the user should know of a folder in which something was left behind, in a sentence each."""
    return [f"{path} holds what was left behind there: auto takes none of it." for path in folders(output_dir)]

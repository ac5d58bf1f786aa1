"""`indictune checkpoint`: what checkpoints a run has, whether they are whole, and one of them as a plain model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from indictune.checkpoint import abandoned, compatibility, copying, resume, store
from indictune.checkpoint.best import best_of
from indictune.checkpoint.store import MANIFEST, PREFIX, UNFINISHED, Manifest
from indictune.config.command_arguments import CheckpointArguments
from indictune.config.recipe import read_recipe
from indictune.console_text import in_one_line, printable, table
from indictune.errors import UserError
from indictune.files import is_finished

HEADER = ("step", "strategy", "size", "rows of the epoch", "state", "")


@dataclass(frozen=True)
class Found:
    """A checkpoint, looked at.

    Attributes:
        path: its folder.
        manifest: None where there is none that can be read.
        problems: what is wrong with it, file by file; empty where it is whole.
        unfinished: whether it is being written, or was when its run was killed.
    """

    path: Path
    manifest: Manifest | None
    problems: list[str]
    unfinished: bool = False

    @property
    def step(self) -> int:
        return store.step_of(self.path)

    @property
    def state(self) -> str:
        return "unfinished" if self.unfinished else "damaged" if self.problems else "whole"


def checkpoint_command(argv: Sequence[str]) -> int:
    """`indictune checkpoint DIR [--convert_to FOLDER]`; returns the exit code, 1 where a checkpoint is damaged.

    Raises:
        UserError: all that cannot be.
    """
    words = list(argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--folder")
    recipe = read_recipe(words, (CheckpointArguments,))
    with recipe.problems.collecting():
        args = recipe.build(CheckpointArguments)
    recipe.problems.raise_any()
    folder = Path(os.path.abspath(args.folder))
    found = look(folder)
    if args.convert_to is None:
        print(printable(shown(folder, found)))
        return int(any(each.state == "damaged" for each in found))
    from indictune.checkpoint.export import convert  # torch is slow to import

    chosen = to_convert(folder, found)
    print(printable(convert(args, chosen.path, chosen.problems)))
    return 0


def look(folder: Path) -> list[Found]:
    """The checkpoints of a run, the newest first, or the one that is named; all of their files are read.

    That may take minutes, in which a run that is training saves and removes some: they are told as they are then.

    Raises:
        UserError: there are none.
        OSError: the folder cannot be read.
    """
    _check_there(folder)
    os.listdir(folder)  # to `glob` a folder that is closed to this user is an empty one
    if store.step_of(folder) >= 0 and not store.listed(folder):
        named = _looked_at(folder)
        _check_there(folder)
        return [named]
    looked_at: dict[Path, Found] = {}
    for _ in range(2):  # again for what got its name meanwhile
        looked_at |= {path: _looked_at(path) for path in store.listed(folder) if path not in looked_at}
    found = [Found(path, None, [], unfinished=True) for path in store.listed(folder / UNFINISHED)]
    found += [each for path, each in looked_at.items() if path.is_dir()]
    if not found:
        problem = (
            f"{folder}: holds no checkpoint (no {PREFIX}<step>). Name a run's --output_dir, or a checkpoint of it."
        )
        raise UserError(" ".join([problem, *_notes(folder)]))
    return sorted(found, key=lambda each: each.step, reverse=True)


def _check_there(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder.")


def _looked_at(path: Path) -> Found:
    """One of them; looked at again where it was saved anew meanwhile, for then its files are of two saves."""
    manifest = store.read_manifest(path)
    found = Found(path, manifest, store.damage(path))
    is_of_two = bool(found.problems) and path.is_dir() and store.read_manifest(path) != manifest
    return _looked_at(path) if is_of_two else found


def best_step(found: Sequence[Found]) -> int | None:
    """The step that the newest whole checkpoint calls the best; None where nothing was compared."""
    newest = next((each.path for each in found if each.state == "whole"), None)
    return None if newest is None else store.best_step(newest)


def resumed_step(folder: Path, found: Sequence[Found]) -> int | None:
    """The step that `--resume_from_checkpoint auto` goes on from; None where it starts afresh, or trains nothing."""
    if folder in [each.path for each in found] or abandoned.number_of(folder) or is_finished(folder):
        return None
    whole = [each for each in found if each.state == "whole"]
    chosen = store.first_choice(whole, lambda each: _has_best(each, found))
    return None if chosen is None else chosen.step


def _has_best(checkpoint: Found, found: Sequence[Found]) -> bool:
    """Whether its best is whole, where the run is to end with that."""
    best = best_of(checkpoint.path)
    if best is None or not compatibility.settings_of(checkpoint.path).get("load_best_model_at_end", True):
        return True
    known = next((each.problems for each in found if each.path == best), None)
    return not (store.damage(best) if known is None else known)


def to_convert(folder: Path, found: Sequence[Found]) -> Found:
    """The best of the checkpoints, or the newest where there is no best; whole or not.

    Raises:
        UserError: none is finished.
    """
    finished = [each for each in found if not each.unfinished]
    if not finished:
        raise UserError(f"{folder}: its only checkpoint is unfinished; there is nothing to convert.")
    best = best_step(found)
    return next((each for each in finished if each.step == best), finished[0])


def shown(folder: Path, found: Sequence[Found]) -> str:
    """A table of the checkpoints, and below it what is damaged and what has written them."""
    best, resumed = best_step(found), resumed_step(folder, found)
    body = []
    for each in found:
        notes = ["best"] * (each.step == best) + ["auto"] * (each.step == resumed)
        body.append([str(each.step), *_about(each.manifest), each.state, ", ".join(notes)])
    lines = [table(HEADER, body)]
    lines += [in_one_line(f"damaged: {problem}") for each in found for problem in each.problems]
    waiting = [] if is_finished(folder) else copying.to_adopt(folder)
    lines += [_unfinished(each.path, waiting) for each in found if each.unfinished]
    lines += _versions(found)
    if waiting:
        lines.append(f"--resume_from_checkpoint auto gives it its name, and goes on from {waiting[0].name}.")
    elif resumed is not None:
        lines.append(_told_of_auto(folder, resumed))
    elif abandoned.number_of(folder):
        lines.append(
            "A run has left these behind: --resume_from_checkpoint takes the one that it names, and auto none."
        )
    elif is_finished(folder):
        lines.append("The run is finished: --resume_from_checkpoint auto trains nothing.")
    elif folder not in [each.path for each in found]:
        lines.append("None is whole: --resume_from_checkpoint auto starts afresh.")
    lines += _notes(folder)
    return "\n".join(lines)


def _unfinished(path: Path, waiting: Sequence[Path]) -> str:
    if path in waiting:
        return f"unfinished: {path} is written, and has yet to get its name"
    if store.read_manifest(path) is None:
        return f"unfinished: {path} has no {MANIFEST} yet"
    return f"unfinished: {path} has yet to get its name; if that was cut, the run's next start removes it"


def _notes(folder: Path) -> list[str]:
    """What the table does not show of a run, in a sentence each."""
    step = store.step_of_replaced(folder)
    told = f"{PREFIX}{step} is being replaced; if that was cut, the run's next start gives it back."
    return [told] * (step is not None) + abandoned.notes(folder)


def _told_of_auto(folder: Path, step: int) -> str:
    """Whether `--resume_from_checkpoint auto` may go on from a checkpoint."""
    checkpoint = store.path_of(folder, step)
    best = best_of(checkpoint)
    refused = "--resume_from_checkpoint auto would be refused:"
    try:
        for each in (checkpoint, *([best] if best is not None and best.is_dir() else [])):
            resume.check_trusted(each, folder, trust_checkpoint=False, flag=refused)
    except UserError as error:
        return error.message
    return f"--resume_from_checkpoint auto goes on from {PREFIX}{step}."


def _about(manifest: Manifest | None) -> tuple[str, str, str]:
    """Strategy, size and rows."""
    if manifest is None:
        return "-", "-", "-"
    return f"{manifest.strategy} x {manifest.world_size}", _size(manifest.bytes), f"{manifest.rows_of_epoch:,}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:,.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:,.1f} MB"


def _versions(found: Sequence[Found]) -> list[str]:
    """What has written the checkpoints; a line for each set of versions."""
    steps: dict[str, list[str]] = {}
    for each in found:
        if each.manifest is not None:
            text = ", ".join(f"{name} {version}" for name, version in each.manifest.versions.items())
            steps.setdefault(text, []).append(str(each.step))
    return [f"written by {text}" + f" (step {', '.join(own)})" * (len(steps) > 1) for text, own in steps.items()]

"""A checkpoint of another folder, and its best, become a run's own: copied whole, then renamed."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from indictune.checkpoint import store
from indictune.checkpoint.store import UNFINISHED, Manifest
from indictune.data.cache import write_through


def copy(checkpoints: Sequence[Path], output_dir: Path, is_enough: Callable[[], bool]) -> list[Path]:
    """Copy whole checkpoints of another folder to where those of a run are written.

    Whether that folder's run had been stopped there is nothing to this one: it begins with them, and has no earlier
    ones for a bad step to roll back to.

    Args:
        checkpoints: none is whole there before all are.
        output_dir: of the run.
        is_enough: asked before each file; where it says so, no more is copied.

    Returns:
        The copies, to be adopted.

    Raises:
        OSError: the disk does not take them, or does not give back what was written.
        ValueError: one has no manifest.
    """
    copies = {each: output_dir / UNFINISHED / each.name for each in checkpoints}
    for unfinished in copies.values():
        unfinished.mkdir(parents=True, exist_ok=True)
    manifests = {unfinished: _copy_files(each, unfinished, is_enough) for each, unfinished in copies.items()}
    for unfinished, manifest in manifests.items():
        if not is_enough():
            store.seal(unfinished, replace(manifest, planned=True))
            write_through(unfinished.parent)
    return list(manifests)


def _copy_files(checkpoint: Path, unfinished: Path, is_enough: Callable[[], bool]) -> Manifest:
    manifest = store.read_manifest(checkpoint)
    if manifest is None:
        raise ValueError(f"{checkpoint} has no manifest.")
    for name in store.files_in(checkpoint):
        if is_enough():
            return manifest
        (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkpoint / name, unfinished / name)  # the mode is not copied: some file systems have none
    if store.settle(unfinished, store.files_in(unfinished)) != manifest.files:
        raise OSError(errno.EIO, f"the copy of {checkpoint} is not as it was written", str(unfinished))
    return manifest


def adopt(copies: Iterable[Path], output_dir: Path) -> None:
    """Make what `copy` has written checkpoints of the run; each is there whole, or not at all.

    The best comes first, whose step is the lower: wherever it is cut, `recover` does the rest.

    Raises:
        OSError: the disk does not take it.
    """
    for unfinished in sorted(copies, key=store.step_of):
        store.give_name(unfinished, store.path_of(output_dir, store.step_of(unfinished)))
    with suppress(OSError):
        (output_dir / UNFINISHED).rmdir()  # where nothing else is being written


def recover(output_dir: Path) -> None:
    """Adopt what a killed run had copied when its others were moved away, to go on from there; remove other leftovers.

    Raises:
        OSError: the disk does not take it.
    """
    adopt(to_adopt(output_dir), output_dir)
    store.remove_leftovers(output_dir)


def to_adopt(output_dir: Path) -> list[Path]:
    """What the next start gives its name, the newest first: all that is written, or nothing.

    All copies are whole then, and where one is a checkpoint of the run already, it is the best of the newest.
    """
    copies = store.listed(output_dir / UNFINISHED)
    are_whole = not any(store.damage(each, thorough=False) for each in copies)
    is_ready = are_whole and all(store.is_best_of(own, copies[0]) for own in store.listed(output_dir) if copies)
    return copies if is_ready else []

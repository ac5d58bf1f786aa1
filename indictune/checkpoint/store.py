"""Store checkpoints that are whole or absent, find damage in them, and delete old ones."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch.distributed import ProcessGroup
from transformers import TrainingArguments

from indictune import files
from indictune.data.cache import write_through
from indictune.distributed import collectives

MANIFEST = files.MANIFEST
PREFIX = "checkpoint-"
UNFINISHED = ".unfinished-checkpoint"  # next to its final place while it is written
UNFINISHED_MODEL = ".unfinished-model"
_REPLACED = ".replaced-checkpoint"
_DAMAGED = "damaged-"
_HASHED_AT_ONCE = 4
_QUICKLY_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class FileDigest:
    """A file as it was written.

    Attributes:
        bytes: its size.
        sha256: of its content, in hexadecimal.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps that are done.
        rows_of_epoch: rows of the running epoch that have been trained on, over all processes.
        strategy: of the launch, as in `accelerate_configs/`.
        world_size: number of processes.
        global_batch_size: rows of a step.
        save: unique name of this save, the same on the disks of all nodes.
        data: digest of the training rows and their order.
        recipe: digest of `recipe.yaml`.
        versions: of the packages that wrote it, by name.
        evaluation_due: whether the run was stopped before it evaluated this step.
        files: by path inside the folder, with `/` between its parts.
        validation: digest of the rows that checkpoints were compared on last; None without such rows.
        planned: whether the run saves this step by its own flags; False if it did so only because it was stopped.
        axes: what split the model, as `shown_axes` says it; empty if only the batch was split.
    """

    step: int
    rows_of_epoch: int
    strategy: str
    world_size: int
    global_batch_size: int
    save: str
    data: str
    recipe: str
    versions: Mapping[str, str]
    evaluation_due: bool
    files: Mapping[str, FileDigest]
    validation: str | None = None
    planned: bool = True
    axes: str = ""

    def to_json(self) -> str:
        """The text of `manifest.json`, which ends with a digest of the rest."""
        content = asdict(self)
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return json.dumps({**content, "sha256": digest}, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The manifest that `to_json` wrote.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is not as it was written.
        """
        content = json.loads(text)
        content.pop("sha256")
        files = {name: FileDigest(**entry) for name, entry in content.pop("files").items()}
        found = cls(**content, files=files)
        numbers = (found.step, found.rows_of_epoch, found.world_size, found.global_batch_size)
        if found.to_json() != text or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError("it is not as it was written")
        return found

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.bytes for entry in self.files.values())


def path_of(output_dir: Path, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return output_dir / f"{PREFIX}{step}"


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint's folder; -1 for any other name."""
    step = checkpoint.name.removeprefix(PREFIX)
    return int(step) if checkpoint.name.startswith(PREFIX) and step.isascii() and step.isdigit() else -1


def checkpoints_in(output_dir: Path) -> list[Path]:
    """The folders named like a checkpoint, whole or damaged, newest first."""
    found = [path for path in output_dir.glob(f"{PREFIX}*") if step_of(path) >= 0 and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def files_in(folder: Path) -> list[str]:
    """Sorted paths of all files below a folder, without the manifest.

    Raises:
        OSError: the folder cannot be read.
    """
    found = []
    for parent, _, names in os.walk(folder, onerror=_raise):
        found += [Path(parent, name).relative_to(folder).as_posix() for name in names]
    return sorted(set(found) - {MANIFEST})


def _raise(error: OSError) -> None:
    raise error


def file_digest(path: Path) -> FileDigest:
    """Size and hash of a file, read in pieces.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(file.tell(), sha256)


def sync_files(folder: Path, names: Iterable[str]) -> dict[str, FileDigest]:
    """Write files through to the disk and let no other user write to them; returns their digests."""
    paths = {name: folder / name for name in names}
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        digests = pool.map(file_digest, paths.values())  # computed from memory while the disk writes
        for path in paths.values():
            _make_private(path)
            write_through(path)
        return dict(zip(paths, digests, strict=True))


def _make_private(path: Path) -> None:
    """Let no other user write to a file or folder, if the file system has modes. A resume checks it again."""
    mode = path.stat().st_mode
    if mode & 0o022:
        with suppress(OSError):
            path.chmod(mode & ~0o022)


def seal(unfinished: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint whose files are settled, and all folders, through to the disk.

    Raises:
        OSError: it cannot be written.
    """
    (unfinished / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    sync_files(unfinished, [MANIFEST])
    for parent, _, _ in os.walk(unfinished, topdown=False):
        _make_private(Path(parent))
        write_through(Path(parent))


def give_name(unfinished: Path, final: Path) -> None:
    """Rename a sealed checkpoint to its final name. It replaces an older one of that name.

    Raises:
        OSError: it cannot be renamed, or the rename may not have reached the disk.
    """
    replaced = final.with_name(_REPLACED)
    _delete(replaced)
    if final.exists() or final.is_symlink():
        final.rename(replaced)
    unfinished.rename(final)
    write_through(final.parent)
    _delete(replaced)


def _delete(path: Path) -> None:
    """Delete a folder, or a link to one. Errors are ignored."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(output_dir: Path) -> None:
    """Remove what a killed run was writing, and restore a checkpoint that it was about to replace."""
    replaced = output_dir / _REPLACED
    manifest = read_manifest(replaced)
    if manifest is not None and not path_of(output_dir, manifest.step).exists():
        replaced.rename(path_of(output_dir, manifest.step))
    for leftover in (replaced, output_dir / UNFINISHED_MODEL, *output_dir.glob(f"{UNFINISHED}*")):
        _delete(leftover)


def set_aside(checkpoint: Path) -> None:
    """Rename a damaged checkpoint to `damaged-checkpoint-<step>`: rotation and later starts ignore it."""
    target = checkpoint.with_name(f"{_DAMAGED}{checkpoint.name}")
    number = 2
    while target.exists():
        target = target.with_name(f"{_DAMAGED}{checkpoint.name}.{number}")
        number += 1
    checkpoint.rename(target)


def read_manifest(checkpoint: Path) -> Manifest | None:
    """The manifest of a folder; None if it is missing or damaged."""
    try:
        return Manifest.from_json((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def damage(checkpoint: Path, thorough: bool = True, share: slice = slice(None)) -> list[str]:
    """What is wrong with a checkpoint, one sentence for each bad file; empty if it is whole.

    Args:
        checkpoint: the folder.
        thorough: whether to read all files; else large files are compared by size only.
        share: which of the sorted files to check; other ranks check the rest.
    """
    manifest = read_manifest(checkpoint)
    if manifest is None:
        is_readable = os.access(checkpoint / MANIFEST, os.R_OK)
        why = "is not as it was written" if is_readable else "is missing or cannot be read"
        return [f"{checkpoint / MANIFEST} {why}"]
    problems = []
    if step_of(checkpoint) != manifest.step:
        problems.append(f"{checkpoint} holds step {manifest.step}")
    try:
        present = files_in(checkpoint)
    except OSError as error:
        return [*problems, f"{error.filename} cannot be read ({error.strerror})"]
    problems += [f"{checkpoint / name} is missing" for name in sorted(set(manifest.files) - set(present))]
    names = present[share]
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        found = pool.map(lambda name: _damage_of_file(checkpoint / name, manifest.files.get(name), thorough), names)
        return problems + [f"{checkpoint / name} {why}" for name, why in zip(names, found, strict=True) if why]


def _damage_of_file(path: Path, expected: FileDigest | None, thorough: bool) -> str | None:
    if path.is_symlink():
        return "is a link"
    if expected is None:
        return f"is not in {MANIFEST}"
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"has {size:,} bytes instead of {expected.bytes:,}"
        is_read = thorough or size <= _QUICKLY_READ_BYTES
        return "is not as it was written" if is_read and file_digest(path) != expected else None
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def rotate(output_dir: Path, limit: int | None, kept: Collection[Path]) -> None:
    """Delete the oldest checkpoints beyond `limit`, except those in `kept`."""
    if limit is None:
        return
    found = checkpoints_in(output_dir)
    free = [path for path in found if path not in kept]  # the newest first
    for path in free[max(limit - len(set(kept) & set(found)), 0) :]:
        remove(path)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, or a link to one. It is renamed first, so that no part of one is ever seen."""
    gone = checkpoint.with_name(f"{UNFINISHED}-{checkpoint.name}")
    checkpoint.rename(gone)
    _delete(gone)


@dataclass(frozen=True)
class Unfinished:
    """A checkpoint that is being written.

    Attributes:
        folder: gets its files.
        manifest: of its step, without files.
        settled: digests of this rank's share of the files, once they are on the disk.
    """

    folder: Path
    manifest: Manifest
    settled: Future[dict[str, FileDigest]]


def sync_share(
    folder: Path, args: TrainingArguments, disks_group: ProcessGroup | None, group: ProcessGroup | None = None
) -> dict[str, FileDigest]:
    """Sync this rank's share of the files when all ranks have written; returns their digests.

    Args:
        folder: of the unfinished checkpoint, on every disk.
        args: of the run.
        disks_group: the first rank of each disk, if there are several.
        group: of all ranks, which must call it; None is the training's own.
    """
    collectives.barrier(group)
    collectives.give_files(folder, True, args, disks_group)
    return sync_files(folder, share(folder, args, group))


def share(folder: Path, args: TrainingArguments, group: ProcessGroup | None) -> list[str]:
    """The files that this rank hashes; one rank lists them for all that share its disk."""
    mine = (collectives.disk_of(args), files_in(folder) if args.should_save else None)
    listed = collectives.gather_from_all(mine, group)
    names = next(names for disk, names in listed if disk == mine[0] and names is not None)
    return names[collectives.share_of_files(args)]


def commit(unfinished: Unfinished, args: TrainingArguments) -> Path:
    """Give a checkpoint its name in `--output_dir`, on every disk, once it is settled.

    All ranks must call it, and wait for each other afterwards: a rank that is lost then is no error of the disk.

    Returns:
        Its folder. The one around the unfinished folder is removed.
    """
    manifest = unfinished.manifest
    last = path_of(Path(str(args.output_dir)), manifest.step)
    disk = collectives.disk_of(args)
    parts = collectives.gather_from_all((disk, unfinished.settled.result(), uuid.uuid4().hex))
    if args.should_save:
        files = {name: found for where, part, _ in parts if where == disk for name, found in part.items()}
        seal(unfinished.folder, replace(manifest, files=files, save=parts[0][-1]))
    collectives.barrier()  # no disk renames its folder before all disks have sealed theirs
    if args.should_save:
        give_name(unfinished.folder, last)
        shutil.rmtree(unfinished.folder.parent, ignore_errors=True)
    return last

"""Commit the files of a checkpoint on every disk: they are synced and hashed, then their folder gets its name."""

from __future__ import annotations

import shutil
import uuid
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from torch.distributed import ProcessGroup
from transformers import TrainingArguments

from indictune.checkpoint import store
from indictune.checkpoint.store import FileDigest, Manifest
from indictune.distributed import collectives, node_disks


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


def settle(
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
    node_disks.give_files(folder, True, args, disks_group)
    return store.settle(folder, share(folder, args, group))


def share(folder: Path, args: TrainingArguments, group: ProcessGroup | None) -> list[str]:
    """The files that this rank hashes; one rank lists them for all that share its disk."""
    mine = (node_disks.disk_of(args), store.files_in(folder) if args.should_save else None)
    listed = collectives.gather_from_all(mine, group)
    names = next(names for disk, names in listed if disk == mine[0] and names is not None)
    return names[node_disks.share_of_files(args)]


def commit(unfinished: Unfinished, args: TrainingArguments) -> Path:
    """Give a checkpoint its name in `--output_dir`, on every disk, once it is settled.

    All ranks must call it, and wait for each other afterwards: a rank that is lost then is no error of the disk.

    Returns:
        Its folder. The one around the unfinished folder is removed.
    """
    manifest = unfinished.manifest
    last = store.path_of(Path(str(args.output_dir)), manifest.step)
    disk = node_disks.disk_of(args)
    parts = collectives.gather_from_all((disk, unfinished.settled.result(), uuid.uuid4().hex))
    if args.should_save:
        files = {name: found for where, part, _ in parts if where == disk for name, found in part.items()}
        store.seal(unfinished.folder, replace(manifest, files=files, save=parts[0][-1]))
    collectives.barrier()  # no disk renames its folder before all disks have sealed theirs
    if args.should_save:
        store.give_name(unfinished.folder, last)
        shutil.rmtree(unfinished.folder.parent, ignore_errors=True)
    return last

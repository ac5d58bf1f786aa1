"""Keep snapshots of a run in the memory of its nodes, and bring the newest to the disk when the run resumes.

A snapshot is a checkpoint in a folder of memory (tmpfs). Each node holds the files that its ranks wrote, and those of
the node before it. The manifest names the files of all nodes.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch.distributed import ProcessGroup

from indictune.checkpoint import store
from indictune.checkpoint.store import UNFINISHED, FileDigest, Manifest, Unfinished
from indictune.config.arguments import IndicTrainingArguments
from indictune.distributed import collectives
from indictune.errors import UserError
from indictune.files import write_whole

logger = logging.getLogger("indictune")

MEMORY = Path("/dev/shm")
FLAG = "--snapshot_steps"
_NAME = ".snapshots"  # in the run's folder: a file with the name of its folder in memory


def folder_of(output_dir: Path) -> Path | None:
    """The folder in this node's memory of the run in `output_dir`; None if that has not run with snapshots."""
    with suppress(OSError, ValueError):
        name = (output_dir / _NAME).read_text(encoding="ascii")
        return _of_user() / uuid.UUID(hex=name).hex  # no other name leads to a folder that is deleted
    return None


def _of_user() -> Path:
    return MEMORY / f"indictune-{os.getuid()}"


# A manifest that names the files of all nodes, and those that each memory has, by the lowest rank that shares it.
SnapshotOnNodes = tuple[Manifest, Mapping[int, Collection[str]]]


class Snapshots:
    """The snapshots of a run. All ranks must make it, and call its methods.

    Attributes:
        folder: in the memory of this node.
        first: the lowest rank that shares this memory.
        firsts: those of all memories.
    """

    def __init__(self, args: IndicTrainingArguments) -> None:
        self.args = args
        self.output_dir = Path(str(args.output_dir))
        self.folder = _of_user() / self._agreed_name()
        _make_private(self.folder)
        is_shared = collectives.disk_is_shared(self.folder, args)
        self.first = 0 if is_shared else args.process_index - args.local_process_index
        self._firsts_of_ranks = collectives.gather_from_all(self.first)
        self.firsts = sorted(set(self._firsts_of_ranks))
        self._group = collectives.group_of(self.firsts, args)

    def _agreed_name(self) -> str:
        """A name that no other run has. It stays when the run resumes, on other nodes too."""
        known = folder_of(self.output_dir)
        names = collectives.gather_from_all((None if known is None else known.name, uuid.uuid4().hex))
        name = next((each for each, _ in names if each is not None), names[0][1])
        if self.args.should_save:
            write_whole(self.output_dir / _NAME, name)
        return name

    @property
    def _is_first(self) -> bool:
        return bool(self.first == self.args.process_index)

    def unfinished(self, step: int) -> Path:
        """The folder in which a snapshot is written."""
        return store.path_of(self.folder / UNFINISHED, step)

    def make_room(self, copied: int | None) -> None:
        """Delete all snapshots but one: that which is being copied to the disk, or else the newest."""
        newest = [store.step_of(each) for each in store.checkpoints_in(self.folder)[:1]]
        self._keep(newest if copied is None else [copied])

    def complete(self, manifest: Manifest) -> list[str]:
        """Complete the snapshot of all ranks, on all nodes; returns the files that this rank copies to the disk."""
        written = self.unfinished(manifest.step)
        collectives.barrier()
        own = store.files_in(written)
        listed = collectives.gather_from_all((own, uuid.uuid4().hex))
        if self._is_first:
            if self._group is not None:
                collectives.send_to_next_node(written, own, self._group)
            files = {name: FileDigest(0, "") for names, _ in listed for name in names}
            store.seal(written, replace(manifest, files=files, save=listed[0][1]))
        collectives.barrier()
        if self._is_first:
            store.give_name(written, store.path_of(self.folder, manifest.step))
        collectives.barrier()
        return self._share(own)

    def drop_until(self, step: int) -> None:
        """Delete the snapshots up to a step that is on the disk. Without any, nothing stays in memory."""
        newer = [each for each in map(store.step_of, store.checkpoints_in(self.folder)) if each > step]
        self._keep(newer)
        if self._is_first and not newer:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _keep(self, steps: Collection[int]) -> None:
        if self._is_first:
            for each in store.checkpoints_in(self.folder):
                if store.step_of(each) not in steps:
                    store.remove(each)

    def end(self) -> None:
        """Delete all snapshots: the run has ended, or resumes from the disk."""
        collectives.barrier()
        if self._is_first:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _share(self, names: Sequence[str]) -> list[str]:
        """Those of the files in this memory that this rank copies; the others that share it copy the rest."""
        sharing = [rank for rank, first in enumerate(self._firsts_of_ranks) if first == self.first]
        return list(names[sharing.index(self.args.process_index) :: len(sharing)])

    def newest_whole(self) -> SnapshotOnNodes | None:
        """The newest snapshot that all memories together have whole; None if there is none."""
        read = {each: store.read_manifest(each) for each in store.checkpoints_in(self.folder)}
        mine = {found.step: (found, store.files_in(each)) for each, found in read.items() if found is not None}
        memories = dict(zip(self._firsts_of_ranks, collectives.gather_from_all(mine), strict=True))
        for step in sorted({step for part in memories.values() for step in part}, reverse=True):
            parts = {first: part[step] for first, part in memories.items() if step in part}
            manifest = next(iter(parts.values()))[0]
            files = {first: names for first, (found, names) in parts.items() if found.save == manifest.save}
            if manifest.files.keys() <= {name for names in files.values() for name in names}:
                return manifest, files
        return None

    def copy_to_disk(self, snapshot: SnapshotOnNodes, disks_group: ProcessGroup | None) -> None:
        """Make a checkpoint of a snapshot. Each file comes from the first memory that has it."""
        manifest, files = snapshot
        mine = set(files.get(self.first, ()))
        if not self.args.save_on_each_node:
            mine -= {name for first, names in files.items() if first < self.first for name in names}
        target = store.path_of(self.output_dir / UNFINISHED, manifest.step)
        copy_snapshot(self._share(sorted(mine)), store.path_of(self.folder, manifest.step), target)
        settled: Future[dict[str, FileDigest]] = Future()
        settled.set_result(store.sync_share(target, self.args, disks_group))
        store.commit(Unfinished(target, manifest, settled), self.args)


def bring_to_disk(args: IndicTrainingArguments, may_use: bool, disks_group: ProcessGroup | None) -> None:
    """Make a checkpoint of the newest snapshot, if it is newer than those on the disk; then delete all snapshots.

    All ranks must call it before a run resumes or starts. `may_use`: whether the run may resume from a snapshot.
    """
    snapshots = Snapshots(args)
    newest = snapshots.newest_whole() if may_use else None
    whole = [each for each in store.checkpoints_in(snapshots.output_dir) if store.read_manifest(each)]
    on_disk = collectives.gather_from_all(max(map(store.step_of, whole), default=-1))
    if newest is not None and newest[0].step > max(on_disk):
        snapshots.copy_to_disk(newest, disks_group)
        logger.info("checkpoint-%d comes from a snapshot in memory", newest[0].step)
    snapshots.end()
    if len(snapshots.firsts) == 1:
        logger.info("%s %d: there is no other node to hold a copy", FLAG, args.snapshot_steps)


def copy_snapshot(names: Sequence[str], source: Path, target: Path) -> None:
    """Copy files, by their paths in a folder, into another folder."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def _make_private(folder: Path) -> None:
    around = folder.parent
    around.mkdir(mode=0o700, parents=True, exist_ok=True)
    if around.is_symlink() or around.stat().st_uid != os.getuid():
        raise UserError("checkpoint-not-trusted", FLAG, around, reason="it belongs to another user")
    around.chmod(0o700)
    folder.mkdir(exist_ok=True)

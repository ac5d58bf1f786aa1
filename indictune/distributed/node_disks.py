"""What nodes give each other where each has a disk of its own, so that every disk holds whole checkpoints."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.distributed import ProcessGroup
from transformers import TrainingArguments

from indictune.distributed import collectives
from indictune.distributed.launch import local_world_size_of

_CHUNK_BYTES = 64 << 20
_GIVEN = ".given-"  # a file that is not all there


def disk_is_shared(folder: Path, args: TrainingArguments) -> bool:
    """Whether all ranks see the same files in a folder. All must call it; the folder is there."""
    if args.world_size == 1:
        return True
    mark = folder / f".seen-{collectives.gather_from_all(uuid.uuid4().hex)[0]}"
    if args.process_index == 0:
        mark.touch()
    collectives.barrier()
    seen = collectives.gather_from_all(mark.exists())
    if args.process_index == 0:
        mark.unlink()
    return all(seen)


def disk_of(args: TrainingArguments) -> int:
    """The first rank of those that share this rank's `--output_dir`.

    Args:
        args: of the run, whose `save_on_each_node` tells whether all of them do.
    """
    return args.process_index - args.local_process_index if args.save_on_each_node else 0


def share_of_files(args: TrainingArguments) -> slice:
    """Which of the files on its disk, in order, this rank reads: those with the same disk read the others."""
    if not args.save_on_each_node:
        return slice(args.process_index, None, args.world_size)
    return slice(args.local_process_index, None, local_world_size_of(os.environ))


@contextmanager
def rank_0_alone_saves(args: TrainingArguments) -> Iterator[None]:
    """A block in which `args.should_save` holds on rank 0 alone, whatever disks there are."""
    before, args.save_on_each_node = args.save_on_each_node, False
    try:
        yield
    finally:
        args.save_on_each_node = before


def group_of_disks(args: TrainingArguments) -> ProcessGroup | None:
    """A group of the first rank of every disk; None where there is one disk. All ranks must call it."""
    if not args.save_on_each_node:
        return None
    firsts = sorted(set(collectives.gather_from_all(disk_of(args))))
    return collectives.new_cpu_group(args.ddp_timeout_delta, firsts)


def give_files(folder: Path, gives: bool, args: TrainingArguments, group: ProcessGroup | None) -> None:
    """Write the files below a folder, which stand on some disks, to those that lack them.

    The ranks of a group must call it; for others, and where there is one disk, nothing happens.

    Args:
        folder: of the same path on every disk; it need not be there.
        gives: whether files of this disk are given to others.
        args: of the run.
        group: that `group_of_disks` made.

    Raises:
        OSError: a file cannot be read or written; the other ranks then wait until their launcher ends them.
    """
    if group is None or disk_of(args) != args.process_index:
        return
    for leftover in folder.rglob(f"{_GIVEN}*"):
        leftover.unlink()  # of a run that was killed
    held = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    on_disks = collectives.gather_from_all(held, group)
    given = collectives.gather_from_all(held if gives else set[str](), group)
    for name in sorted(set[str]().union(*given) - set[str].intersection(*on_disks)):
        giver = next(rank for rank, names in enumerate(given) if name in names)
        _give(folder / name, giver, name not in held, group)


def _give(path: Path, giver: int, is_lacking: bool, group: ProcessGroup) -> None:
    """Send a file from one rank of a group to all; those that lack it write it."""
    is_giver = torch.distributed.get_rank(group) == giver
    size = collectives.gather_from_all(path.stat().st_size if is_giver else 0, group)[giver]
    written = path.with_name(f"{_GIVEN}{path.name}") if is_lacking else Path(os.devnull)
    written.parent.mkdir(parents=True, exist_ok=True)
    with (path if is_giver else written).open("rb" if is_giver else "wb") as file:
        for start in range(0, size, _CHUNK_BYTES):
            chunk = torch.empty(min(_CHUNK_BYTES, size - start), dtype=torch.uint8)
            if is_giver:
                chunk = torch.frombuffer(bytearray(file.read(len(chunk))), dtype=torch.uint8)
            torch.distributed.broadcast(chunk, group_src=giver, group=group)
            if not is_giver:
                file.write(chunk.numpy().data)
    if is_lacking:
        with suppress(OSError):  # a file system may refuse modes
            path.parent.chmod(0o755)
            written.chmod(0o644)  # what others may write to is not gone on from
        written.rename(path)

"""Collectives of Python objects, which the watchdog counts, and of files between nodes with separate disks."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup
from transformers import TrainingArguments

from indictune.distributed.launch import local_world_size_of
from indictune.run import OWN_PROGRESS

T = TypeVar("T")

NEW_GROUP = "making a group of ranks"
LONG_WAIT = "waiting for the others, however long they take"


def gather_from_all(mine: T, group: ProcessGroup | None = None) -> list[T]:
    """Each rank's object, by rank. All ranks of `group` must call it; None is the group of all ranks."""
    if not torch.distributed.is_initialized():
        return [mine]
    _record_meeting(group)
    parts: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(parts, mine, group=group)
    return parts


def barrier(group: ProcessGroup | None = None) -> None:
    """Wait for all ranks of `group`; None is the group of all ranks."""
    if torch.distributed.is_initialized():
        _record_meeting(group)
        torch.distributed.barrier(group)


def from_rank_0(mine: T, long_wait: ProcessGroup | None) -> T:
    """Rank 0's object, on all ranks, after a wait of any length. `long_wait` comes from `long_wait_group`."""
    if long_wait is None:
        return mine
    OWN_PROGRESS.passed(LONG_WAIT)
    return gather_from_all(mine, long_wait)[0]


def long_wait_group(args: TrainingArguments) -> ProcessGroup | None:
    """A group of all ranks in which a wait may last 12 hours; None in a run of one process.

    All ranks must call it, before the long work begins: a rank that waits in the group notices at once when another
    rank ends, but no rank notices that while the group is made.
    """
    return new_cpu_group(timedelta(hours=12)) if args.world_size > 1 else None


def new_cpu_group(timeout: timedelta, ranks: list[int] | None = None) -> ProcessGroup:
    """A gloo group apart from the training's own, of all ranks or of `ranks`. All ranks must call it.

    `timeout` limits both making the group and each of its collectives.
    """
    OWN_PROGRESS.passed(NEW_GROUP)
    group: ProcessGroup = torch.distributed.new_group(ranks, backend="gloo", timeout=timeout)
    _record_meeting(None)
    return group


def _record_meeting(group: ProcessGroup | None) -> None:
    """Count the meeting only if all ranks take part: ranks with different counts look as if one held up the others."""
    if group is None:
        OWN_PROGRESS.passed("meeting the other ranks")


_CHUNK_BYTES = 64 << 20
_PARTIAL = ".given-"  # prefix of a file that is being received


def disk_is_shared(folder: Path, args: TrainingArguments) -> bool:
    """Whether all ranks see the same files in an existing folder. All ranks must call it."""
    if args.world_size == 1:
        return True
    mark = folder / f".seen-{gather_from_all(uuid.uuid4().hex)[0]}"
    if args.process_index == 0:
        mark.touch()
    barrier()
    seen = gather_from_all(mark.exists())
    if args.process_index == 0:
        mark.unlink()
    return all(seen)


def disk_of(args: TrainingArguments) -> int:
    """The first rank on this rank's disk. There are several disks if `args.save_on_each_node` is set."""
    return args.process_index - args.local_process_index if args.save_on_each_node else 0


def share_of_files(args: TrainingArguments) -> slice:
    """Which files on its disk, in order, this rank reads. The other ranks on the disk read the rest."""
    if not args.save_on_each_node:
        return slice(args.process_index, None, args.world_size)
    return slice(args.local_process_index, None, local_world_size_of(os.environ))


@contextmanager
def rank_0_alone_saves(args: TrainingArguments) -> Iterator[None]:
    """A block in which `args.should_save` holds on rank 0 alone."""
    before, args.save_on_each_node = args.save_on_each_node, False
    try:
        yield
    finally:
        args.save_on_each_node = before


def group_of_disks(args: TrainingArguments) -> ProcessGroup | None:
    """A group of the first rank of every disk, if there are several. All ranks must call it."""
    return group_of(sorted(set(gather_from_all(disk_of(args)))), args)


def give_files(folder: Path, gives: bool, args: TrainingArguments, group: ProcessGroup | None) -> None:
    """Copy the files below a folder from the disks that have them to those that lack them.

    The ranks of the group, which `group_of_disks` has made, must call it. For other ranks, and with one disk, it does
    nothing. The folder has the same path on every disk, and need not exist. `gives` is whether this disk's files are
    copied to others.

    Raises:
        OSError: a file cannot be read or written. The other ranks then wait until their launcher ends them.
    """
    if group is None or disk_of(args) != args.process_index:
        return
    for leftover in folder.rglob(f"{_PARTIAL}*"):
        leftover.unlink()  # of a run that was killed
    held = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    on_disks = gather_from_all(held, group)
    given = gather_from_all(held if gives else set[str](), group)
    for name in sorted(set[str]().union(*given) - set[str].intersection(*on_disks)):
        giver = next(rank for rank, names in enumerate(given) if name in names)
        _give(folder / name, giver, name not in held, group)


def _give(path: Path, giver: int, is_lacking: bool, group: ProcessGroup) -> None:
    """Send a file from one rank of a group to all. Those that lack it write it."""
    is_giver = torch.distributed.get_rank(group) == giver
    size = gather_from_all(path.stat().st_size if is_giver else 0, group)[giver]
    written = path.with_name(f"{_PARTIAL}{path.name}") if is_lacking else Path(os.devnull)
    written.parent.mkdir(parents=True, exist_ok=True)
    with (path if is_giver else written).open("rb" if is_giver else "wb") as file:
        for start in range(0, size, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, size - start)
            content = bytearray(file.read(length) if is_giver else length)
            chunk = torch.frombuffer(content, dtype=torch.uint8)
            torch.distributed.broadcast(chunk, group_src=giver, group=group)
            if not is_giver:
                file.write(content)
    if is_lacking:
        with suppress(OSError):  # a file system may refuse modes
            path.parent.chmod(0o755)
            written.chmod(0o644)  # a run does not resume from what others may write to
        written.rename(path)


def group_of(ranks: list[int], args: TrainingArguments) -> ProcessGroup | None:
    """A group of some ranks, apart from the training's own; None for one rank. All ranks must call it."""
    return new_cpu_group(args.ddp_timeout_delta, ranks) if len(ranks) > 1 else None


def send_to_next_node(folder: Path, names: Sequence[str], group: ProcessGroup) -> None:
    """Send files below a folder to the next rank of a group, and receive those of the rank before.

    All ranks of the group must call it. A file that the next rank has already is not sent.

    Raises:
        OSError: a file cannot be read or written. The other ranks then wait until their launcher ends them.
    """
    listed = gather_from_all({name: (folder / name).stat().st_size for name in names}, group)
    place = torch.distributed.get_rank(group)
    before, after = (place - 1) % len(listed), (place + 1) % len(listed)
    for name in set(listed[before]) - set(listed[place]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    sent, received = _pieces(listed[place], listed[after]), _pieces(listed[before], listed[place])
    for mine, theirs in zip_longest(sent, received):
        sending = None
        if mine is not None:
            name, start, length = mine
            with (folder / name).open("rb") as file:
                file.seek(start)
                content = torch.frombuffer(bytearray(file.read(length)), dtype=torch.uint8)
            sending = torch.distributed.isend(content, group=group, group_dst=after)
        if theirs is not None:
            name, _, length = theirs
            arrived = torch.empty(length, dtype=torch.uint8)
            torch.distributed.recv(arrived, group=group, group_src=before)
            with (folder / name).open("ab") as file:
                file.write(arrived.numpy().data)
        if sending is not None:
            sending.wait()


def _pieces(sizes: Mapping[str, int], held: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """Name, start and length of the parts of the files that are not held."""
    for name in sorted(set(sizes) - set(held)):
        for start in range(0, sizes[name], _CHUNK_BYTES):
            yield name, start, min(_CHUNK_BYTES, sizes[name] - start)

"""Copy files of each node to the next one, in a ring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup
from transformers import TrainingArguments

from indictune.distributed import collectives

_CHUNK_BYTES = 64 << 20


class _Piece(NamedTuple):
    """A part of a file."""

    name: str
    start: int
    length: int


def group_of(firsts: list[int], args: TrainingArguments) -> ProcessGroup | None:
    """A group of the first rank of each node; None for one node. All ranks must call it."""
    return collectives.new_cpu_group(args.ddp_timeout_delta, firsts) if len(firsts) > 1 else None


def give_to_next(folder: Path, names: Sequence[str], group: ProcessGroup) -> None:
    """Send files below a folder to the next rank of a group, and receive those of the rank before.

    All ranks of the group must call it. A file that the next rank has already is not sent.

    Raises:
        OSError: a file cannot be read or written. The other ranks then wait until their launcher ends them.
    """
    listed = collectives.gather_from_all({name: (folder / name).stat().st_size for name in names}, group)
    place = torch.distributed.get_rank(group)
    before, after = (place - 1) % len(listed), (place + 1) % len(listed)
    for name in set(listed[before]) - set(listed[place]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    sent, received = _pieces(listed[place], listed[after]), _pieces(listed[before], listed[place])
    for mine, theirs in zip_longest(sent, received):
        sending = None
        if mine is not None:
            with (folder / mine.name).open("rb") as file:
                file.seek(mine.start)
                content = torch.frombuffer(bytearray(file.read(mine.length)), dtype=torch.uint8)
            sending = torch.distributed.isend(content, group=group, group_dst=after)
        if theirs is not None:
            arrived = torch.empty(theirs.length, dtype=torch.uint8)
            torch.distributed.recv(arrived, group=group, group_src=before)
            with (folder / theirs.name).open("ab") as file:
                file.write(arrived.numpy().data)
        if sending is not None:
            sending.wait()


def _pieces(sizes: Mapping[str, int], held: Mapping[str, int]) -> Iterator[_Piece]:
    """The parts of the files that are not held."""
    for name in sorted(set(sizes) - set(held)):
        for start in range(0, sizes[name], _CHUNK_BYTES):
            yield _Piece(name, start, min(_CHUNK_BYTES, sizes[name] - start))

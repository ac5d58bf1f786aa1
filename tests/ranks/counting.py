"""A script that notes who prepares what: `counting.py NOTES SCRIPT FLAGS...`; a line in the file NOTES each time.

With NO_LOCKS, the files below that folder have no locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import runpy
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from indictune.data import cache

build_once, flock, notes = cache.build_once, fcntl.flock, Path(sys.argv[1])


def noted(kind: str, parts: Sequence[object], what: str, make: Callable[[Path], None]) -> Path:
    def make_and_note(folder: Path) -> None:
        with notes.open("a", encoding="utf-8") as file:
            file.write(f"{kind} {socket.gethostname()}\n")
        make(folder)

    return build_once(kind, parts, what, make_and_note)


def refuse(file: int, flags: int) -> None:
    if os.readlink(f"/proc/self/fd/{file}").startswith(os.environ["NO_LOCKS"]):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    flock(file, flags)


if __name__ == "__main__":
    setattr(cache, "build_once", noted)  # noqa: B010
    if "NO_LOCKS" in os.environ:
        setattr(fcntl, "flock", refuse)  # noqa: B010
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")

"""Why a process of this node does not answer, as its kernel sees it."""

from __future__ import annotations

import psutil

from indictune.distributed import agreement

_STATES = {
    psutil.STATUS_STOPPED: ("stopped", "Look for Ctrl-Z, a debugger, or a scheduler that suspends jobs."),
    psutil.STATUS_DISK_SLEEP: ("waiting for a disk", "Check its mounts: a network file system does not answer."),
}
_GONE = "gone", "Look at what it printed last, and in dmesg: the kernel ends processes when memory is short."


def why_silent(pid: int, host: str) -> tuple[str, str]:
    """What a process is that gives no stack, and the cure.

    Args:
        pid: of it.
        host: where it runs. Of another node nothing is known.
    """
    look = f"On {host}, type: ps -o stat= -p {pid}. T is stopped, D waits for a disk."
    if host != agreement.host():
        return "stopped, gone, or busy outside Python", look
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return _GONE
    return _GONE if state == psutil.STATUS_ZOMBIE else _STATES.get(state, ("busy outside Python", look))

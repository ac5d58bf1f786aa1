"""Stale locks of DeepSpeed's operator builds: torch waits forever, without a message, for that of a killed build."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

SECONDS_OF_A_BUILD = 600  # cpu_adam takes one to two minutes


def remove_stale_locks() -> None:
    """Remove each lock that is older than any build, before DeepSpeed loads its operators.

    torch (2.13) makes a file `lock` while it compiles an operator, and waits for it in `FileBaton.wait`.
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")  # else there is a folder for each build of torch
    locks = Path(given).glob("*/lock") if given else Path(get_default_build_root()).glob("*/*/lock")
    for lock in locks:
        with suppress(FileNotFoundError):  # its build has ended, or another rank removed it
            if time.time() - lock.stat().st_mtime > SECONDS_OF_A_BUILD:
                lock.unlink()

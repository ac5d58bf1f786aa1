"""Locks of DeepSpeed's operator builds. torch waits for one that a killed build left, without an end or a message."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root

from indictune.config.plan import Launch

logger = logging.getLogger("indictune")

SECONDS_OF_A_BUILD = 600  # cpu_adam takes one to two minutes
SECONDS_BETWEEN_LOOKS = 1.0


def wait_for_builds(launch: Launch, local_rank: int) -> None:
    """Wait until no build holds a lock, before DeepSpeed loads its operators. A lock older than any build is removed.

    torch (2.13) makes a file `lock` while it compiles an operator. A killed process leaves the file, and every later
    one waits for it in `FileBaton.wait`.

    Args:
        launch: only DeepSpeed compiles operators.
        local_rank: of this process on its node; 0 removes stale locks, the others wait.
    """
    if not launch.family.startswith("zero"):
        return
    reported = set()
    while ages := _ages_of_locks():
        for lock, age_s in ages.items():
            if age_s > SECONDS_OF_A_BUILD and local_rank == 0:
                lock.unlink(missing_ok=True)
            elif lock not in reported:
                reported.add(lock)
                _report(lock, max(0, SECONDS_OF_A_BUILD - age_s))
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _report(lock: Path, wait_s: float) -> None:
    """Rank 0's console shows it; a rank that waits for a build of rank 0 only logs it."""
    logger.info(
        "%s: another process builds this operator, or a killed one left its lock. The run waits for up to %d s. If "
        "nobody builds there, remove the file.",
        *(lock, wait_s),
    )


def _ages_of_locks() -> dict[Path, float]:
    """Seconds since each operator's lock was made.

    Operators lie below `TORCH_EXTENSIONS_DIR`, else below a folder for each build of torch.
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    locks = Path(given).glob("*/lock") if given else Path(get_default_build_root()).glob("*/*/lock")
    ages = {}
    for lock in locks:
        with suppress(FileNotFoundError):  # its build has ended
            ages[lock] = time.time() - lock.stat().st_mtime
    return ages

"""Wait for DeepSpeed's operator builds: torch waits forever, without a message, for the lock of a killed build."""

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
    """Wait until no build holds a lock, before DeepSpeed loads its operators.

    torch (2.13) makes a file `lock` while it compiles an operator, and waits for it in `FileBaton.wait`. Local rank 0
    removes a lock that is older than any build.
    """
    if not launch.family.startswith("zero"):
        return
    is_reported = False
    while ages := _ages_of_locks():
        if not is_reported:
            _report(ages)
            is_reported = True
        for lock, age_s in ages.items():
            if age_s > SECONDS_OF_A_BUILD and local_rank == 0:
                lock.unlink(missing_ok=True)
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _report(ages: dict[Path, float]) -> None:
    logger.info(
        "Another process builds an operator, or a killed one left its lock. The run waits for up to %d s. If nobody "
        "builds, remove %s.",
        *(max(0, SECONDS_OF_A_BUILD - min(ages.values())), ", ".join(map(str, ages))),
    )


def _ages_of_locks() -> dict[Path, float]:
    """Seconds since each operator's lock was made."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")  # else there is a folder for each build of torch
    locks = Path(given).glob("*/lock") if given else Path(get_default_build_root()).glob("*/*/lock")
    ages = {}
    for lock in locks:
        with suppress(FileNotFoundError):  # its build has ended
            ages[lock] = time.time() - lock.stat().st_mtime
    return ages

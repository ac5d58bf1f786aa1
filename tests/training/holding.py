"""Holds the GIL for longer than a watchdog has patience, which writes to `rank-0.log` in the folder that is given."""

import ctypes
import sys
import time
from pathlib import Path

from indictune.supervise.watchdog import Ranks, Watchdog

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    Watchdog(Ranks(folder, 0, 1, "attempt"), 0.5, folder / "rank-0.log", sys.exit, sys.exit).start()
    time.sleep(0.3)
    ctypes.PyDLL(None).usleep(1_500_000)

"""`make bench`: what is measured on a CPU within ten minutes, one program after the other, and how long each takes.

python -m benchmarks.bench

The result files that the programs have written are named with their sha256: one that was written anew later is not
among them.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.environment import RESULTS, environment, write_results
from indictune.console_text import table

# Ours alone, once at each size, for the straight line; beside plain `datasets` by a run of that program for itself.
ROWS = ("--rows", "100000", "500000", "2000000", "--repeats", "1", "--vocabularies", "30000")
STAGES = ("--stages", "ours_read_and_clean", "ours_tokenise")
# Each program, and whether it computes on one core.
PROGRAMS = {
    "speed": ((), False),
    "startup": ((), False),
    "dealing": ((), True),
    "preparation": ((*ROWS, *STAGES), True),
}


def written_since(began: float, folder: Path = RESULTS) -> dict[str, str]:
    """The result files that were written after a time, by name, each with its sha256."""
    paths = [path for path in sorted(folder.glob("*.json")) if path.stat().st_mtime >= began]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def main() -> None:
    """Run all, each of which writes its own result file; then write the seconds, and fail where one has failed."""
    about, began = environment(), time.time()  # before the programs load the machine
    seconds: dict[str, float] = {}
    exit_codes: dict[str, int] = {}
    for name, (flags, on_one_core) in PROGRAMS.items():
        variables = {"OMP_NUM_THREADS": "1"} if on_one_core else {}
        since = time.perf_counter()
        command = [sys.executable, "-m", f"benchmarks.{name}", *flags]
        exit_codes[name] = subprocess.run(command, env={**os.environ, **variables}, check=False).returncode
        seconds[name] = round(time.perf_counter() - since, 1)
    seconds["all"] = round(sum(seconds.values()), 1)
    print(table(["program", "seconds"], [[name, f"{spent:.0f}"] for name, spent in seconds.items()]))
    results = {"environment": about, "seconds": seconds, "exit_codes": exit_codes, "results": written_since(began)}
    print(f"written to {write_results('bench', results)}")
    if failed := [name for name, code in exit_codes.items() if code]:
        sys.exit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()

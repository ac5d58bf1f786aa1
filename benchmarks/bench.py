"""`make bench`: all programs that measure on a CPU within ten minutes, one after the other.

python -m benchmarks.bench

Its result file has the seconds and exit code of each program, and the names of the result files that they wrote.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.environment import RESULTS, environment, write_results
from indictune.console_text import table

# Ours alone, once at each size; a run of the program itself compares with plain `datasets`.
ROWS = ("--rows", "100000", "500000", "2000000", "--repeats", "1", "--vocabularies", "30000")
STAGES = ("--stages", "ours_read_and_clean", "ours_tokenise")
# Program -> flags, and whether it computes on one core.
PROGRAMS = {
    "speed": ((), False),
    "startup": ((), False),
    "dealing": ((), True),
    "preparation": ((*ROWS, *STAGES), True),
}


def written_since(began: float, folder: Path = RESULTS) -> list[str]:
    """Names of result files written after a time."""
    return sorted(path.name for path in folder.glob("*.json") if path.stat().st_mtime >= began)


def main() -> None:
    """Run all programs, write the result file, and exit with 1 if one failed."""
    about, began = environment(), time.time()  # before the programs load the machine
    seconds: dict[str, float] = {}
    exit_codes: dict[str, int] = {}
    for name, (flags, on_one_core) in PROGRAMS.items():
        variables = {"OMP_NUM_THREADS": "1"} if on_one_core else {}
        since = time.perf_counter()
        command = [sys.executable, "-m", f"benchmarks.{name}", *flags]
        exit_codes[name] = subprocess.run(command, env={**os.environ, **variables}, check=False).returncode
        seconds[name] = round(time.perf_counter() - since, 1)
    print(table(["program", "seconds"], [[name, f"{spent:.0f}"] for name, spent in seconds.items()]))
    results = {"environment": about, "seconds": seconds, "exit_codes": exit_codes, "results": written_since(began)}
    print(f"written to {write_results('bench', results)}")
    if failed := [name for name, code in exit_codes.items() if code]:
        sys.exit(f"Failed: {', '.join(failed)}.")


if __name__ == "__main__":
    main()

"""Seconds before anything happens: imports and help.

    python -m benchmarks.startup

Every command runs in fresh processes, by turns; medians of the seconds of the whole process are shown.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from benchmarks.environment import environment, write_results
from indictune.layout import table

LAPS = 5

COMMANDS = {
    "python": ["-c", "pass"],
    "import indictune": ["-c", "import indictune"],
    "indictune --help": ["-m", "indictune", "--help"],
    "import torch": ["-c", "import torch"],
}


def seconds_of(command: list[str]) -> float:
    """Of a whole process."""
    since = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - since


def main() -> None:
    """Measure, print the tables and write the result file."""
    os.environ["OMP_NUM_THREADS"] = str(os.cpu_count())
    commands: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(LAPS):
        for name, command in COMMANDS.items():
            commands[name].append(seconds_of(command))
    started = {name: round(statistics.median(laps), 3) for name, laps in commands.items()}
    print(table(["command", "seconds"], [[name, f"{seconds:.2f}"] for name, seconds in started.items()]), end="\n\n")
    results = {"environment": environment(), "laps": LAPS, "seconds_of_commands": started}
    print(f"written to {write_results('startup', results)}")


if __name__ == "__main__":
    main()

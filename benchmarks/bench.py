"""`make bench`: what is measured on a CPU within ten minutes, one program after the other, and how long each takes.

python -m benchmarks.bench
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.environment import environment, write_results
from indictune.layout import table

# Ours up to the size of the goal; plain `datasets`, whose seconds a row are the same, only where it is soon done.
ROWS = ("--rows", "100000", "500000", "2000000", "--plain_rows", "100000", "--vocabularies", "30000", "--repeats", "1")
STAGES = ("--stages", "ours_read_and_clean", "ours_tokenise", "plain_read", "plain_map")
# Each program, and whether it computes on one core.
PROGRAMS = {
    "speed": ((), False),
    "startup": ((), False),
    "dealing": ((), True),
    "chat_preparation": (("--rows", "4000"), True),
    "preparation": ((*ROWS, *STAGES), True),
}


def main() -> None:
    """Run all, each of which writes its own result file; then write the seconds."""
    about = environment()  # before the programs load the machine
    seconds: dict[str, float] = {}
    for name, (flags, on_one_core) in PROGRAMS.items():
        variables = {"OMP_NUM_THREADS": "1"} if on_one_core else {}
        since = time.perf_counter()
        command = [sys.executable, "-m", f"benchmarks.{name}", *flags]
        subprocess.run(command, env={**os.environ, **variables}, check=True)
        seconds[name] = round(time.perf_counter() - since, 1)
    seconds["all"] = round(sum(seconds.values()), 1)
    print(table(["program", "seconds"], [[name, f"{spent:.0f}"] for name, spent in seconds.items()]))
    print(f"written to {write_results('bench', {'environment': about, 'seconds': seconds})}")


if __name__ == "__main__":
    main()

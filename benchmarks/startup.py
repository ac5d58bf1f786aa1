"""Seconds before anything happens: imports, help, and the first batch of two million rows.

    python -m benchmarks.startup

Every line runs in fresh processes, by turns, and medians are shown. Seconds of a command are those of the whole
process; seconds of a sampler are those from the lengths to its first batch, without imports, and its memory is what
the process grew by at most. Beside ours is transformers' own sampler of rows of like length.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.environment import environment, write_results
from indictune.layout import table

LAPS = 5
ROWS = 2_000_000

COMMANDS = {
    "python": ["-c", "pass"],
    "import indictune": ["-c", "import indictune"],
    "indictune --help": ["-m", "indictune", "--help"],
    "import torch": ["-c", "import torch"],
    "from transformers import Trainer": ["-c", "from transformers import Trainer"],
}

OURS = "from indictune.data.batching import TrainingBatches as Batches"
THEIRS = "from transformers.trainer_pt_utils import LengthGroupedSampler as Batches"
SAMPLERS = {
    "TrainingBatches, 1 rank": (OURS, "Batches(lengths, 64, 1, 0, 1, seed=0, padded=False)"),
    "TrainingBatches, 8 ranks x 4 micro-batches": (OURS, "Batches(lengths, 256, 4, 0, 8, seed=0, padded=False)"),
    "TrainingBatches, the same, padded": (OURS, "Batches(lengths, 256, 4, 0, 8, seed=0, padded=True)"),
    "transformers' LengthGroupedSampler": (THEIRS, "Batches(64, lengths=lengths.tolist())"),
}

SET_UP = """
import json, time, torch
{imports}
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM:"))
lengths = torch.randint(3, 129, ({rows},), generator=torch.Generator().manual_seed(0))
with open("/proc/self/clear_refs", "w") as clear:
    clear.write("5")  # Linux forgets the peak of the imports
before, since = peak(), time.perf_counter()
next(iter({make}))
print(json.dumps([time.perf_counter() - since, peak() - before]))
"""


def seconds_of(command: list[str]) -> float:
    """Of a whole process."""
    since = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - since


def set_up(imports: str, make: str) -> tuple[float, int]:
    """Seconds to a sampler's first batch, and bytes that the process grew by."""
    program = SET_UP.format(imports=imports, make=make, rows=ROWS)
    result = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
    seconds, size = json.loads(result.stdout.splitlines()[-1])
    return seconds, size


def main() -> None:
    """Measure, print the tables and write the result file."""
    os.environ["OMP_NUM_THREADS"] = str(os.cpu_count())
    commands: dict[str, list[float]] = {name: [] for name in COMMANDS}
    samplers: dict[str, list[tuple[float, int]]] = {name: [] for name in SAMPLERS}
    for _ in range(LAPS):
        for name, command in COMMANDS.items():
            commands[name].append(seconds_of(command))
    for _ in range(LAPS):
        for name, program in SAMPLERS.items():
            samplers[name].append(set_up(*program))
    started = {name: round(statistics.median(laps), 3) for name, laps in commands.items()}
    print(table(["command", "seconds"], [[name, f"{seconds:.2f}"] for name, seconds in started.items()]), end="\n\n")
    dealt: dict[str, dict[str, Any]] = {
        name: {
            "seconds": round(statistics.median(seconds for seconds, _ in laps), 3),
            "peak_bytes": statistics.median(size for _, size in laps),
        }
        for name, laps in samplers.items()
    }
    body = [[name, f"{found['seconds']:.2f}", f"{found['peak_bytes'] / 1e6:,.0f}"] for name, found in dealt.items()]
    print(table([f"first batch of {ROWS:,} rows", "seconds", "MB"], body), end="\n\n")
    results = {"environment": environment(), "laps": LAPS, "seconds_of_commands": started, "samplers": dealt}
    print(f"written to {write_results('startup', results)}")


if __name__ == "__main__":
    main()

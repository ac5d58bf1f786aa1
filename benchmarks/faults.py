"""The fault scoreboard: nineteen things that can happen to a run, for our script and for the stock Trainer.

    OMP_NUM_THREADS=1 python -m benchmarks.faults [--counts short|full] [--rows 1 3 ...] [--contender ours]

The short counts take ten minutes on 2 cores, the full ones hours. `--rows` and `--contender` write a separate result
file.

Each run trains the built-in BERT on 32 rows for 8 steps in 2 epochs and saves each step. After a fault it is started
again until a start succeeds or three have failed. `Job.verdict` defines `exact` and the other
outcomes. Rows 11, 12, 14, 15, 16, 18 and 19 count our tests; for the first five, the stock stack's figures are in the
result files.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import fault_builds, fault_launches, fault_numbers, fault_rows, fault_sizes, fault_stops
from benchmarks.environment import environment, write_results
from benchmarks.fault_contenders import DDP, FSDP2, ONE, ZERO2, ZERO3_OFFLOAD, Contender, contenders
from benchmarks.fault_runs import Counts, Found
from benchmarks.fault_suites import SUITES, count_tests
from indictune.console_text import table
from tests.ranks.launching import python, start

# Name -> short and full count. "every ...": try one in so many; the others: how many to try.
_COUNTS = {
    "kills": (4, 120),
    "kills of two ranks": (2, 60),
    "kills of ZeRO-3": (0, 20),
    "every write": (30, 1),
    "every write of a rank": (0, 6),
    "every corruption": (10, 1),
    "every corruption of a shard": (0, 8),
    "every corruption of ZeRO's shard": (0, 17),
    "random stops": (1, 15),
    "every stop": (5, 1),
    "every stop of one rank": (5, 1),
    "places to stop one rank": (2, 5),
    "every launcher": (3, 1),
    "signals to launchers": (1, 2),
    "restarts": (1, 2),
    "limits": (1, 3),
    "every kind of write": (4, 1),
    "every refused write": (1000, 2),
    "every bad step": (7, 1),
    "every step": (5, 1),
    "kinds of batches": (3, 4),
    "kinds of batches with workers": (1, 4),
    "launches to resume under": (1, 5),
    "every change of launch": (3, 1),
    "many rows": (20_000, 2_000_000),
    "steps of many rows": (0, 5_000),
    "kills of a build": (0, 20),
}
COUNTS = {name: {key: pair[number] for key, pair in _COUNTS.items()} for number, name in enumerate(("short", "full"))}
RUN_ROWS: dict[str, tuple[str, Callable[[Contender, Counts, Path], Found]]] = {
    "6": ("rank lost", fault_launches.lost_ranks),  # first, because it mostly waits
    "1": ("SIGKILL", fault_rows.kills),
    "2": ("SIGKILL at a write", fault_rows.writes),
    "3": ("corrupted file", fault_rows.corruptions),
    "4": ("SIGTERM", fault_stops.stops),
    "5": ("launcher stopped", fault_launches.orphans),
    "7": ("full disk", fault_stops.full_disks),
    "8": ("bad numbers", fault_numbers.bad_numbers),
    "9": ("resume after any step", fault_launches.resumes),
    "10": ("another launch", fault_launches.other_launches),
    "13": ("millions of rows", fault_sizes.many_rows),
    "17": ("SIGKILL in a build", fault_builds.kills_of_builds),
}
SUITE_ROWS = {
    "11": "wrong configuration",
    "12": "bad data file",
    "14": "code in a file",
    "15": "token",
    "16": "hostile name",
    "18": "public server",
    "19": "what leaves the machine",
}
TITLES = {row: title for row, (title, _) in RUN_ROWS.items()} | SUITE_ROWS
NOT_RUN: Found = {
    "not run": "rows 11 to 16: benchmarks/results/*-faults-full-rows-11-12-14-15-16.json; 18 and 19 are our tests"
}
Part = Callable[[Path], Found]


def parts(ours: Contender, stock: Contender, counts: Counts) -> dict[tuple[str, str], list[Part]]:
    """What fills each cell, by row and column title. Each part takes a folder; two parts run at a time."""
    found: dict[tuple[str, str], list[Part]] = {}
    for row, (_, run) in RUN_ROWS.items():
        for contender in (ours, stock):
            each = [contender] if row != "9" else _by_launch(contender, counts["launches to resume under"])
            found[row, contender.title] = [partial(run, one, counts) for one in each]
    for row in SUITE_ROWS:
        found[row, ours.title] = [partial(count_tests, SUITES[row])]
        found[row, stock.title] = [lambda _: NOT_RUN]
    reasons = dict(stock.unsupported)
    found["9", stock.title].append(lambda _: reasons)
    return found


def _by_launch(contender: Contender, number: int) -> list[Contender]:
    """The contender once for each of its first so many launches, so that they run in parallel."""
    names = [name for name in (ONE, DDP, FSDP2, ZERO2, ZERO3_OFFLOAD)[:number] if name in contender.launches]
    return [replace(contender, launches={name: contender.launches[name]}) for name in names]


def fill(cell: tuple[str, str], part: Part) -> Found:
    """Run a part and print what it found; an exception is a finding."""
    since = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        try:
            found = part(Path(work))
        except Exception as error:
            traceback.print_exc()
            found = {"broke": {repr(error)[-500:]: 1}}
    cases = "; ".join(f"{case}: {_outcomes(counts)}" for case, counts in found.items())
    print(f"{time.monotonic() - since:6.0f} s  {cell[0]:>2} {cell[1]}: {cases}", flush=True)
    return found


def _outcomes(counts: Any) -> str:
    if not isinstance(counts, Mapping):
        return str(counts)
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def scoreboard(results: Mapping[str, Mapping[str, Found]], titles: list[str]) -> str:
    """The table: a line for each case of a row."""
    body = []
    for row, columns in sorted(results.items(), key=lambda item: int(item[0])):
        cases = dict.fromkeys(case for title in titles for case in columns[title])
        for case in cases:
            cells = [_outcomes(columns[title][case]) if case in columns[title] else "" for title in titles]
            body.append([row, TITLES[row], case, *cells])
    return table(["row", "fault", "case", *titles], body)


def main() -> None:
    """Print the scoreboard and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", choices=COUNTS, default="short")
    parser.add_argument("--rows", choices=sorted(TITLES, key=int), nargs="+", default=sorted(TITLES, key=int))
    parser.add_argument("--contender", choices=("ours", "stock Trainer"), help="only this one; default: both")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it, and its runs
    since = time.monotonic()
    about = environment()
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(2) as pool:
        both = contenders(Path(work))
        start([*python(), "benchmarks/stock_trainer.py", "--help"])  # starts the server that both threads fork from
        titles = [each.title for each in both if options.contender in (None, each.title)]
        wanted = {(row, title) for row in options.rows for title in titles}
        todo = {cell: each for cell, each in parts(*both, COUNTS[options.counts]).items() if cell in wanted}
        futures = {cell: [pool.submit(fill, cell, part) for part in each] for cell, each in todo.items()}
        filled = {cell: dict(ChainMap(*[each.result() for each in found[::-1]])) for cell, found in futures.items()}
    results = {row: {title: filled[row, title] for title in titles} for row in options.rows}
    print(scoreboard(results, titles))
    name = "faults" if options.counts == "short" else "faults-full"
    if options.rows != parser.get_default("rows"):
        name += f"-rows-{'-'.join(options.rows)}"
    if options.contender:
        name += f"-{options.contender.replace(' ', '-').lower()}"
    seconds = round(time.monotonic() - since)
    found = {"environment": about, "counts": COUNTS[options.counts], "seconds": seconds, "faults": results}
    print(write_results(name, found))


if __name__ == "__main__":
    main()

"""What happens to runs that something happens to: ours and the stock Trainer's, as a scoreboard of sixteen rows.

    OMP_NUM_THREADS=1 python -m benchmarks.faults [--counts short|full] [--rows 1 3 ...]

The short counts take ten minutes on 2 cores, the full ones hours: rows that are asked for by number get a result file
of their own.

Each run trains the built-in BERT on 32 rows for 8 steps in 2 epochs and saves each step. After a fault it is started
again, with nobody lending a hand, until a start gives 0 or three have failed. `exact`: it went on from its newest
whole checkpoint, as it said, and ended with the very weights of the run that nothing happened to, and with the loss
and the learning rate of each step, told once; `exact but for its log`: without these. `did steps again`: it ended so,
but began afresh or at an older checkpoint. `stuck`: it did not end. `wrong`: it ended with other weights. `at a later
start`, beside these: its first start had failed. Of the rows 11, 12, 14, 15 and 16, ours are test cases: pytest runs
the suite of the row.
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

from benchmarks import fault_launches, fault_numbers, fault_rows, fault_sizes, fault_suites
from benchmarks.environment import environment, write_results
from benchmarks.fault_rows import Counts, Found
from benchmarks.fault_runs import DDP, FSDP2, ONE, ZERO2, ZERO3_OFFLOAD, Contender, contenders
from indictune.console_text import table
from tests.ranks.launching import python, start

# Of kills: how many. `every`: of the places, of which one is tried. Of others: how many of the kinds.
COUNTS: dict[str, Counts] = {
    "short": {
        "kills": 4,
        "kills of two ranks": 2,
        "kills of ZeRO-3": 0,
        "every write": 30,
        "every write of a rank": 0,
        "every corruption": 10,
        "every corruption of a shard": 0,
        "every corruption of ZeRO's shard": 0,
        "random stops": 1,
        "every stop": 5,
        "every stop of one rank": 5,
        "places to stop one rank": 2,
        "every launcher": 3,
        "signals to launchers": 1,
        "ways to lose a rank": 2,
        "restarts": 1,
        "limits": 1,
        "every kind of write": 4,
        "every refused write": 1000,
        "every bad step": 7,
        "every step": 5,
        "kinds of batches": 3,
        "kinds of batches with workers": 1,
        "launches gone on under": 1,
        "every change of launch": 3,
        "many rows": 20_000,
        "steps of many rows": 0,
        "slow suites": 0,
    },
    "full": {
        "kills": 120,
        "kills of two ranks": 60,
        "kills of ZeRO-3": 20,
        "every write": 1,
        "every write of a rank": 6,
        "every corruption": 1,
        "every corruption of a shard": 8,
        "every corruption of ZeRO's shard": 17,
        "random stops": 15,
        "every stop": 1,
        "every stop of one rank": 1,
        "places to stop one rank": 5,
        "every launcher": 1,
        "signals to launchers": 2,
        "ways to lose a rank": 2,
        "restarts": 2,
        "limits": 3,
        "every kind of write": 1,
        "every refused write": 2,
        "every bad step": 1,
        "every step": 1,
        "kinds of batches": 4,
        "kinds of batches with workers": 4,
        "launches gone on under": 5,
        "every change of launch": 1,
        "many rows": 2_000_000,
        "steps of many rows": 5_000,
        "slow suites": 1,
    },
}
RUN_ROWS: dict[str, tuple[str, Callable[[Contender, Counts, Path], Found]]] = {
    "6": ("rank lost", fault_launches.lost_ranks),  # first, for it waits more than it computes
    "1": ("SIGKILL", fault_rows.kills),
    "2": ("SIGKILL at a write", fault_rows.writes),
    "3": ("corrupted file", fault_rows.corruptions),
    "4": ("SIGTERM", fault_rows.stops),
    "5": ("launcher stopped", fault_launches.orphans),
    "7": ("full disk", fault_rows.full_disks),
    "8": ("bad numbers", fault_numbers.bad_numbers),
    "9": ("resume after any step", fault_launches.resumes),  # in parts: see below
    "10": ("another launch", fault_launches.other_launches),
    "13": ("millions of rows", fault_sizes.many_rows),
}
SUITE_ROWS = {
    "11": "wrong configuration",
    "12": "bad data file",
    "14": "code in a file",
    "15": "token",
    "16": "hostile name",
}
SLOW_SUITES = ("14", "15")
TITLES = {row: title for row, (title, _) in RUN_ROWS.items()} | SUITE_ROWS


def parts(ours: Contender, stock: Contender, counts: Counts) -> dict[tuple[str, str], list[Callable[[Path], Found]]]:
    """What fills the cells, by row and column; each takes a folder. What takes an hour is in parts, two at a time."""
    found: dict[tuple[str, str], list[Callable[[Path], Found]]] = {}
    for row, (_, run) in RUN_ROWS.items():
        for contender in (ours, stock):
            if row == "9":
                found[row, contender.title] = under_each_launch(contender, counts)
            else:
                found[row, contender.title] = [partial(run, contender, counts)]
    both = {
        "11": fault_suites.wrong_launches,
        "14": fault_suites.canaries,
        "15": fault_suites.tokens,
        "16": fault_suites.best_outside,
    }
    alone = {"12": fault_suites.stock_data, "14": fault_suites.stock_metadata, "16": fault_suites.stock_names}
    for row in SUITE_ROWS:
        if counts["slow suites"] or row not in SLOW_SUITES:
            found[row, ours.title] = [partial(fault_suites.suite, row)]
            found[row, ours.title] += [partial(both[row], ours)] if row in both else []
        found[row, stock.title] = [partial(both[row], stock)] if row in both else []
        found[row, stock.title] += [alone[row]] if row in alone else []
    found["12", stock.title].append(partial(fault_suites.stock_strangers, stock))
    return found


def under_each_launch(contender: Contender, counts: Counts) -> list[Callable[[Path], Found]]:
    """The parts of row 9: one launch after the other, as far as they are gone on under."""
    found: list[Callable[[Path], Found]] = []
    for name in (ONE, DDP, FSDP2, ZERO2, ZERO3_OFFLOAD)[: counts["launches gone on under"]]:
        if name in contender.launches:
            one = replace(contender, launches={name: contender.launches[name]})
            found.append(partial(fault_launches.resumes, one, counts))
        else:
            found.append(partial(told, {name: contender.cannot[name]}))
    return found


def told(found: Found, _: Path) -> Found:
    """What is known without a run."""
    return found


def fill(cell: tuple[str, str], part: Callable[[Path], Found]) -> Found:
    """Run a part; where it breaks, that is what was found."""
    since = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        try:
            found = part(Path(work))
        except Exception as error:
            traceback.print_exc()
            found = {"broke": {repr(error)[-500:]: 1}}
    print(f"{time.monotonic() - since:6.0f} s  {cell[0]:>2} {cell[1]}: {in_words(found)}", flush=True)
    return found


def in_words(found: Found) -> str:
    """A cell, as `case: 3 exact, 1 stuck`."""
    return "; ".join(f"{case}: {_counted(counts)}" for case, counts in found.items())


def _counted(counts: Any) -> str:
    if not isinstance(counts, Mapping):
        return str(counts)
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def shown(results: Mapping[str, Mapping[str, Found]], titles: list[str]) -> str:
    """The scoreboard: a line for each case of a row."""
    body = []
    for row, columns in sorted(results.items(), key=lambda item: int(item[0])):
        cases = dict.fromkeys(case for title in titles for case in columns[title])
        for case in cases:
            cells = [_counted(columns[title][case]) if case in columns[title] else "" for title in titles]
            body.append([row, TITLES[row], case, *cells])
    return table(["row", "fault", "case", *titles], body)


def main() -> None:
    """Print the scoreboard and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", choices=COUNTS, default="short")
    parser.add_argument("--rows", choices=sorted(TITLES, key=int), nargs="+", default=sorted(TITLES, key=int))
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored, and by all it starts
    since = time.monotonic()
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(2) as pool:
        both = contenders(Path(work))
        start([*python(), "benchmarks/stock_trainer.py", "--help"])  # one server for both threads
        todo = parts(both[0], both[1], COUNTS[given.counts])
        asked = {cell: each for cell, each in todo.items() if cell[0] in given.rows}
        futures = {cell: [pool.submit(fill, cell, part) for part in each] for cell, each in asked.items()}
        filled = {cell: dict(ChainMap(*[each.result() for each in found[::-1]])) for cell, found in futures.items()}
    titles = [contender.title for contender in both]
    results: dict[str, dict[str, Found]] = {
        row: {title: filled.get((row, title), {"not run": "in the short counts"}) for title in titles}
        for row in given.rows
    }
    print(shown(results, titles))
    about = {"environment": environment(), "counts": COUNTS[given.counts], "seconds": round(time.monotonic() - since)}
    name = "faults" if given.counts == "short" else "faults-full"
    if given.rows != parser.get_default("rows"):
        name += f"-rows-{'-'.join(given.rows)}"
    print(write_results(name, {**about, "faults": results}))


if __name__ == "__main__":
    main()

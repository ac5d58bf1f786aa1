"""Sweeps whose runs are acted: see `acting_run.py`. They run in forked processes, which a test can kill."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from indictune.checkpoint.store import Manifest
from indictune.errors import Problems
from indictune.sweep.definition import SweepPlan, Words, read_space
from indictune.sweep.results import write_results
from indictune.sweep.trials import Trials
from tests.sweep.acting_run import STEPS

ACTING = str(Path(__file__).with_name("acting_run.py"))
RATES = {"learning_rate": "1e-5..1e-1"}


def acted_sweep(
    folder: Path,
    given: Mapping[str, str] = RATES,
    trials: int | None = None,
    seeds: int = 1,
    storage: str | None = None,
) -> SweepPlan:
    """A sweep of acted runs; without a number of trials, a grid."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "manifests.json"
    file.write_text(json.dumps(manifests()), encoding="utf-8")

    def command(flags: Words, into: Path) -> list[str]:
        words = [word for name, values in flags.items() for word in (f"--{name}", *values)]
        return [sys.executable, ACTING, str(into), str(file), *words]

    grid = [dict(zip(given, values, strict=True)) for values in product(*(each.split(",") for each in given.values()))]
    return SweepPlan(
        folder=folder,
        definition={"task": "classification", "space": str(given), "seeds": str(seeds), "weight_decay": "0.01"},
        space=read_space("--search", given, given, Problems()),
        grid=[] if trials else grid,
        trials=trials or len(grid),
        repeats={f"seed-{seed}": {"seed": [str(seed)]} for seed in range(17, 17 + seeds)},
        metric="macro_f1",
        maximises=True,
        storage=storage or f"sqlite:///{folder.absolute() / 'sweep.db'}",
        command=command,
        recipe={"train_file": ["train.csv"], "output_dir": [str(folder / "best")]},
    )


def manifests() -> dict[str, str]:
    """The manifests of checkpoints that flags ask for (`2 planned`), and of those that a signal does (`2 asked`)."""
    kinds = [(step, kind) for step in range(1, STEPS + 1) for kind in ("planned", "asked")]
    made = (Manifest(step, 0, "", 1, 8, "", "", "", {}, False, {}, planned=kind == "planned") for step, kind in kinds)
    return {f"{step} {kind}": each.to_json() for (step, kind), each in zip(kinds, made, strict=True)}


def swept(plan: SweepPlan) -> Trials:
    """The sweep after it has run, or was continued."""
    trials = Trials(plan)
    trials.run_all(lambda: write_results(trials))
    write_results(trials)
    return trials


def started(plan: SweepPlan) -> multiprocessing.process.BaseProcess:
    """A process that runs the sweep, in a process group of its own."""

    def run() -> None:
        os.setpgid(0, 0)
        swept(plan)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def outcome(folder: Path) -> dict[str, Any]:
    """What must be the same however often the sweep was killed: settings, values, states and verdict."""
    record = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    kept = ("number", "setting", "state", "value", "values", "interval", "evaluations", "message")
    trials = [{name: each.get(name) for name in kept} for each in record["trials"]]
    return {"trials": trials, **{name: record[name] for name in ("best", "verdicts")}}

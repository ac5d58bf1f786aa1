"""Sweeps whose runs are acted: see `acting_run.py`. They run in forked processes, which a test can kill."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from indictune.checkpoint.store import Manifest
from indictune.sweep.definition import Dimension, Repeat, SweepPlan, Words, combinations
from indictune.sweep.results import write_results
from indictune.sweep.trials import Trials
from tests.sweep.acting_run import STEPS

ACTING = str(Path(__file__).with_name("acting_run.py"))
RATES = (Dimension("learning_rate", low=1e-5, high=1e-1),)


def acted_sweep(
    folder: Path,
    dimensions: tuple[Dimension, ...] = RATES,
    trials: int | None = None,
    seeds: int = 1,
    prunes: bool = True,
    storage: str | None = None,
) -> SweepPlan:
    """A sweep of acted runs; without a number of trials, a grid."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "manifests.json"
    file.write_text(json.dumps(manifests()), encoding="utf-8")

    def command(flags: Words, into: Path) -> list[str]:
        words = [word for name, values in flags.items() for word in (f"--{name}", *values)]
        return [sys.executable, ACTING, str(into), str(file), *words]

    space = {each.name: ",".join(each.ends) for each in dimensions}
    return SweepPlan(
        folder=folder,
        definition={"task": "classification", "space": space, "seeds": seeds, "flags": {"weight_decay": ["0.01"]}},
        dimensions=dimensions,
        is_grid=trials is None,
        trials=len(combinations(dimensions)) if trials is None else trials,
        repeats=[Repeat(f"seed-{seed}", {"seed": [str(seed)]}, None, seed) for seed in range(17, 17 + seeds)],
        metric="macro_f1",
        maximises=True,
        prunes=prunes and trials is not None,
        keeps_models=False,
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
    trials = [{name: each[name] for name in kept} for each in record["trials"]]
    return {"trials": trials, **{name: record[name] for name in ("best", "verdict", "importances")}}

"""Try the settings of a sweep: take a trial, run its repeats, and give its value back."""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import statistics
import sys
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError

from indictune.checkpoint import store
from indictune.credentials import without_tokens
from indictune.errors import UserError
from indictune.evaluation.comparison import PredictedRow, difference_of, macro_f1_of, read_predictions
from indictune.evaluation.uncertainty import Estimate
from indictune.files import METRICS, is_finished, json_or_nothing, lock_file, lock_if_possible
from indictune.ray_cluster import processors
from indictune.stop_signals import SIGNALS, Stopped
from indictune.supervise.run_folder import RUN_LOCK, RunEnd, of_another_launch, run_in_folder
from indictune.sweep.definition import RECORD, SweepPlan, Words, typed
from indictune.upstream import id_in_storage

_WAIT_S = 1.0
_STOP = ".stop"  # in the folder of a run on another machine: asks it to save and stop
_OPENINGS = 5
_HEAVY = (f"{store.PREFIX}*", "*.safetensors", "*.bin", "*.pt")


@contextmanager
def _refusing(url: str) -> Iterator[None]:
    """A block in which a storage that cannot be used is a `UserError`."""
    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError, ImportError, RuntimeError) as error:
        reason = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
        raise UserError("sweep-storage", "--storage", url, reason=without_tokens(reason)) from None


def _opened(url: str) -> RDBStorage:
    for _ in range(_OPENINGS - 1):
        try:
            return RDBStorage(url)
        except (IntegrityError, OperationalError, RuntimeError, AssertionError):  # another sweep makes its tables
            time.sleep(_WAIT_S)
    return RDBStorage(url)


class Trials:
    """The trials of a sweep, in its storage.

    A trial belongs to the sweep that made it, by machine and folder. The lock of its folder shows whether it runs.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self.plan, self._owner = plan, f"{socket.gethostname()}:{plan.folder.absolute()}"
        self._taken, self._one_at_a_time, self._stops = set[int](), threading.Lock(), threading.Event()
        self._start: Callable[..., RunEnd] = run_in_folder
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with _refusing(plan.storage):
            self._storage = _opened(plan.storage)
            self.study = optuna.create_study(
                storage=self._storage,
                study_name=plan.study_name,
                pruner=optuna.pruners.MedianPruner(),
                direction="maximize" if plan.maximises else "minimize",
                load_if_exists=True,
            )

    def all(self) -> list[FrozenTrial]:
        """The trials so far, in their order."""
        return self.study.get_trials(deepcopy=False)[: self.plan.trials]

    def ranked(self) -> list[FrozenTrial]:
        """The trials with a value, the best first."""
        done = [each for each in self.all() if each.state == TrialState.COMPLETE]
        sign = -1 if self.plan.maximises else 1
        return sorted(done, key=lambda each: (sign * float(each.value or 0), each.number))

    def run_all(self, after_each: Callable[[], None]) -> None:
        """Try all settings that no other sweep tries. `Stopped` if a run was stopped from elsewhere."""
        with _refusing(self.plan.storage):
            while (taken := self._take()) is not None:
                trial, lock = taken
                with lock:
                    self._run(trial)
                    with self._one_at_a_time:
                        self._remove_weights()
                        after_each()

    def run_all_on_cluster(self, after_each: Callable[[], None], processes: int) -> None:
        """As `run_all`, on the Ray cluster: as many settings at once as it has GPUs for, or CPU cores without GPUs.

        A run has so many processes, on one machine. A signal asks all runs to save and stop.
        """
        kind, counts = processors("--num_processes", processes, max)
        self._start = partial(_run_on_cluster, {f"num_{kind.lower()}s": processes})
        for number in SIGNALS:
            signal.signal(number, lambda *_: self._stops.set())
        at_once = sum(count // processes for count in counts)
        with ThreadPoolExecutor(at_once) as threads:
            try:
                for ended in as_completed([threads.submit(self.run_all, after_each) for _ in range(at_once)]):
                    ended.result()
            finally:
                self._stops.set()

    def _take(self) -> tuple[FrozenTrial, AbstractContextManager[object]] | None:
        """A trial that this sweep has begun, or begins now, with its lock; None if none is left."""
        with self._one_at_a_time:
            return self._next()

    def _next(self) -> tuple[FrozenTrial, AbstractContextManager[object]] | None:
        while True:
            for each in self.all():
                folder, is_ours = self.plan.folder_of(each.number, ""), each.user_attrs["owner"] == self._owner
                is_tried = each.state.is_finished() or each.number in self._taken
                if is_tried or not (is_ours or folder.exists()):
                    continue
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    lock = (lock_if_possible if is_ours else lock_file)(folder / RUN_LOCK)
                except OSError:  # another process has it
                    continue
                if not self.all()[each.number].state.is_finished():
                    self._taken.add(each.number)
                    return each, lock
            if len(self.all()) == self.plan.trials:
                return None
            begun = create_trial(state=TrialState.RUNNING, user_attrs={"owner": self._owner})
            self._storage.create_new_trial(self._storage.get_study_id_from_name(self.plan.study_name), begun)

    def _setting(self, trial: FrozenTrial) -> Words:
        """The flags of a trial. Each is suggested alone, by its own seed, so that a resumed sweep suggests it too."""
        found = {}
        for name, space in self.plan.space.items():
            sampler = TPESampler(seed=zlib.crc32(f"{self.plan.study_name} {trial.number} {name}".encode()))
            value = self.plan.grid[trial.number][name] if self.plan.grid else trial.params.get(name)
            if value is None:
                value = sampler.sample_independent(self.study, trial, name, space)
            self._storage.set_trial_param(id_in_storage(trial), name, space.to_internal_repr(value), space)
            found[name] = [typed(value)]
        return found

    def _run(self, trial: FrozenTrial) -> None:
        """Run the repeats of a trial, and tell the storage how it ended."""
        plan, setting, values = self.plan, self._setting(trial), dict[str, float]()
        for name, flags in plan.repeats.items():
            folder, is_judged = plan.folder_of(trial.number, name), not plan.grid and not values
            end = self._end_of(plan.command({**flags, **setting}, folder), folder, is_judged)
            evaluations, is_worse = self._judged(folder) if is_judged else ({}, False)
            for number, evaluation in evaluations.items():
                self._storage.set_trial_intermediate_value(id_in_storage(trial), number, evaluation)
            if is_worse:
                self.study.tell(trial.number, state=TrialState.PRUNED)
                return
            if end.state == "resumable":
                raise Stopped(end.message)
            if end.state == "user_error" and trial.number == 0:
                (plan.folder / RECORD).unlink(missing_ok=True)  # so that the corrected command may take the folder
                raise UserError("sweep-first-refused", value=end.message)
            scores = json_or_nothing(folder / METRICS).get(plan.block, {}) if end.state == "ok" else {}
            values[name] = float(scores.get(plan.metric, math.nan))
            if not math.isfinite(values[name]):
                why = without_tokens(end.message) or f"its {plan.metric} is {values[name]}"
                self._storage.set_trial_user_attr(id_in_storage(trial), "message", f"{name}: {why}")
                self.study.tell(trial.number, state=TrialState.FAIL)
                return
        found = macro_f1(plan, trial)
        interval = "" if found is None else f"{found.low:.4f} to {found.high:.4f}"
        self._storage.set_trial_user_attr(id_in_storage(trial), "interval", interval)
        self._storage.set_trial_user_attr(id_in_storage(trial), "values", values)
        value = statistics.fmean(values.values())
        if found is not None and plan.block == "test":  # the rows of all folds, as the verdict has them
            value = found.value
        self.study.tell(trial.number, value)

    def _end_of(self, command: list[str], folder: Path, is_judged: bool) -> RunEnd:
        """How a run ended that was started, or resumed, or had ended before."""

        def is_enough() -> bool:
            return self._stops.is_set() or (is_judged and self._judged(folder)[1])

        while True:
            while of_another_launch(folder, "") is not None:  # of a sweep that was killed
                time.sleep(_WAIT_S)
            if self._stops.is_set():
                raise Stopped("the sweep ends")
            if is_finished(folder) or is_enough():
                return RunEnd("ok", "")
            end = self._start(command, folder, {}, is_enough)
            if end.state == "ok" or of_another_launch(folder, "") is None:
                return end

    def _judged(self, folder: Path) -> tuple[dict[int, float], bool]:
        """The evaluations of a run, by number, up to one that is worse than the median of earlier trials, if any is.

        They are read from the newest checkpoint that the run's flags ask for, also when the run has ended. So the
        decision does not depend on when the sweep looked, or was killed. The last step has nothing left to save.
        """
        found, name = dict[int, float](), f"eval_{self.plan.metric}"
        manifests = ((each, store.read_manifest(each)) for each in store.checkpoints_in(folder))
        planned = (each for each, manifest in manifests if manifest is not None and manifest.planned)
        state = json_or_nothing(next(planned, folder) / "trainer_state.json")
        for row in state.get("log_history", []):
            if name in row:
                found[len(found) + 1] = float(row[name])
                so_far = create_trial(state=TrialState.RUNNING, intermediate_values=found)
                if row["step"] < state["max_steps"] and self.study.pruner.prune(self.study, so_far):
                    return found, True
        return found, False

    def _remove_weights(self) -> None:
        """Remove checkpoints and weights of the trials that have ended, but for the best so far."""
        best = self.ranked()[:1]
        for trial in (each for each in self.all() if each.state.is_finished() and each not in best):
            for pattern in _HEAVY:
                for path in self.plan.folder_of(trial.number, "").glob(f"*/{pattern}"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _run_on_cluster(
    room: Mapping[str, int],
    command: Sequence[str],
    folder: Path,
    variables: Mapping[str, str],
    is_enough: Callable[[], bool],
) -> RunEnd:
    """As `run_in_folder`, on a machine of the Ray cluster that has room, and sees the folder."""
    import ray

    stop = folder / _STOP
    folder.mkdir(parents=True, exist_ok=True)
    stop.unlink(missing_ok=True)
    task: Any = ray.remote(_run_here)
    run = task.options(**room).remote(os.getcwd(), command[1:], folder, variables)
    while not ray.wait([run], timeout=_WAIT_S)[0]:
        if is_enough():
            stop.touch()
    end: RunEnd = ray.get(run)
    return end


def _run_here(current: str, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> RunEnd:
    os.chdir(current)
    return run_in_folder([sys.executable, *words], folder, variables, (folder / _STOP).exists)


def macro_f1(plan: SweepPlan, *trials: FrozenTrial) -> Estimate | None:
    """The macro-F1 of a trial, or that of the second less that of the first, on all rows that its runs have scored.

    None if some rows are not here, are others, or have several labels, or if settings are compared by another metric.
    """
    of_seeds: dict[tuple[int, str], list[PredictedRow]] = defaultdict(list)
    try:
        for trial, (name, flags) in product(trials, plan.repeats.items()):
            predicted = read_predictions(plan.folder_of(trial.number, name))
            of_seeds[trial.number, flags["seed"][0]] += predicted.get(plan.block, [])
    except UserError:
        return None
    rows, *others = ([row[:2] for row in each] for each in of_seeds.values())
    if plan.metric != "macro_f1" or not rows or any(each != rows for each in others):
        return None
    columns = np.array([[label for _, label in rows], *([row[2] for row in each] for each in of_seeds.values())])
    names, codes = np.unique(columns, return_inverse=True)
    labels, *chosen = codes.reshape(columns.shape)
    if len(trials) == 1:
        return macro_f1_of(labels, np.array(chosen), len(names))
    first, second = np.split(np.array(chosen), 2)
    return difference_of(labels, first, second, len(names)).difference

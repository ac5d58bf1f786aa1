"""Try the settings of a sweep one after another: take a trial, run its repeats, and give its value back."""

from __future__ import annotations

import math
import shutil
import socket
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from indictune.checkpoint import store
from indictune.credentials import without_tokens
from indictune.errors import UserError
from indictune.evaluation.breakdown import without_markup
from indictune.files import METRICS, is_finished, json_or_nothing, lock_file, lock_if_possible
from indictune.stop_signals import Stopped
from indictune.supervise.launched_run import RunEnd, run_in_folder
from indictune.supervise.run_folder import RUN_LOCK, of_another_launch
from indictune.sweep.definition import RECORD, Repeat, SweepPlan, combinations
from indictune.sweep.scored import interval_of

_UNOWNED_S = 5.0  # after which a trial without an owner belongs to nobody: its sweep was killed
_SETTLED_S = 1.0  # after which two sweeps that took one trial agree on whose it is
_WAIT_S = 1.0
_TRIES = 3
_PATIENCE_S = 20.0  # with another process that writes to the same file
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "tokenizer.json")
_FOLDERS = (f"{store.PREFIX}*", "damaged-*", f"{store.UNFINISHED}*", store.UNFINISHED_MODEL)
RAN = (TrialState.COMPLETE, TrialState.PRUNED)


class EachAlone(BaseSampler):
    """Suggests each value alone, so that a resumed sweep suggests what it would have.

    In a grid, the number of a trial is that of its combination. In a search, tree-structured Parzen estimators are
    seeded for each suggestion by the seed, the trial's number and the flag.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self._settings = combinations(plan.dimensions) if plan.is_grid else []
        self._seed = plan.first_seed

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        if self._settings:
            return self._settings[trial.number][param_name]
        seed = zlib.crc32(f"{self._seed} {trial.number} {param_name}".encode())
        return TPESampler(seed=seed).sample_independent(study, trial, param_name, param_distribution)


@contextmanager
def refusing_storage(url: str) -> Iterator[None]:
    """A block in which a storage that cannot be used is a `UserError`."""
    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError, ImportError, RuntimeError) as error:
        cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else error
        reason = str(getattr(cause, "orig", None) or cause).partition("\n")[0].rstrip(".")
        raise UserError("sweep-storage", "--storage", url, reason=without_tokens(reason)) from None


def _opened(url: str) -> RDBStorage:
    """The storage. Another sweep may be making its tables, which fails for one of the two, so it is tried again."""
    options = {"connect_args": {"timeout": _PATIENCE_S}} if url.startswith("sqlite") else {}
    for _ in range(_TRIES):
        with suppress(SQLAlchemyError, RuntimeError, AssertionError):
            return RDBStorage(url, engine_kwargs=options)
        time.sleep(_WAIT_S)
    return RDBStorage(url, engine_kwargs=options)


@dataclass
class Trials:
    """The trials of a sweep, in its storage.

    Attributes:
        owner: this machine and folder.
    """

    plan: SweepPlan
    owner: str = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        self.owner = f"{socket.gethostname()}:{plan.folder.absolute()}"
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with refusing_storage(plan.storage):
            self._storage = _opened(plan.storage)
            is_recorded = "definition" in json_or_nothing(plan.folder / RECORD)
            is_known = is_recorded or plan.study_name in optuna.get_all_study_names(self._storage)
            if not is_known and (plan.folder / "trials").exists():  # their runs may be of other settings
                raise UserError("sweep-record-damaged", "--output_dir", plan.folder, record=RECORD)
            self.study = optuna.create_study(
                storage=self._storage,
                study_name=plan.study_name,
                sampler=EachAlone(plan),
                pruner=optuna.pruners.MedianPruner() if plan.prunes else optuna.pruners.NopPruner(),
                direction="maximize" if plan.maximises else "minimize",
                load_if_exists=True,
            )
            self._study_id = self._storage.get_study_id_from_name(plan.study_name)

    def all(self) -> list[FrozenTrial]:
        """The trials so far, in their order; those that a grid has no combination for are left out."""
        found = self.study.get_trials(deepcopy=False)
        return found[: self.plan.trials] if self.plan.is_grid else found

    def is_here(self, trial: FrozenTrial) -> bool:
        """Whether the folder of this sweep has the runs of a trial; numbers are those of all sweeps that share it."""
        return (self.plan.folder_of(trial.number) / RUN_LOCK).exists()

    def ranked(self) -> list[FrozenTrial]:
        """The trials with a value, the best first."""
        done = [each for each in self.all() if each.state == TrialState.COMPLETE]
        sign = -1 if self.plan.maximises else 1
        return sorted(done, key=lambda each: (sign * float(each.value or 0), each.number))

    def run_all(self, after_each: Callable[[], None]) -> None:
        """Try all settings that no other sweep tries. `Stopped` if a run was stopped from elsewhere."""
        with refusing_storage(self.plan.storage):
            while (taken := self._take()) is not None:
                trial, lock = taken
                with lock:
                    self._run(trial)
                    _remove_weights(self)
                    after_each()

    def _take(self) -> tuple[optuna.Trial, ExitStack] | None:
        """A trial to run, and its lock: one that this sweep has begun, or a new one; None if none is left."""
        lost = self._running_without_owner()
        if lost:
            time.sleep(_UNOWNED_S)
            lost &= self._running_without_owner()
        for each in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            is_lost = each.number in lost
            if (self.is_here(each) or is_lost) and (taken := self._taken(each.number, is_lost)) is not None:
                return taken
        if len(self.study.get_trials(deepcopy=False)) >= self.plan.trials:
            return None
        number = self.study.ask().number
        if self.plan.is_grid and number >= self.plan.trials:  # another sweep took the last combination meanwhile
            self.study.tell(number, state=TrialState.FAIL)
            return None
        return self._taken(number)

    def _running_without_owner(self) -> set[int]:
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return {each.number for each in running if "owner" not in each.user_attrs}

    def _taken(self, number: int, is_lost: bool = False) -> tuple[optuna.Trial, ExitStack] | None:
        """A running trial with its lock; None if another process has it, or has finished it.

        One that a sweep of this folder began on another machine is taken only where its lock would show it.
        """
        folder = self.plan.folder_of(number)
        folder.mkdir(parents=True, exist_ok=True)
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        before = self._storage.get_trial(trial_id).user_attrs.get("owner")
        take = lock_if_possible if before in (None, self.owner) else lock_file
        with ExitStack() as held:
            try:
                held.enter_context(take(folder / RUN_LOCK))
            except OSError:  # another process has it, or there are no locks
                return None
            if before != self.owner:
                self._storage.set_trial_user_attr(trial_id, "owner", self.owner)
                time.sleep(_SETTLED_S if is_lost else 0)
            latest = self._storage.get_trial(trial_id)
            if latest.state == TrialState.RUNNING and latest.user_attrs["owner"] == self.owner:
                return optuna.Trial(self.study, trial_id), held.pop_all()
            if is_lost:  # to another machine
                (folder / RUN_LOCK).unlink(missing_ok=True)
        return None

    def _run(self, trial: optuna.Trial) -> None:
        """Run the repeats of a trial, and tell the storage how it ended."""
        plan, values = self.plan, dict[str, float]()
        setting = {each.name: each.suggest(trial) for each in plan.dimensions}
        trial.set_user_attr("setting", setting)
        for repeat in plan.repeats:
            folder = plan.folder_of(trial.number) / repeat.name
            judge = Judge(trial, folder, plan.metric) if plan.prunes and repeat is plan.repeats[0] else None
            end = self._finished(setting, repeat, folder, judge)
            seconds = trial.user_attrs.get("seconds", 0.0) + end.seconds
            trial.set_user_attr("seconds", round(seconds, 1))
            if judge is not None and judge.is_worse():
                self.study.tell(trial, state=TrialState.PRUNED)
                return
            if end.state == "resumable":
                raise Stopped(end.message)
            if end.state == "user_error" and not any(each.state in RAN for each in self.all()):
                raise UserError("sweep-first-refused", value=end.message)
            value = _score(folder, plan) if end.state == "ok" else None
            if value is None or not math.isfinite(value):
                why = end.message or f"its {plan.metric} is {value}"
                trial.set_user_attr("message", f"{repeat.name}: {without_tokens(why)}")
                self.study.tell(trial, state=TrialState.FAIL)
                return
            values[repeat.name] = value
            trial.set_user_attr("values", values)
        trial.set_user_attr("interval", interval_of(plan, trial.number))
        self.study.tell(trial, statistics.fmean(values.values()))

    def _finished(self, setting: Mapping[str, str], repeat: Repeat, folder: Path, judge: Judge | None) -> RunEnd:
        """How a run ended that was started, or resumed, or had ended before."""
        command = self.plan.command({**repeat.flags, **{name: [value] for name, value in setting.items()}}, folder)
        is_told = False
        while not is_finished(folder):
            while (other := of_another_launch(folder, "")) is not None:  # of a sweep that was killed
                if not is_told:
                    print(f"indictune: {other} still writes to {folder}; waiting for its end", file=sys.stderr)
                is_told = True
                time.sleep(_WAIT_S)
            if is_finished(folder) or (judge is not None and judge.is_worse()):
                break
            end = run_in_folder(command, folder, {}, (lambda: False) if judge is None else judge.is_worse)
            if end.state == "ok" or of_another_launch(folder, "") is None:
                return end
        return RunEnd("ok", "", 0.0)


class Judge:
    """Decides whether a trial is worse than the median of earlier ones, evaluation by evaluation, in their order.

    Evaluations are read from the checkpoints that the run's flags ask for, also when it has ended, so the decision
    does not depend on when the sweep looked, or was killed. The last step has nothing left to save.
    """

    def __init__(self, trial: optuna.Trial, folder: Path, metric: str) -> None:
        before = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        self._trial, self._reported, self._folder, self._name = trial, {*before}, folder, f"eval_{metric}"
        self._seen, self._worse = Path(), False

    def is_worse(self) -> bool:
        """Whether the evaluations that have reached the disk since the last look decide so."""
        newest = next((each for each in store.checkpoints_in(self._folder) if _is_planned(each)), None)
        if self._worse or newest is None or newest == self._seen:
            return self._worse
        state = json_or_nothing(newest / "trainer_state.json")
        decided = max(self._reported, default=0)  # but for the last of them, if the sweep was killed
        rows = [row for row in state.get("log_history") or [] if self._name in row]
        for ordinal, row in enumerate(rows, 1):
            if ordinal < decided:
                continue
            if ordinal not in self._reported:
                self._trial.report(float(row[self._name]), ordinal)
                self._reported.add(ordinal)
            if row["step"] < state["max_steps"] and self._trial.should_prune():
                self._worse = True
                break
        self._seen = newest if state else Path()
        return self._worse


def _is_planned(checkpoint: Path) -> bool:
    """Whether a whole checkpoint was asked for by the flags of its run, not by a signal."""
    manifest = store.read_manifest(checkpoint)
    return manifest is not None and manifest.planned


def _score(folder: Path, plan: SweepPlan) -> float | None:
    """The metric of a finished run, on all rows, or on those of a language or label; None if it has none."""
    block, name = json_or_nothing(folder / METRICS).get(plan.block) or {}, plan.metric
    with suppress(TypeError, ValueError):  # NaN is a text in JSON
        if name in block:
            return float(block[name])
        for group in ("per_language", "per_label"):
            for each, scores in (block.get(group) or {}).items():
                for score, value in scores.items():
                    if f"{score}_{without_markup(each)}" == name:
                        return float(value)
    return None


def _remove_weights(trials: Trials) -> None:
    """Remove checkpoints and weights of the trials that have ended here, but for the best so far."""
    plan, best = trials.plan, trials.ranked()[:1]
    for each in [] if plan.keeps_models else trials.all():
        if each.state.is_finished() and each not in best and trials.is_here(each):
            for folder in plan.folder_of(each.number).iterdir():
                for path in (path for pattern in _FOLDERS for path in folder.glob(pattern)):
                    shutil.rmtree(path, ignore_errors=True)
                for path in (path for pattern in _WEIGHTS for path in folder.glob(pattern)):
                    path.unlink(missing_ok=True)

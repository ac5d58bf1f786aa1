"""Profile the first steps of a training."""

from __future__ import annotations

import logging
import shutil
from typing import Any

from torch.profiler import profile, record_function, schedule
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.distributed.trace_times import LEARNING, READING, UPDATING
from indictune.run import Run
from indictune.training.profile_report import FOLDER, report

logger = logging.getLogger(__name__)

# Steps before those that count: they open connections and grow memory, and in the last one the profiler starts.
WARM_UP = 3


class ProfileSteps(TrainerCallback):
    """Profiles some steps of this start, and reports once they are done, or the training ends or stops before.

    Must be the last callback: evaluations and saves come after it, and begin the next step anew.

    Args:
        steps: to profile, after `WARM_UP`.
        run: gets the traces and the table.
    """

    def __init__(self, steps: int, run: Run) -> None:
        self.run = run
        self.steps = steps
        self._steps_done = self._last_step = 0
        self._profiler: profile | None = None
        self._phase: record_function | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if args.should_save:
            shutil.rmtree(self.run.output_dir / FOLDER, ignore_errors=True)  # of an earlier start
        when = schedule(wait=WARM_UP - 1, warmup=1, active=self.steps, repeat=1)
        self._profiler = profile(schedule=when, on_trace_ready=self._report)
        self._profiler.start()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._enter(LEARNING)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._enter(UPDATING)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._leave()
        self._last_step = state.global_step
        self._steps_done += 1
        if self._profiler is not None:
            self._profiler.step()
        self._stop_if_asked()
        self._enter(READING)

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._enter(READING)

    on_save = on_evaluate

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._stop_if_asked()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._stop()

    def _stop_if_asked(self) -> None:
        """Stop before the run does, which raises `Stopped` when this step is saved."""
        if self.run.stop_request.agreed:
            self._stop()

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._leave()
        if self._steps_done <= WARM_UP:
            profiler.on_trace_ready = None
            self.run.warn([f"--profile_steps {self.steps}: nothing is profiled, for the run ended in the warm-up."])
        profiler.stop()

    def _enter(self, phase: str) -> None:
        self._leave()
        if self._profiler is not None:
            self._phase = record_function(phase)
            self._phase.__enter__()  # type: ignore[no-untyped-call]

    def _leave(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def _report(self, profiler: profile) -> None:
        self._profiler = None
        report(profiler, self.run, self._last_step)

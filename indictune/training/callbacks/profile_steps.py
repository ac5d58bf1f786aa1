"""Profile the first steps of a training, and report what each rank spent them on."""

from __future__ import annotations

import gzip
import json
import logging
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function, schedule
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from indictune.console_text import table
from indictune.distributed import collectives
from indictune.distributed.trace_times import LEARNING, READING, UPDATING, RankTimes, Slowest, rank_times, slowest_rank
from indictune.files import write_json
from indictune.run import OWN_PROGRESS, Run

logger = logging.getLogger(__name__)

FOLDER = "profile"
_HEADER = ["rank", "ms a step", "compute", "communication", "overlapped", "exposed", "host gaps"]


def report_profile(profiler: profile, run: Run, last_step: int) -> None:
    """Write this rank's trace; on rank 0 also show and write the times of all ranks. All ranks must call it."""
    OWN_PROGRESS.passed("writing the profile")
    folder = run.output_dir / FOLDER
    try:
        times = rank_times(run.rank, _write_trace(profiler, folder / f"rank-{run.rank}.json.gz"))
    except (OSError, ValueError) as error:  # torch (2.13) writes a cut-off trace to a full disk
        run.warn([f"The profile of rank {run.rank} cannot be written: {error}. The run continues."])
        times = None
    known = [each for each in collectives.gather_from_all(times) if each is not None]
    if run.rank == 0 and known:
        first_step, worst = last_step - known[0].steps + 1, slowest_rank(known)
        run.show(f"\n{_text(known, first_step, worst)}\ntraces and profile.json: {folder}\n")
        ranks = [asdict(each) | {"exposed_s": each.exposed_s, "own_s": each.own_s} for each in known]
        content = {"first_step": first_step, "last_step": last_step, "ranks": ranks}
        write_json(folder / "profile.json", content | {"slowest": worst and asdict(worst)})


def _write_trace(profiler: profile, path: Path) -> list[dict[str, Any]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def _text(known: list[RankTimes], first_step: int, worst: Slowest | None) -> str:
    """The table, the slowest rank, and what it spends more time on than the others; small differences are left out."""
    lines = []
    for each in known:
        times = (each.step_s, each.compute_s, each.communication_s, each.overlapped_s, each.exposed_s)
        lines.append([str(each.rank), *(f"{1000 * time:.1f}" for time in (*times, sum(each.gaps_s.values())))])
    steps = f"profile of steps {first_step} to {first_step + known[0].steps - 1}"
    if worst is None:
        return "\n".join([steps, table(_HEADER, lines)])
    least = (worst.own_s - worst.others_s) / 10
    more = [f"{1000 * time:.1f} ms more in {part}" for part, time in worst.more_s.items() if time > least]
    slowest = f"slowest: rank {worst.rank}, {1000 * worst.own_s:.1f} ms a step without exposed communication; "
    slowest += f"the others {1000 * worst.others_s:.1f} ms\nof these, {', '.join(more)}"
    return "\n".join([steps, table(_HEADER, lines), slowest])


# Steps before those that count: they open connections and grow memory, and in the last one the profiler starts.
WARM_UP = 3


@dataclass(eq=False)
class ProfileSteps(TrainerCallback):
    """Profiles some steps of this start, and reports once they are done, or the training ends or stops before.

    Must be the last callback: evaluations and saves come after it, and begin the next step anew. The steps come after
    `WARM_UP`.
    """

    steps: int
    run: Run
    _steps_done = _last_step = 0
    _profiler: profile | None = None
    _phase: ExitStack = field(default_factory=ExitStack)

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
        self._phase.close()
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

    def _stop_if_asked(self) -> None:
        """Stop before the run does, which raises `Stopped` when this step is saved."""
        if self.run.stop_request.agreed:
            self.on_train_end()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._phase.close()
        if self._steps_done <= WARM_UP:
            profiler.on_trace_ready = None
            self.run.warn([f"--profile_steps {self.steps}: nothing is profiled, for the run ended in the warm-up."])
        profiler.stop()

    def _enter(self, phase: str) -> None:
        self._phase.close()
        if self._profiler is not None:
            self._phase.enter_context(record_function(phase))

    def _report(self, profiler: profile) -> None:
        self._profiler = None
        report_profile(profiler, self.run, self._last_step)

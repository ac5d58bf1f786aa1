"""Where a training step spends its time on a GPU: a profiler table and a trace of some steps of our recipe."""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks.classifier_gpu import SIZES, job_of, recipe
from benchmarks.contenders import Contender, Job, run_sentiment, synchronized_time, write_to_log
from benchmarks.parts import Note, Plan
from benchmarks.runner import Runner

WARM_UP, TIMED, PROFILED = {"full": 15, "tiny": 1}, 5, 5  # steps
TOP = 15
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")  # the host waits for the GPU


class StageProfiler(TrainerCallback):
    """Times some steps, profiles others, and sends the parent what it found.

    Args:
        connection: to the parent.
        warm_up: steps.
        trace: file (`.json.gz`) for the profiled steps.
    """

    def __init__(self, connection: Connection, warm_up: int, trace: Path) -> None:
        self.connection = connection
        self.warm_up = warm_up
        self.trace = trace
        self.profiler = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        )
        self._since = self._step_s = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.connection.send("ready")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        step = state.global_step - self.warm_up
        if step == 0:
            self._since = synchronized_time()
        elif step == TIMED:
            self._step_s = (synchronized_time() - self._since) / TIMED
            self.profiler.start()
        elif step == TIMED + PROFILED:
            synchronized_time()
            self.profiler.stop()
            self.connection.send((self._step_s, profile_table(self.profiler, self._step_s)))
            self.profiler.export_chrome_trace(str(self.trace))
            self.connection.send({})


def profile_table(profiler: profile, step_s: float) -> dict[str, Any]:
    """Milliseconds of a step, the GPU's idle share, waits of the host, and the slowest operations of a profile."""
    on_gpu = torch.cuda.is_available()
    events = profiler.key_averages()
    kernels = [each for each in events if each.device_type != DeviceType.CPU and not each.is_user_annotation]
    times = (
        {event.key: event.self_device_time_total for event in kernels}
        if on_gpu
        else {event.key: event.self_cpu_time_total for event in events}
    )
    seconds = {str(name): microseconds / 1e6 / PROFILED for name, microseconds in times.items()}
    busy = sum(seconds.values())
    return {
        "step_ms": round(1e3 * step_s, 2),
        "idle_share": round(max(0.0, 1 - busy / step_s), 4),
        "waits_for_gpu_of_step": sum(event.count for event in events if event.key in WAITS) / PROFILED,
        "top_operations_ms": {
            name[:120]: round(1e3 * seconds[name], 3)
            for name in sorted(seconds, key=seconds.__getitem__)[: -TOP - 1 : -1]
        },
    }


def _profile(warm_up: int, trace: Path, contender: Contender, job: Job, connection: Connection) -> None:
    """Run a profiled contender in a child process."""
    write_to_log(contender, job)
    run_sentiment(contender, job, lambda *_: StageProfiler(connection, warm_up, trace))


def measure(plan: Plan, note: Note) -> None:
    """Part: profile the classifier by its recipe."""
    warm_up = WARM_UP[plan.size]
    job = job_of(plan, "stages", warm_up + TIMED + PROFILED)
    target = partial(_profile, warm_up, plan.trace)
    runner = Runner(Contender("ours", settings=recipe(SIZES[plan.size])), job, target, plan.deadline)
    runner.lap()
    note({"ours": runner.counted})
    runner.finish()  # the trace is written
    print(f"a step takes {runner.counted['step_ms']} ms; the GPU is idle for {runner.counted['idle_share']:.1%} of it")
    for name, milliseconds in runner.counted["top_operations_ms"].items():
        print(f"  {milliseconds:>9.3f} ms  {name}")

"""Where a training step of the classifier and of LLaMA spends its time: on the GPU by kernel, and on the host."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import DeviceType, FunctionEventAvg  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks import llama
from benchmarks.classifier_gpu import SIZES, WITHOUT_DROPOUT, job_of, recipe
from benchmarks.contenders import Contender, Job, run_sentiment, write_to_log
from benchmarks.parts import Note, Plan
from benchmarks.speed import Runner

# The first pattern that a kernel's name holds decides; on a CPU, where there are none, that of an operation.
STAGES = {
    "dequantisation": r"dequant",
    "attention": r"flash|fmha|attention|varlen",
    # Of LLaMA's, TRL's Triton kernels (1.16); its products with the output layer are among the other matmuls.
    "loss": r"^_(forward|backward)_kernel|log_?softmax|nll_loss",
    "embedding": r"embedding|index_?select|vectorized_gather|compute_grad_weight|sum_and_scatter|segment_offset|radix",
    "optimizer": r"multi_tensor_apply|adam|lpnorm|foreach|koptimizer",
    "other matmuls": r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|\b\w*mm\b|linear",
    "copies": r"memcpy|memset|copy_",
}
# A step waits for a stream or an event. For the whole device (cudaDeviceSynchronize) waits who measures: the clock
# below, and the profiler when it is stopped.
WAITS = r"cuda(Stream|Event)Synchronize"
TOP = 15
PATIENCE_S = 90.0

Run = Callable[[Contender, Job, Callable[[Any, Any], TrainerCallback]], None]


@dataclass(frozen=True)
class Steps:
    """How many steps of a run warm it up, are timed then, and are profiled last."""

    warm_up: int
    timed: int
    profiled: int

    @property
    def total(self) -> int:
        """Of the run."""
        return self.warm_up + self.timed + self.profiled


STEPS = {"full": Steps(15, 10, 10), "tiny": Steps(1, 2, 2)}
# One has so many operations that their tables, which Python makes, could take longer for two than the part may.
STEPS_OF_LLAMA = Steps(3, 2, 1)


class StageProfiler(TrainerCallback):
    """Times some steps, profiles others, tells the parent what it saw, and is done.

    The timed steps are a lap, whose seconds are told before anything is profiled; so are the profiled ones, and their
    tables are told before the trace is written, which takes long.

    Args:
        connection: to the parent.
        steps: of each kind.
        trace: file (`.json.gz`) for the profiled steps, or None.
        tables: made of what was profiled; arguments as of `shares`.
    """

    def __init__(
        self,
        connection: Connection,
        steps: Steps,
        trace: Path | None,
        tables: Callable[[Iterable[FunctionEventAvg], int, float, float], dict[str, Any]],
    ) -> None:
        self.connection = connection
        self.steps = steps
        self.trace = trace
        self.tables = tables
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self.profiler = profile(activities=activities)
        self._since = self._plain_s = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.connection.send("ready")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        warm = self.steps.warm_up
        timed = warm + self.steps.timed
        if state.global_step not in (warm, timed, self.steps.total):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._since
        if state.global_step == self.steps.total:
            self._tell(seconds)
            return
        if state.global_step == timed:
            self._plain_s = seconds
            self.connection.send((seconds, {}))
            self.profiler.start()
        self._since = time.perf_counter()

    def _tell(self, profiled_s: float) -> None:
        self.profiler.stop()
        steps = self.steps.profiled
        plain_s = self._plain_s * steps / self.steps.timed  # of as many
        tables = self.tables(self.profiler.key_averages(), steps, plain_s, profiled_s)
        self.connection.send((profiled_s, tables))
        if self.trace is not None:
            self.profiler.export_chrome_trace(str(self.trace))
        self.connection.send({})


def shares(events: Iterable[FunctionEventAvg], steps: int, plain_s: float, profiled_s: float) -> dict[str, Any]:
    """The tables of a profile.

    Args:
        events: of all profiled steps.
        steps: that were profiled.
        plain_s: that as many steps took without the profiler, which slows the host down.
        profiled_s: that the profiled ones took.
    """
    events = list(events)
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    kernels = [each for each in events if each.device_type != DeviceType.CPU and not each.is_user_annotation]
    if torch.cuda.is_available():
        seconds = {str(event.key): event.self_device_time_total / 1e6 for event in kernels}
    else:
        kernels = on_host
        seconds = {str(event.key): event.self_cpu_time_total / 1e6 for event in kernels}
    busy = sum(seconds.values())
    stages = dict.fromkeys([*STAGES, "rest"], 0.0)
    for name, spent in seconds.items():
        stages[stage_of(name)] += spent
    calls = {str(event.key): event.count for event in kernels}
    top = sorted(seconds, key=lambda name: seconds[name], reverse=True)[:TOP]
    return {
        "step_ms": _step_ms(plain_s, steps),
        "profiled_step_ms": _step_ms(profiled_s, steps),
        "busy_ms_of_step": round(1e3 * busy / steps, 2),
        "idle_share": round(max(0.0, 1 - busy / plain_s), 4),
        "share_of_busy_time": {stage: round(spent / busy, 4) for stage, spent in stages.items()},
        "host": host(on_host, steps),
        "top_kernels": [
            {
                "name": name[:120],
                "stage": stage_of(name),
                "share": round(seconds[name] / busy, 4),
                "ms_of_step": round(1e3 * seconds[name] / steps, 3),
                "calls_of_step": round(calls[name] / steps, 1),
            }
            for name in top
        ],
    }


def _step_ms(seconds: float, steps: int) -> float:
    return round(1e3 * seconds / steps, 2)


def stage_of(name: str) -> str:
    """The stage that a kernel belongs to."""
    return next((stage for stage, pattern in STAGES.items() if re.search(pattern, name, re.IGNORECASE)), "rest")


def host(events: Iterable[FunctionEventAvg], steps: int) -> dict[str, float]:
    """What the host does in a profiled step, in ms and in calls."""
    found = {"loading_and_collation_ms": 0.0, "optimizer_ms": 0.0, "waits_for_gpu_ms": 0.0, "waits_for_gpu": 0.0}
    for event in events:
        name = str(event.key)
        if name.startswith("enumerate(DataLoader)"):
            found["loading_and_collation_ms"] += event.cpu_time_total / 1e3
        elif name.startswith("Optimizer.step"):
            found["optimizer_ms"] += event.cpu_time_total / 1e3
        elif re.fullmatch(WAITS, name):
            found["waits_for_gpu_ms"] += event.cpu_time_total / 1e3
            found["waits_for_gpu"] += event.count
    return {name: round(value / steps, 2) for name, value in found.items()}


def profile_stages(
    run: Run, steps: Steps, trace: Path | None, contender: Contender, job: Job, connection: Connection
) -> None:
    """The whole life of a profiled process."""
    write_to_log(contender, job)
    run(contender, job, lambda *_: StageProfiler(connection, steps, trace, shares))


def measure(plan: Plan, note: Note) -> None:
    """A part: the stages of the classifier by its recipe, and without dropout: attention has another kernel then."""
    steps = STEPS[plan.size]
    job = job_of(plan, "stages", steps.total)
    ours = recipe(SIZES[plan.size])
    _profile(Contender("ours", settings=ours), job, run_sentiment, steps, plan.trace, note)
    without = Contender("ours_without_dropout", settings={**ours, **WITHOUT_DROPOUT})
    _profile(without, job, run_sentiment, steps, None, note)


def measure_llama(plan: Plan, note: Note) -> None:
    """A part: the stages of QLoRA on rows joined end to end."""
    steps = STEPS_OF_LLAMA
    model, rows, lengths = llama.write_inputs(plan)
    folder = plan.folder / "stages_of_llama"
    folder.mkdir()
    job = Job(model, rows, steps.total, steps.total, folder)
    runs = {each.title: each for each in llama.contenders("qlora", llama.SIZES[plan.size], lengths)}
    trace = plan.trace.with_name(plan.trace.name.replace(".trace.", ".llama.trace."))
    _profile(runs["qlora_ours_joined"], job, llama.run_llama, steps, trace, note)


def _profile(contender: Contender, job: Job, run: Run, steps: Steps, trace: Path | None, note: Note) -> None:
    runner = Runner(contender, job, partial(profile_stages, run, steps, trace), lambda: PATIENCE_S)
    note({contender.title: {"step_ms": _step_ms(runner.lap(), steps.timed)}})  # of a profile that fails this is left
    runner.lap()
    found = runner.counted
    note({contender.title: found})
    runner.finish()  # when the trace is written
    print(f"{contender.title}:")
    show(found)


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    print(f"a step takes {found['step_ms']} ms; the GPU is idle for {found['idle_share']:.1%} of it")
    for stage, share in found["share_of_busy_time"].items():
        print(f"  {stage:<16}{share:>7.1%}")
    print("of the host, in a profiled step:", found["host"])
    for kernel in found["top_kernels"]:
        times = f"{kernel['ms_of_step']:>9.3f} ms{kernel['calls_of_step']:>8.1f} x"
        print(f"  {kernel['share']:>6.1%}{times} {kernel['name']}")
    print(flush=True)

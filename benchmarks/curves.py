"""Losses of ours beside upstream's on the same batches: in fp32, where they agree, and in bf16, which both round to.

On a GPU, fp32 and bf16 have kernels of their own: those of bf16 make the speed. So each curve tells its attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from statistics import fmean
from typing import Any

from torch.profiler import ProfilerActivity, profile
from transformers import TrainerControl, TrainerState, TrainingArguments

from benchmarks.agreement import AIM, has_learned, largest_difference, tell_distance, tell_fall
from benchmarks.contenders import Contender, Job, Turns
from benchmarks.parts import Note
from benchmarks.speed import Runner

ATTENTION = r"^(?!.*backward).*(attention|varlen)"

Target = Callable[[Contender, Job, Connection], None]


class TurnsWithAttention(Turns):
    """Tells, beside what was counted, the operations of attention that the first step called."""

    def __init__(self, connection: Connection, job: Job, counted: Callable[[], dict[str, Any]]) -> None:
        super().__init__(connection, job, counted)
        self.attention: list[str] = []
        self._profiler = profile(activities=[ProfilerActivity.CPU])

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step == 0:
            self._profiler.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.global_step == 1:
            self._profiler.stop()
            names = [str(event.key) for event in self._profiler.key_averages()]
            self.attention = sorted(name for name in names if re.search(ATTENTION, name, re.IGNORECASE))
        super().on_step_end(args, state, control)

    def _so_far(self) -> dict[str, Any]:
        return {**super()._so_far(), "attention": self.attention}


def compare_curves(
    upstream: str, pairs: Sequence[tuple[Contender, Contender]], job: Job, target: Target, note: Note
) -> dict[str, Any]:
    """The losses of two pairs: the first in fp32, which are told whatever becomes of the second, in bf16.

    Args:
        upstream: its name in what is told.
        pairs: ours, and upstream's, which gets the rows of ours in their order.
        job: whose lap is the whole run.
        target: the life of a process, with `TurnsWithAttention`.
        note: gets what is known so far.
    """
    ours = _run_one_by_one([pair[0] for pair in pairs], job, target)
    one = next(ours)
    note({"steps": job.steps, "ours": one["losses"]})
    others = _run_one_by_one([replace(pair[1], order=tuple(one["order"])) for pair in pairs], job, target)
    other = next(others)
    padding = {"ours": one["padding_fraction"], upstream: other["padding_fraction"]}
    found: dict[str, Any] = {upstream: other["losses"], **judge(one["losses"], other["losses"]), "padding": padding}
    note(found)
    one_in_bf16, other_in_bf16 = next(ours), next(others)
    mean, others_mean = fmean(one_in_bf16["losses"]), fmean(other_in_bf16["losses"])
    found["bf16"] = {
        "ours": one_in_bf16["losses"],
        upstream: other_in_bf16["losses"],
        f"mean_of_ours_less_{upstream}": mean - others_mean,
        "mean_of_ours_less_its_fp32": mean - fmean(one["losses"]),
        f"mean_of_{upstream}_less_its_fp32": others_mean - fmean(other["losses"]),
    }
    of_each = {"ours": one, upstream: other, "ours_bf16": one_in_bf16, f"{upstream}_bf16": other_in_bf16}
    found["attention"] = {title: each["attention"] for title, each in of_each.items()}
    note(found)
    return found


def judge(losses: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """How far apart two curves in fp32 are at most, whether they agree, and whether the first has learned.

    Where they do not, or it has not, the comparison shows nothing of what it is for, and a warning is printed.
    """
    largest = largest_difference(losses, others)
    agrees, learned = largest <= AIM, has_learned(losses)
    if not agrees:
        print(f"WARNING: {tell_distance(largest)}", flush=True)
    if not learned:
        print(f"WARNING: {tell_fall(losses)}", flush=True)
    return {"largest": largest, "agrees": agrees, "learned": learned}


def _run_one_by_one(contenders: Sequence[Contender], job: Job, target: Target) -> Iterator[dict[str, Any]]:
    """Start side by side, which is what takes long, and train one by one when asked; what each has counted."""
    with ThreadPoolExecutor(len(contenders)) as pool:
        starts = [pool.submit(Runner, each, job, target) for each in contenders]
    for start in starts:
        runner = start.result()
        runner.lap()
        yield runner.finish()


def show(found: dict[str, Any], name: str, upstream: str) -> None:
    """Print how far apart the curves are, and by which attention each was computed."""
    print(f"{name}'s loss in fp32: {found['largest']:.1e} from {upstream}'s at most (aim: {AIM:.0e})")
    differences = {title: value for title, value in found["bf16"].items() if title.startswith("mean")}
    print("in bf16: " + ", ".join(f"{title.replace('_', ' ')} {value:+.1e}" for title, value in differences.items()))
    for title, operations in found["attention"].items():
        print(f"  attention of {title}: {', '.join(operations)}")
    print(flush=True)

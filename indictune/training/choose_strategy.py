"""`indictune train --strategy auto`: the first row of the plan for the machine that this process runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from warnings import catch_warnings

import torch

from indictune.config.read_words import read_flags
from indictune.config.recipe import read_recipe
from indictune.console_text import shown_bytes
from indictune.distributed.planning.asked_machine import this_machine
from indictune.errors import Problems, UserError
from indictune.preflight.derive import plan_of_rows
from indictune.tasks.all_tasks import TASKS
from indictune.training.planned_command import MICRO_BATCHES, micro_batch_flag, micro_batch_name
from indictune.training.ranking import rank


@dataclass(frozen=True)
class Choice:
    """What to start.

    Attributes:
        strategy: name of its file.
        processes: to start.
        flags: of the micro-batch, by name.
        reason: for it, in one line.
    """

    strategy: str
    processes: int
    flags: dict[str, str]
    reason: str


def choose_strategy(task_name: str, words: Sequence[str], processes: int | None) -> Choice:
    """The fastest strategy that fits this machine. A micro-batch that was typed is kept, and on a CPU the recipe's.

    Args:
        task_name: of the run.
        words: the flags of its script.
        processes: that were asked for; None: one for each GPU, or one on the CPU.

    Raises:
        UserError: all problems of the recipe and its rows, or `plan-nothing-fits`.
    """
    task = next(each for each in TASKS if each.name == task_name)
    recipe, typed, gpus = read_recipe(words, task.arguments()), read_flags(words), torch.cuda.device_count()
    plan, problems = plan_of_rows(recipe, task)
    Problems(problems).raise_any()
    count = processes or gpus or 1
    machine = this_machine(count, gpus)
    name, rows = micro_batch_name(plan), plan.training.global_batch_size
    asked = int(recipe.values[name]) if name in (typed if gpus else recipe.values) else None
    if asked and name not in typed and name != MICRO_BATCHES[0] and rows % (count * asked):
        asked = None  # the recipe's is too large for so many processes
    with catch_warnings(action="ignore"):  # of libraries, about each other
        ranking = rank(replace(plan, gpus=gpus), task, machine, all_methods=False, asked=asked)
    best, first = ranking.best, ranking.own[0]
    capacity = shown_bytes(machine.memory_bytes)
    if best is None:
        needed = "unknown" if first.memory is None else shown_bytes(first.memory.total_bytes)
        details = {"strategy": first.strategy, "needed": needed, "capacity": capacity}
        raise UserError("plan-nothing-fits", "--strategy", "auto", **details)
    assert best.memory is not None
    others = sum(each.fits for each in ranking.own) - 1
    of_what = f"{count} {'GPU' if gpus else 'CPU process'}{('s' if gpus else 'es') * (count > 1)}"
    reason = f"on {of_what} an estimated {shown_bytes(best.memory.total_bytes)} of {capacity} each"
    reason += f"; the fastest of {others + 1} that fit" if others else "; nothing else fits"
    return Choice(best.strategy, count, {} if asked else micro_batch_flag(ranking, best), reason)

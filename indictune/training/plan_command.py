"""`indictune plan`: which strategy file fits a run on some GPUs, and how fast it is there."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from warnings import catch_warnings

from indictune.config.command_arguments import PlanArguments
from indictune.config.plan import AnyPlan
from indictune.config.read_words import read_flags, with_flag
from indictune.config.recipe import Recipe, read_recipe
from indictune.console_text import printable, shown_bytes
from indictune.distributed.planning.asked_machine import DEFAULT_GPU, asked_machine, link_name
from indictune.distributed.planning.hardware import Machine, assumed
from indictune.distributed.planning.kept_bytes import is_half
from indictune.distributed.planning.step_time import flops_of_gpu
from indictune.errors import Problems, problem, problems_of
from indictune.models.load import read_config
from indictune.preflight.derive import plan_of_rows
from indictune.tasks.all_tasks import task_of
from indictune.tasks.protocol import Task
from indictune.training.plan_picture import draw
from indictune.training.plan_text import record, shown
from indictune.training.planned_command import OF_FP16, micro_batch_name
from indictune.training.prepare import task_of_flags
from indictune.training.ranking import SOURCES, Ranking, rank

_OF_ROWS = ("no-training-rows", "output-dir-missing")  # which a plan does without


def plan_command(argv: Sequence[str]) -> int:
    """`indictune plan RECIPE.yaml|--model NAME [--gpus N --gpu NAME ...]`; returns the exit code, 1 if nothing fits.

    Raises:
        UserError: as `planned`, or `plan-not-written`.
    """
    words = with_flag(argv, "--config")
    words = [f"--model_name_or_path{word[7:]}" if word.partition("=")[0] == "--model" else word for word in words]
    args, machine, ranking = planned(words)
    if args.plot is not None:
        draw(ranking, Path(args.plot))
    rates = _rates(args, machine, ranking.plan)
    text = json.dumps(record(ranking, rates, words), indent=1) if args.json else shown(ranking, rates, words)
    print(text if args.json else printable(text))
    return 0 if ranking.best is not None else 1


def planned(words: Sequence[str]) -> tuple[PlanArguments, Machine, Ranking]:
    """The machine that the words of a plan describe, and its ranking.

    Raises:
        UserError: all problems of the flags and the recipe; if there are none, those of the model and the rows.
    """
    typed = read_flags(words)
    recipe, task = task_of_flags(words, PlanArguments)
    args, machine = _asked(recipe, task, typed)
    recipe, task = _of_model(recipe, task, words)
    plan, problems = plan_of_rows(recipe, task)
    Problems(each for each in problems if each.code not in _OF_ROWS).raise_any()
    if plan.training.bf16 is not False and not plan.training.fp16 and not machine.has_bf16:
        plan = plan.derive(**OF_FP16)
    name = micro_batch_name(plan)
    asked = int(recipe.values[name]) if name in typed else None
    with catch_warnings(action="ignore"):  # of libraries, about each other
        return args, machine, rank(replace(plan, gpus=machine.of_node), task, machine, "method" not in typed, asked)


def _asked(recipe: Recipe, task: Task[Any, Any, Any], typed: Collection[str]) -> tuple[PlanArguments, Machine]:
    """The machine of the flags. All problems of flags and recipe are raised before a model is looked for."""
    problems = Problems(recipe.problems)
    args = problems.attempt(recipe.build, PlanArguments)
    machine = None if args is None else problems.attempt(asked_machine, args)
    if args is not None and args.plot is not None and not Path(args.plot).absolute().parent.is_dir():
        problems.append(problem("plan-not-written", "--plot", args.plot, reason="there is no such folder"))
    if not {"config", "model_name_or_path"} & set(typed):
        problems.append(problem("plan-of-what", "indictune plan"))
    for each in (task.model_arguments, task.data_arguments) if recipe.is_read else ():
        found = problems_of(recipe.build, each)
        problems.extend(each for each in found if each.code not in _OF_ROWS and each not in problems)
    problems.raise_any()
    assert args is not None
    assert machine is not None
    return args, machine


def _of_model(recipe: Recipe, task: Task[Any, Any, Any], words: Sequence[str]) -> tuple[Recipe, Task[Any, Any, Any]]:
    """The recipe and the task. If neither a flag, the recipe nor rows name the task, the model's head does."""
    if {"task", *SOURCES} & recipe.values.keys():
        return recipe, task
    own = task_of(read_config(recipe.build(task.model_arguments)).to_dict())
    read = read_recipe(words, (PlanArguments, *own.arguments()))
    return (recipe, task) if read.problems else (read, own)


def _rates(args: PlanArguments, machine: Machine, plan: AnyPlan) -> str:
    """The machine in words, with the rates that times follow from."""
    many, nodes = machine.gpus > 1, machine.nodes
    size = f"{machine.memory_bytes / 1e9:,.0f} GB"
    about = [f"{machine.gpus} x {args.gpu} of {size}" if args.gpu else f"{machine.gpus} GPU{'s' * many} of {size}"]
    source = "" if args.gpu else f", those of an {DEFAULT_GPU.upper()}"
    flops = f"{flops_of_gpu(plan, machine) / 1e12:,.0f} TFLOPS{'' if is_half(plan) else ' in fp32'}"
    about.append(f"{flops}, of which {assumed('achieved'):.0%} are used{source}")
    about += ["planned in fp16, as these GPUs have no bf16"] if "fp16" in plan.derived else []
    if machine.of_node > 1:
        about.append(f"{link_name(args)}: {machine.in_node / 1e9:,.0f} GB/s")
    if nodes > 1:
        about.append(f"{nodes} nodes with {8 * machine.of_node * machine.between_nodes / 1e9:,.0f} Gb/s each")
    if machine.host_bytes:
        about.append(f"{shown_bytes(machine.host_bytes)} of CPU memory a node")
    return "; ".join(about)

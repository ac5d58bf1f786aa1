"""`indictune plan`: which strategy file fits a run on some GPUs, and how fast it is there."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from warnings import catch_warnings

from indictune.commands.plan_text import OF_FP16, plan_text, record
from indictune.commands.prepare import task_of_flags
from indictune.commands.ranking import SOURCES, Ranking, micro_batch_name, rank
from indictune.config.command_line import with_flag
from indictune.config.plan import AnyPlan
from indictune.config.recipe import Recipe, read_recipe
from indictune.config.shared_arguments import MachineArguments, flag
from indictune.console_text import printable, shown_bytes
from indictune.errors import Problem, Problems, UserError, problem, problems_of
from indictune.models.load import read_config
from indictune.planning.hardware import DEFAULT_GPU, Machine, asked_machine, assumed, link_name
from indictune.planning.rank_bytes import is_half
from indictune.planning.step_time import flops_of_gpu
from indictune.preflight.values import plan_of_rows
from indictune.tasks.all_tasks import task_of
from indictune.tasks.protocol import Task

_OF_ROWS = ("no-training-rows", "output-dir-missing")  # which a plan does without
# Of the terms of `Memory`, in its order. Distinct for the colour-blind too (Okabe and Ito).
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#F0E442", "#CC79A7", "#999999")
_MOST = 1.6  # times the GPU's memory; longer bars are cut, and say how long they are
_GB = 1e9


@dataclass
class PlanFlags(MachineArguments):
    """The machine of a plan, and how the plan is shown. The other flags are those of the run."""

    plot: str | None = flag(None, "Draw the memory of each strategy against the GPU's, into this PNG.")
    json: bool = flag(False, "Print all numbers as JSON.")

    def check(self) -> Iterator[Problem]:
        """Refuse a picture of another kind."""
        yield from super().check()
        if self.plot is not None and Path(self.plot).suffix.lower() != ".png":
            yield problem("picture-of-another-kind", "--plot", self.plot, kinds="a PNG", example="plan.png")


def run_plan(flags: Mapping[str, list[str]]) -> int:
    """Print which strategy files fit a run; returns the exit code, 1 if nothing fits.

    Raises:
        UserError: as `ranking_of_flags`, or `plan-not-written`.
    """
    flags = with_flag(flags, "config")
    flags = {"model_name_or_path" if name == "model" else name: words for name, words in flags.items()}
    args, machine, ranking = ranking_of_flags(flags)
    if args.plot is not None:
        draw_plan(ranking, Path(args.plot))
    rates = _rates(args, machine, ranking.plan)
    text = json.dumps(record(ranking, rates, flags), indent=1) if args.json else plan_text(ranking, rates, flags)
    print(text if args.json else printable(text))
    return 0 if ranking.best is not None else 1


def ranking_of_flags(flags: Mapping[str, list[str]]) -> tuple[PlanFlags, Machine, Ranking]:
    """The machine that the flags of a plan describe, and its ranking.

    Raises:
        UserError: all problems of the flags and the recipe; if there are none, those of the model and the rows.
    """
    recipe, task = task_of_flags(flags, PlanFlags)
    args, machine = _asked(recipe, task, flags)
    recipe, task = _of_model(recipe, task, flags)
    plan, problems = plan_of_rows(recipe, task)
    Problems(each for each in problems if each.code not in _OF_ROWS).raise_any()
    if plan.training.bf16 is not False and not plan.training.fp16 and not machine.has_bf16:
        plan = plan.derive(**OF_FP16)
    name = micro_batch_name(plan)
    asked = int(recipe.values[name]) if name in flags else None
    with catch_warnings(action="ignore"):  # of libraries, about each other
        return args, machine, rank(replace(plan, gpus=machine.of_node), task, machine, "method" not in flags, asked)


def _asked(recipe: Recipe, task: Task[Any, Any, Any], typed: Collection[str]) -> tuple[PlanFlags, Machine]:
    """The machine of the flags. All problems of flags and recipe are raised before a model is looked for."""
    problems = Problems(recipe.problems)
    args = problems.attempt(recipe.build, PlanFlags)
    machine = None if args is None else problems.attempt(asked_machine, args)
    if args is not None and args.plot is not None and not Path(args.plot).absolute().parent.is_dir():
        problems.append(problem("plan-not-written", "--plot", args.plot, reason="there is no such folder"))
    if not {"config", "model_name_or_path"} & set(typed):
        usage = "indictune plan RECIPE.yaml --gpus 8, or --model NAME."
        problems.append(problem("argument-missing", "A recipe or --model", usage=usage))
    for each in (task.model_arguments, task.data_arguments) if recipe.is_read else ():
        found = problems_of(recipe.build, each)
        problems.extend(each for each in found if each.code not in _OF_ROWS and each not in problems)
    problems.raise_any()
    assert args is not None
    assert machine is not None
    return args, machine


def _of_model(
    recipe: Recipe, task: Task[Any, Any, Any], flags: Mapping[str, list[str]]
) -> tuple[Recipe, Task[Any, Any, Any]]:
    """The recipe and the task. If neither a flag, the recipe nor rows name the task, the model's head does."""
    if {"task", *SOURCES} & recipe.values.keys():
        return recipe, task
    own = task_of(read_config(recipe.build(task.model_arguments)).to_dict())
    read = read_recipe(flags, (PlanFlags, *own.arguments()))
    return (recipe, task) if read.problems else (read, own)


def _rates(args: PlanFlags, machine: Machine, plan: AnyPlan) -> str:
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


def draw_plan(ranking: Ranking, path: Path) -> None:
    """Draw a bar for each strategy that can run the plan, with its terms, and a line at what a GPU has for it.

    Raises:
        UserError: `plan-not-written`.
    """
    from matplotlib.figure import Figure  # slow

    found = [each for each in ranking.own if each.memory is not None]
    terms = [{name: size / _GB for name, size in asdict(each.memory).items()} for each in found if each.memory]
    limit = ranking.machine.usable_bytes / _GB
    end = min(_MOST * limit, 1.3 * max([limit, *(sum(each.values()) for each in terms)]))
    figure = Figure(figsize=(10, 1.8 + 0.36 * len(found)), layout="constrained")
    axes = figure.subplots()
    names, starts = [each.strategy for each in found], [0.0] * len(found)
    for colour, name in zip(_COLOURS, terms[0] if terms else (), strict=False):
        sizes = [each[name] for each in terms]
        if any(sizes):
            axes.barh(names, sizes, left=starts, color=colour, label=name.replace("_", " "))
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    for place, (each, total) in enumerate(zip(found, starts, strict=True)):
        why = "does not fit" if total > limit else "too little CPU memory"
        text = f"{total:,.1f} GB" + ("" if each.fits else f", {why}") + (" →" if total > end else "")
        is_cut = total > 0.82 * end
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85} if is_cut else None
        axes.text(min(total, end) + (-0.01 if is_cut else 0.01) * end, place, text, va="center",
                  ha="right" if is_cut else "left", fontsize=9, bbox=box)  # fmt: skip
    axes.axvline(
        limit,
        color="black",
        linestyle="--",
        linewidth=1.2,
        label=f"{assumed('of_memory'):.0%} of a GPU: {limit:,.0f} GB",
    )
    axes.set(xlim=(0, end), xlabel="GB of a GPU, estimated")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    plan, model = ranking.plan, Path(ranking.plan.model.model_name_or_path)
    axes.set_title(
        f"{model.parent.name if model.suffix == '.json' else model.name}, --method {plan.model.method}, "
        f"{ranking.machine.gpus} GPU{'s' * (ranking.machine.gpus > 1)}: in the order of the plan",
        loc="left",
    )
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise UserError("plan-not-written", "--plot", path, reason=error.strerror) from error

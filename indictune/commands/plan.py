"""`indictune plan`: which strategy file fits a run on some GPUs, and how fast it is there."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings

import torch

from indictune.checkpoint.compatibility import validation_digest
from indictune.commands import plan_text
from indictune.commands.plan_text import Ranking
from indictune.commands.prepare import read_and_tokenise, task_of_flags
from indictune.config.arguments import Method
from indictune.config.command_line import read_flags, with_flag
from indictune.config.plan import AnyPlan
from indictune.config.recipe import Recipe, read_recipe
from indictune.config.shared_arguments import MachineArguments, flag
from indictune.console_text import printable, shown_bytes
from indictune.data.batching import lengths_of
from indictune.data.cache import kept_folder
from indictune.data.collation import text_lengths
from indictune.distributed.vocabulary_choice import count_active_rows, with_learned_vocabulary
from indictune.errors import Problem, Problems, UserError, problem, problems_of
from indictune.models.config_shapes import meta_model
from indictune.models.load import check_max_length, read_config, stored_quantisation
from indictune.planning.candidates import Candidate, candidates, unknown_lengths
from indictune.planning.hardware import DEFAULT_GPU, Machine, assumed, link_name, machine_of_flags, this_machine
from indictune.planning.rank_bytes import is_half
from indictune.planning.rank_weights import ModelWeights
from indictune.planning.step_time import RowLengths, flops_of_gpu
from indictune.preflight.derive import plan_of_rows
from indictune.tasks.all_tasks import TASKS, task_of
from indictune.tasks.chat import ChatRows
from indictune.tasks.preferences import Preferences
from indictune.tasks.protocol import Task

if TYPE_CHECKING:
    from datasets import Dataset

# Flags that name rows.
_SOURCES = ("train_file", "train_files", "dataset_name")
_METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
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
    """Print which strategy files fit a run; exit code 1 if nothing fits."""
    flags = with_flag(flags, "config")
    args, machine, ranking = ranking_of_flags(flags)
    if args.plot is not None:
        draw_plan(ranking, Path(args.plot))
    rates = _rates(args, machine, ranking.plan)
    if args.json:
        print(json.dumps(plan_text.record(ranking, rates, flags), indent=1))
    else:
        print(printable(plan_text.plan_text(ranking, rates, flags)))
    return 0 if ranking.best is not None else 1


def ranking_of_flags(flags: Mapping[str, list[str]]) -> tuple[PlanFlags, Machine, Ranking]:
    """The machine that the flags of a plan describe, and its ranking. Flags are checked first."""
    recipe, task = task_of_flags(flags, PlanFlags)
    args, machine = _asked(recipe, task, flags)
    recipe, task = _of_model(recipe, task, flags)
    plan, problems = plan_of_rows(recipe, task)
    Problems(each for each in problems if each.code not in _OF_ROWS).raise_any()
    if plan.training.bf16 is not False and not plan.training.fp16 and not machine.has_bf16:
        plan = plan.derive(**plan_text.OF_FP16)
    name = plan_text.micro_batch_name(plan)
    asked = int(recipe.values[name]) if name in flags else None
    with catch_warnings(action="ignore"):  # of libraries, about each other
        return args, machine, rank(replace(plan, gpus=machine.of_node), task, machine, "method" not in flags, asked)


def _asked(recipe: Recipe, task: Task[Any, Any, Any], typed: Collection[str]) -> tuple[PlanFlags, Machine]:
    """The machine of the flags. All problems of flags and recipe are raised before a model is looked for."""
    problems = Problems(recipe.problems)
    args = problems.attempt(recipe.build, PlanFlags)
    machine = None if args is None else problems.attempt(machine_of_flags, args)
    if args is not None and args.plot is not None and not Path(args.plot).absolute().parent.is_dir():
        problems.append(problem("plan-not-written", "--plot", args.plot, reason="there is no such folder"))
    if not {"config", "model_name_or_path"} & set(typed):
        usage = "indictune plan RECIPE.yaml --gpus 8, or --model NAME."
        problems.append(problem("argument-missing", "A recipe or --model", usage=usage))
    for each in task.arguments[:2] if recipe.is_read else ():  # without those of the training
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
    if {"task", *_SOURCES} & recipe.values.keys():
        return recipe, task
    own = task_of(read_config(recipe.build(task.arguments[0])).to_dict())
    read = read_recipe(flags, (PlanFlags, *own.arguments))
    return (recipe, task) if read.problems else (read, own)


def rank(
    plan: AnyPlan, task: Task[Any, Any, Any], machine: Machine, all_methods: bool, asked: int | None = None
) -> Ranking:
    """Read the rows, if the run names any, and rank the files. Rows are tokenised as by `indictune prepare`, and kept.

    Args:
        plan: of the run, without a launch. It has a model configuration.
        all_methods: whether the other methods are ranked too.
        asked: the micro-batch; None: the fastest that fits.
    """
    plan, lengths, active_rows = _with_rows(plan, task)
    config = plan.model_config
    assert config is not None
    methods = [plan.model.method, *(each for each in _METHODS if all_methods and each != plan.model.method)]
    adapted = None
    found = dict[str, Sequence[Candidate]]()
    for method in methods:
        if method == "full" and stored_quantisation(config):
            continue
        own = replace(plan, model=replace(plan.model, method=method))
        if method == "full":
            meta = meta_model(own.model, config, plan.head, active_rows)
        else:  # `lora` is the adapter of `qlora` on a base that is not packed
            adapted = adapted or meta_model(replace(own.model, method="qlora"), config, plan.head)
            meta = adapted if method == "qlora" else replace(adapted, packed=())
        found[method] = candidates(own, ModelWeights(meta), machine, lengths, asked)
    return Ranking(task.name, plan, machine, lengths, found)


def _with_rows(plan: AnyPlan, task: Task[Any, Any, Any]) -> tuple[AnyPlan, RowLengths, int | None]:
    """The plan with the length that was found, the lengths of its rows, and the rows of its active vocabulary."""
    if not any(plan.configuration.get(name) for name in _SOURCES):
        assert plan.model_config is not None
        check_max_length(plan.model_config, plan.data.max_length)
        return plan, unknown_lengths(plan), None
    made = read_and_tokenise(plan, Problems(), task)
    tokens, plan = made.tokens, plan.with_max_length(made.tokens.max_length)
    of_rows, of_texts = lengths_of(tokens.train).double(), text_lengths(tokens.train).double()
    attended = float(of_texts.square().sum() / of_texts.sum())
    longest = lengths_of(tokens.train, task.pads(plan)).max()
    datasets = tokens.train, tokens.validation, tokens.test
    unread = _unread(plan, task, made.rows, [each for each in datasets if each is not None])
    lengths = RowLengths(float(of_rows.mean()), int(longest), attended, len(tokens.train), unread)
    plan = with_learned_vocabulary(plan, made.rows.tokenizer)
    return plan, lengths, count_active_rows(plan, datasets, made.rows.tokenizer)


def _unread(plan: AnyPlan, task: Task[Any, Any, Any], rows: Any, datasets: Sequence[Dataset]) -> int:
    """Rows that a run reads before its first step: all that no earlier run here has read by the same model."""
    if not isinstance(rows, ChatRows) or not rows.start:
        return 0
    objective = task.objective(plan.training, plan.known_config, rows.tokenizer, task.pads(plan), rows)
    assert isinstance(objective, Preferences)
    return sum(len(each) for each in datasets if kept_folder(*objective.cached_as(validation_digest(each))) is None)


@dataclass(frozen=True)
class Choice:
    """The strategy file and the number of processes to start, flags of the micro-batch, and the reason in a line."""

    strategy: str
    processes: int
    flags: dict[str, str]
    reason: str


def choose_strategy(task_name: str, words: Sequence[str], processes: int | None) -> Choice:
    """The fastest strategy that fits this machine. A micro-batch that was typed is kept, and on a CPU the recipe's.

    Args:
        words: the flags of the task's script.
        processes: that were asked for; None: one for each GPU, or one on the CPU.

    Raises:
        UserError: all problems of the recipe and its rows, or `plan-nothing-fits`.
    """
    task = next(each for each in TASKS if each.name == task_name)
    recipe, typed, gpus = read_recipe(words, task.arguments), read_flags(words), torch.cuda.device_count()
    plan, problems = plan_of_rows(recipe, task)
    Problems(problems).raise_any()
    count = processes or gpus or 1
    machine = this_machine(count, gpus)
    name, rows = plan_text.micro_batch_name(plan), plan.training.global_batch_size
    asked = int(recipe.values[name]) if name in (typed if gpus else recipe.values) else None
    if asked and name not in typed and name != plan_text.MICRO_BATCHES[0] and rows % (count * asked):
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
    return Choice(best.strategy, count, {} if asked else plan_text.micro_batch_flag(ranking, best), reason)


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
    """Draw a bar for each strategy that can run the plan, with its terms, and a line at what a GPU has for it."""
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
    label = f"{assumed('of_memory'):.0%} of a GPU: {limit:,.0f} GB"
    axes.axvline(limit, color="black", linestyle="--", linewidth=1.2, label=label)
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

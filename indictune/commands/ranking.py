"""Rank the strategy files for a run on a machine, by the rows that the run will read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast
from warnings import catch_warnings

import torch

from indictune.config.arguments import Method
from indictune.config.command_line import read_flags
from indictune.config.plan import AnyPlan
from indictune.config.recipe import read_recipe
from indictune.console_text import shown_bytes
from indictune.data.collation import lengths_of, text_lengths
from indictune.distributed.vocabulary_choice import count_active_rows
from indictune.errors import Problems, UserError, problems_of
from indictune.models.config_shapes import meta_model
from indictune.models.load import check_max_length, stored_quantisation
from indictune.planning.candidates import Candidate, candidates, unknown_lengths
from indictune.planning.hardware import Machine, this_machine
from indictune.planning.rank_weights import ModelWeights
from indictune.planning.step_time import RowLengths
from indictune.preflight.values import plan_of_rows
from indictune.tasks.all_tasks import TASKS
from indictune.tasks.protocol import Task

# Flags that name rows.
SOURCES = ("train_file", "train_files", "dataset_name")
MICRO_BATCHES = ("max_tokens_per_device", "per_device_train_batch_size")
_METHODS: tuple[Method, ...] = ("full", "lora", "qlora")


@dataclass(frozen=True)
class Ranking:
    """The strategy files for a run.

    Attributes:
        task: of the run.
        plan: of the run, without a launch.
        machine: that it runs on.
        lengths: of the training rows.
        by_method: candidates, those that fit first, the fastest of them first; the run's own method comes first.
    """

    task: str
    plan: AnyPlan
    machine: Machine
    lengths: RowLengths
    by_method: Mapping[str, Sequence[Candidate]]

    @property
    def own(self) -> Sequence[Candidate]:
        """Those of the run's own method."""
        return self.by_method[self.plan.model.method]

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits."""
        return self.own[0] if self.own[0].fits else None


def rank(
    plan: AnyPlan, task: Task[Any, Any, Any], machine: Machine, all_methods: bool, asked: int | None = None
) -> Ranking:
    """Read the rows, if the run names any, and rank the files. Rows are tokenised as by `indictune prepare`, and kept.

    Args:
        plan: of the run, without a launch. It has a model configuration.
        task: of the run.
        machine: that it runs on.
        all_methods: whether the other methods are ranked too.
        asked: the micro-batch; None: the fastest that fits.

    Raises:
        UserError: all problems of the rows.
    """
    config = plan.model_config
    assert config is not None
    plan, lengths, active_rows = _with_rows(plan, task)
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
    config = plan.model_config
    assert config is not None
    problems = Problems(problems_of(check_max_length, config, plan.data.max_length))
    if not any(plan.configuration.get(name) for name in SOURCES):
        problems.raise_any()
        return plan, unknown_lengths(plan), None
    inputs = task.open(cast(Any, plan), problems)
    rows = task.read(cast(Any, plan), inputs, problems)
    problems.raise_any()
    tokens = task.tokenise(cast(Any, plan), rows)
    plan = plan.with_max_length(tokens.max_length)
    of_rows, of_texts = lengths_of(tokens.train).double(), text_lengths(tokens.train).double()
    attended = float(of_texts.square().sum() / of_texts.sum())
    lengths = RowLengths(float(of_rows.mean()), int(of_rows.max()), attended, len(tokens.train))
    return plan, lengths, count_active_rows(plan, tokens.datasets, cast(Any, inputs.tokenizer))


def micro_batch_name(plan: AnyPlan) -> str:
    """The flag of micro-batches that counts in a run."""
    return MICRO_BATCHES[plan.training.max_tokens_per_device is None]


def micro_batch_flag(ranking: Ranking, each: Candidate) -> dict[str, str]:
    """The flag of a micro-batch, with its value."""
    name = micro_batch_name(ranking.plan)
    return {name: str(each.tokens if name == MICRO_BATCHES[0] else each.rows)}


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

"""Read and tokenise the rows of a run before it starts, so that it starts in seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from indictune.config.arguments import Files
from indictune.config.plan import AnyPlan
from indictune.config.recipe import Recipe, read_recipe
from indictune.config.shared_arguments import EngineArguments
from indictune.console_text import in_one_line, printable, table
from indictune.data.bad_rows import REJECTED, BadRows
from indictune.data.batching import lengths_of_sides
from indictune.data.chat.conversations import is_pair
from indictune.data.chat.messages import forms_of, instances_of
from indictune.data.read.open_files import files_named
from indictune.data.read.read_files import read_records
from indictune.data.read.row_sources import SPLITS
from indictune.data.text.cleaning import on_cluster
from indictune.errors import Problems, UserError, problem, problems_of
from indictune.files import cache_folder
from indictune.models.load import check_max_length
from indictune.preflight.derive import plan_of_rows
from indictune.ray_cluster import cluster
from indictune.tasks.all_tasks import TASKS
from indictune.tasks.protocol import Task, Tokens


@dataclass(frozen=True)
class Prepared:
    """The rows of a run: its plan, the rows of its task, which have the tokenizer, and their tokens."""

    plan: AnyPlan
    rows: Any
    tokens: Tokens


@dataclass
class PrepareFlags(EngineArguments):
    """What cleans and tokenises the rows, besides the run's flags."""


def run_prepare(flags: Mapping[str, list[str]]) -> int:
    """Prepare the rows of the run that the flags describe."""
    started = time.monotonic()
    recipe, task = task_of_flags(flags, PrepareFlags)
    engine = recipe.problems.attempt(recipe.build, PrepareFlags)
    if engine is not None and engine.engine == "ray" and task.name != "classification":
        recipe.problems.append(problem("no-effect", "--engine", "ray", other=f"the task {task.name}"))
        engine = None
    with ExitStack() as stack:
        if engine is not None and engine.engine == "ray":
            stack.enter_context(cluster(engine.ray_address))
            stack.enter_context(on_cluster())
        made = prepare_rows(recipe, task)
    if made.tokens.summary:
        print(printable(f"{made.tokens.summary}\n"))
    show_rows(made, made.tokens.notes)
    folder = made.tokens.folder
    if folder is not None and (folder / REJECTED).exists():
        print(f"Rows that were left out, with reasons: {folder / REJECTED}")
    kept = "" if folder is None else f"; kept in {cache_folder() / 'prepared'}"
    print(f"Prepared in {time.monotonic() - started:.1f} s{kept}")
    return 0


def prepare_rows(recipe: Recipe, task: Task[Any, Any, Any]) -> Prepared:
    """Read and tokenise the rows of a run; a `UserError` with all problems of the recipe and the rows."""
    if not recipe.is_read:  # else its values would be reported as missing
        recipe.problems.raise_any()
    return read_and_tokenise(*plan_of_rows(recipe, task), task)


def read_and_tokenise(plan: AnyPlan, problems: Problems, task: Task[Any, Any, Any]) -> Prepared:
    """The rows of a plan; a `UserError` with `problems` and those of the rows."""
    if plan.model_config is not None:
        problems.extend(problems_of(check_max_length, plan.model_config, plan.data.max_length))
    rows = task.read(plan, task.open(plan, problems), problems)
    problems.raise_any()
    assert rows is not None
    return Prepared(plan, rows, task.tokenise(plan, rows))


def show_rows(made: Prepared, notes: Sequence[str]) -> None:
    """Print notes to standard error, and a table of lengths."""
    for note in notes:
        print(in_one_line(f"warning: {note}"), file=sys.stderr)
    print(lengths_table(made.tokens, made.tokens.max_length or int(made.plan.data.max_length)))


def task_of_flags(flags: Mapping[str, list[str]], *more: type[Any]) -> tuple[Recipe, Task[Any, Any, Any]]:
    """The task that `--task` names, or whose flags fit best, and the recipe as that task reads it.

    Where several tasks fit, the training file decides. `more` are arguments besides those of the task.
    """
    read = [(read_recipe(flags, (*more, *task.arguments)), task) for task in TASKS]
    named = [(recipe, task) for recipe, task in read if recipe.values.get("task") == task.name]
    fewest = min(len(recipe.problems) for recipe, _ in named or read)
    fit = [each for each in named or read if len(each[0].problems) == fewest]
    of_file = _task_of_file(fit[0][0].values.get("train_file"))
    return next((each for each in fit if each[1].name == of_file), fit[0])


def _task_of_file(named: Files) -> str:
    if not named:
        return "classification"
    with suppress(UserError, StopIteration):
        _, (file, *_) = files_named(named, "train")
        if file.endswith(".conll"):
            return "tokens"
        _, row = next(read_records(file, BadRows(file)))
        if any(map(forms_of, instances_of(row))):
            return "dpo" if is_pair(row) else "chat"
    return "classification"


def lengths_table(tokens: Tokens, max_length: int) -> str:
    """Rows and tokens of each split. The last column counts rows of `max_length` tokens: cut ones, and exact fits.

    A pair of answers counts if one of its conversations has so many.
    """
    body = []
    for name, dataset in zip(SPLITS, (tokens.train, tokens.validation, tokens.test), strict=True):
        if dataset is None:
            continue
        lengths = dataset.with_format("arrow")[:]["length"].to_numpy()
        mean, p95, longest = lengths.mean(), np.percentile(lengths, 95), lengths.max()
        of_pair = "chosen_length" in dataset.column_names
        is_at_limit = (lengths_of_sides(dataset).amax(0).numpy() if of_pair else lengths) >= max_length
        numbers = [f"{len(lengths):,}", f"{lengths.sum():,}", f"{mean:.1f}", f"{p95:.0f}", f"{longest:,}"]
        body.append([name, *numbers, f"{is_at_limit.mean():.1%}"])
    return table(["split", "rows", "tokens", "mean", "p95", "longest", f"at the limit of {max_length}"], body)

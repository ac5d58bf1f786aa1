"""Print what a run would do, its tokens and its memory, without starting it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from indictune.commands.prepare import lengths_table
from indictune.config.plan import RunPlan
from indictune.config.recipe import read_recipe
from indictune.console_text import in_one_line, printable, table
from indictune.data.batching import lengths_of
from indictune.distributed import strategy
from indictune.distributed.batch_size import steps_of_run
from indictune.distributed.devices import dtype_of
from indictune.distributed.launch import shown_axes
from indictune.distributed.vocabulary_choice import count_active_rows, with_learned_vocabulary
from indictune.errors import Problem
from indictune.models.config_shapes import ParameterCounts, meta_model
from indictune.planning.machine_failures import killed_for_memory
from indictune.planning.memory import Memory, RankMemory, micro_batch_tokens
from indictune.planning.rank_weights import ModelWeights
from indictune.preflight.checks import preflight, read_rows
from indictune.preflight.derive import make_plan
from indictune.run import Run
from indictune.tasks.all_tasks import TASKS
from indictune.tasks.protocol import Task, Tokens
from indictune.training.start import fit_batches

_MIB = 2**20


def dry_run(task_name: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Read and check everything up to the model's weights, and print the plan; returns the exit code.

    `argv` are the flags of the task's script, and `environ` that of rank 0, as the launcher would set it.
    """
    task, plan, problems = planned_run(task_name, argv, environ)
    rows = read_rows(plan, task, problems + preflight(plan, task))
    tokens = task.tokenise(plan, rows)
    plan = fit_batches(plan, tokens, task.pads(plan), Run(plan.recipe, rank=0))
    learned = with_learned_vocabulary(plan, rows.tokenizer)
    assert learned.model_config is not None
    active_rows = count_active_rows(learned, (tokens.train, tokens.validation, tokens.test), rows.tokenizer)
    meta = meta_model(plan.model, learned.model_config, task.head, active_rows)
    weights = ModelWeights(meta)
    counts = replace(meta.counts, total=meta.counts.total + weights.unused)
    longest = micro_batch_tokens(plan, max(lengths_of(tokens.train, task.pads(plan))))
    memory = RankMemory(plan, weights).at(longest, plan.training.gradient_accumulation_steps)
    for note in [*strategy.notes_on_file(plan), *tokens.notes]:
        print(in_one_line(f"warning: {note}"), file=sys.stderr)
    parts = [plan_table(task_name, plan, tokens, counts), lengths_table(tokens, plan.data.max_length)]
    parts.append(memory_table(memory, longest))
    print(printable("\n".join([*filter(None, (tokens.summary,)), *parts])))
    print("Nothing was trained or written. Leave out --dry_run to start.")
    return 0


def answer_to_kill(task_name: str, argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """What to change after the kernel killed the only process of a run for lack of memory; arguments as above."""
    _, plan, _ = planned_run(task_name, argv, environ)
    return str(killed_for_memory(plan))


def planned_run(
    task_name: str, argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[Task[Any, Any, Any], RunPlan[Any, Any], list[Problem]]:
    """The task, the plan of a run, and the problems that follow from its flags alone; arguments as above."""
    task = next(each for each in TASKS if each.name == task_name)
    return task, *make_plan(read_recipe(argv, task.arguments), environ, task)


def plan_table(task_name: str, plan: RunPlan[Any, Any], tokens: Tokens, counts: ParameterCounts) -> str:
    """The values that decide a run, given and derived."""
    training, launch = plan.training, plan.launch
    rows, epochs = len(tokens.train), training.num_train_epochs
    steps = steps_of_run(rows, training.global_batch_size, training.max_steps, epochs)
    per_device, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    axes = shown_axes(launch)
    batch = f"{launch.data_size} x {per_device} rows x {accumulation} accumulation step(s)"
    values = {
        "task": task_name,
        "model": plan.model.model_name_or_path,
        "method": f"{plan.model.method}: {counts.trained:,} of {counts.total:,} parameters are trained",
        "strategy": f"{launch.strategy} on {launch.world_size} process(es)" + (f": {axes}" if axes else ""),
        "strategy file": strategy.taken_values(plan),
        "global batch": f"{training.global_batch_size} rows = {batch}",
        "steps": f"{steps:,}, about {steps / math.ceil(rows / training.global_batch_size):.1f} epoch(s)",
        "max length": f"{plan.data.max_length} tokens",
        "learning rate": f"{training.learning_rate:g}, {training.lr_scheduler_type}",
        "computed in": {"bf16": "bfloat16", "fp16": "float16"}.get(dtype_of(training), "float32"),
        "output_dir": training.output_dir or "",
    }
    return "".join(f"{name + ':':15}{value}\n" for name, value in values.items() if value)


def memory_table(memory: Memory, tokens: int) -> str:
    """The terms of the memory of one process."""
    terms = {**vars(memory), "all": memory.total_bytes}
    title = f"memory of one process, at most {tokens:,} tokens at once"
    body = [[name.replace("_", " "), f"{number / _MIB:,.0f} MiB"] for name, number in terms.items() if number]
    return f"{table([title, 'estimate'], body)}\nThe estimate is not calibrated on a GPU.\n"

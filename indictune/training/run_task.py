"""The table of contents of a run, of every task."""

from __future__ import annotations

import os
from typing import Any

from indictune.preflight.checks import preflight, read_rows
from indictune.preflight.derive import make_plan
from indictune.run import Run
from indictune.tasks.protocol import Task
from indictune.training.start import (
    begin_training,
    check_first_step,
    context_of,
    fit_batches,
    load_model,
    make_trainer,
    meet_nodes,
    start_ranks,
    train_model,
)


def run_task(task: Task[Any, Any, Any], run: Run, trains: bool = True) -> None:
    """Train a model of the task, save and evaluate it, or only prepare `run.trainer`. All ranks must call it."""
    plan, problems = make_plan(run.recipe, os.environ, task)
    rows = read_rows(plan, task, problems + preflight(plan, task) + check_first_step(plan) + meet_nodes(plan))
    tokens = task.tokenise(plan, rows)
    padded = task.pads(plan)
    plan = fit_batches(plan, tokens, padded, run)
    args, point = start_ranks(plan, run, tokens)
    run.warn(tokens.notes)
    if tokens.summary:
        run.show(f"\n{tokens.summary}\n")

    model = load_model(task, plan, args, rows, tokens, point)
    objective = task.objective(args, model.config, rows.tokenizer, padded, rows)
    trainer = make_trainer(
        model, args, tokens.train, tokens.validation, rows.tokenizer, objective, padded, context_of(plan, run, tokens)
    )
    begin_training(trainer, plan, run, point, tokens)
    if not trains:
        return
    result = train_model(trainer, point)

    from indictune.training.evaluation import write_samples
    from indictune.training.finish import finish_run, save_model  # with verification, card, report and Hub

    saved_files = save_model(trainer, run)
    write_samples(trainer, run, tokens.samples)
    finish_run(trainer, run, result, tokens, saved_files)

"""`indictune doctor`: examine this machine, its ranks and a recipe."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from torch import distributed
from torch.distributed import DistError
from transformers import TrainingArguments

from indictune.config.command_arguments import DoctorArguments
from indictune.config.plan import AnyPlan
from indictune.config.read_words import read_flags, with_flag
from indictune.config.recipe import Recipe
from indictune.console_text import printable
from indictune.credentials import without_tokens
from indictune.distributed.doctor.came_up import CHECK as LAUNCH
from indictune.distributed.doctor.examination import Subject, examine
from indictune.distributed.doctor.lines import Line, as_json, exit_code, of_problem
from indictune.distributed.doctor.roll_call import AbsentError, RollCall, ignore_stops
from indictune.distributed.launch import rank_of, read_launch
from indictune.distributed.machine_failures import check_interfaces
from indictune.distributed.node_meeting import unreachable
from indictune.errors import Problem, Problems, problems_of
from indictune.hub.push import name_of
from indictune.preflight.checks import preflight
from indictune.preflight.derive import make_plan
from indictune.run import Run
from indictune.tasks.protocol import Task
from indictune.training.prepare import task_of_flags
from indictune.training.rank_consistency import values_of_node
from indictune.training.start import bring_up, flag_contents

_OF_NO_RUN = {*vars(DoctorArguments()), "output_dir"}
_SEEDS = ("seed", "data_seed", "full_determinism")


def doctor_command(argv: Sequence[str]) -> int:
    """`indictune doctor [RECIPE.yaml] [flags of the run]`, alone or under a launcher.

    Returns:
        1 if a check fails, else 0.

    Raises:
        UserError: a flag of the command itself is wrong.
    """
    words = with_flag(argv, "--config")
    recipe, task = task_of_flags(words, DoctorArguments)
    args = recipe.build(DoctorArguments)
    if rank_of(os.environ) != 0:
        logging.getLogger("indictune").setLevel(logging.ERROR)  # each rank has the same warnings
    found: list[Line] = []
    with _own_stdout() as stdout:

        def report(absent: list[Line]) -> None:
            _show([*found, *absent], args.json, stdout)

        try:
            roll = RollCall(os.environ, args.collective_timeout, report)
        except DistError as error:
            report([of_problem(LAUNCH, unreachable(os.environ, error))])
            return 1
        try:
            examine(_subject(words, recipe, task), roll, found)
            ignore_stops()
            if rank_of(os.environ) == 0:
                report([])
            roll.end()
        except AbsentError as error:
            if error.lines:
                report(error.lines)
            roll.give_up(has_printed=bool(error.lines))
            os._exit(1)  # the process group would wait for the absent
        finally:
            roll.close()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return exit_code(found)


def _subject(words: Sequence[str], recipe: Recipe, task: Task[Any, Any, Any]) -> Subject:
    """What is examined: the plan of a run, or of none where there is no recipe and no model."""
    plan, problems = make_plan(recipe, os.environ, task)
    is_run = not recipe.values.keys() <= _OF_NO_RUN
    found = [*problems, *preflight(plan, task)] if is_run else [*recipe.problems, *_problems_of_launch(plan)]
    training = plan.training
    seeds = {f"--{name}": getattr(training, name) for name in _SEEDS}
    in_files = Problems().attempt(flag_contents, plan) or {}

    def start() -> TrainingArguments:
        args: TrainingArguments = bring_up(plan, Run(recipe, plan.launch.rank))
        return args

    return Subject(
        plan,
        " ".join(read_flags(words).get("config", ())),
        list(dict.fromkeys(found)),
        {**values_of_node(plan, in_files), **seeds},
        name_of(training.hub_model_id, plan.output_dir) if training.push_to_hub else None,
        plan.model.method == "qlora" or "8bit" in str(training.optim),
        start,
    )


def _problems_of_launch(plan: AnyPlan) -> list[Problem]:
    """The problems that a machine without a recipe can have."""
    return [*problems_of(read_launch, os.environ), *check_interfaces(plan)]


def _show(found: Sequence[Line], as_text: bool, stdout: TextIO) -> None:
    if as_text:
        text = json.dumps({"ok": not exit_code(found), "checks": as_json(found)}, indent=1, ensure_ascii=False)
    else:
        counts = [f"{sum(line.status == status for line in found)} {status}" for status in ("ok", "warn", "fail")]
        text = "\n".join([*(line.text() for line in found), ", ".join(counts)])
    print(without_tokens(printable(text)), file=stdout, flush=True)


@contextmanager
def _own_stdout() -> Iterator[TextIO]:
    """A stream to standard output for us alone: the C++ code of torch and gloo, and DeepSpeed, print there too."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as stdout:
            yield stdout
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)

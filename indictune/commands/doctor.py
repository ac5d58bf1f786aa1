"""`indictune doctor`: examine this machine, its ranks and a recipe."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from torch import distributed
from torch.distributed import DistError

from indictune.commands.prepare import task_of_flags
from indictune.config.command_line import with_flag
from indictune.config.recipe import Recipe
from indictune.config.shared_arguments import Checked, flag
from indictune.console_text import printable
from indictune.credentials import without_tokens
from indictune.distributed.agreement import unreachable
from indictune.distributed.launch import rank_of, read_launch
from indictune.doctor.check_lines import Outcome, exit_code, of_problem
from indictune.doctor.examination import LAUNCH_CHECK, Subject, examine
from indictune.doctor.roll_call import AbsentError, RollCall, ignore_stops
from indictune.errors import Problems, problems_of
from indictune.hub.publish import repository_name
from indictune.planning.machine_failures import check_interfaces
from indictune.preflight.checks import preflight
from indictune.preflight.derive import make_plan
from indictune.run import Run
from indictune.tasks.protocol import Task
from indictune.training.rank_consistency import values_of_node
from indictune.training.start import bring_up, flag_contents

_SEEDS = ("seed", "data_seed", "full_determinism")


@dataclass
class DoctorFlags(Checked):
    """How the machine is examined. The other flags are those of the run."""

    collective_timeout: int = flag(15, "Name the ranks that do not come to a collective within this many seconds.")
    json: bool = flag(False, "Print all checks as JSON.")


def run_doctor(flags: Mapping[str, list[str]]) -> int:
    """Examine this machine, alone or under a launcher; exit code 1 if a check fails."""
    flags = with_flag(flags, "config")
    recipe, task = task_of_flags(flags, DoctorFlags)
    args = recipe.build(DoctorFlags)
    if rank_of(os.environ) != 0:
        logging.getLogger("indictune").setLevel(logging.ERROR)  # each rank has the same warnings
    found: list[Outcome] = []
    with _own_stdout() as stdout:

        def report(absent: list[Outcome]) -> None:
            _show([*found, *absent], args.json, stdout)

        try:
            roll = RollCall(os.environ, args.collective_timeout, report)
        except DistError as error:
            report([of_problem(LAUNCH_CHECK, unreachable(os.environ, error))])
            return 1
        try:
            examine(_subject(flags, recipe, task), roll, found)
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


def _subject(flags: Mapping[str, list[str]], recipe: Recipe, task: Task[Any, Any, Any]) -> Subject:
    """What is examined: the plan of a run, or of none where there is no recipe and no model."""
    plan, problems = make_plan(recipe, os.environ, task)
    is_run = not recipe.values.keys() <= {*vars(DoctorFlags()), "output_dir"}
    found = (
        [*problems, *preflight(plan, task)]
        if is_run
        else [*recipe.problems, *problems_of(read_launch, os.environ), *check_interfaces(plan)]
    )
    training = plan.training
    seeds = {f"--{name}": getattr(training, name) for name in _SEEDS}
    return Subject(
        plan,
        " ".join(flags.get("config", ())),
        list(dict.fromkeys(found)),
        {**values_of_node(plan, Problems().attempt(flag_contents, plan) or {}), **seeds},
        repository_name(training.hub_model_id, plan.output_dir) if training.push_to_hub else None,
        plan.model.method == "qlora" or "8bit" in str(training.optim),
        lambda: bring_up(plan, Run(recipe, plan.launch.rank)),
    )


def _show(found: Sequence[Outcome], as_text: bool, stdout: TextIO) -> None:
    if as_text:
        checks = [asdict(line) for line in found]
        text = json.dumps({"ok": not exit_code(found), "checks": checks}, indent=1, ensure_ascii=False)
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

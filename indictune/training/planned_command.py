"""The command that starts a run as a plan says."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from indictune.config.command_arguments import PlanArguments
from indictune.config.plan import AnyPlan
from indictune.config.read_words import read_flags
from indictune.config.task_names import SCRIPTS, WORDS
from indictune.distributed.planning.candidates import Candidate
from indictune.distributed.planning.hardware import Machine
from indictune.shipped_files import as_seen_from_here, script, strategies
from indictune.training.ranking import Ranking

MICRO_BATCHES = ("max_tokens_per_device", "per_device_train_batch_size")
OF_FP16 = {"bf16": False, "fp16": True}  # of a run on GPUs without bf16
_WIDTH = 100
# Flags that are not passed on as they were typed.
_DECIDED = {"config", "task", "method", *MICRO_BATCHES}
_DECIDED |= {each.name for each in fields(PlanArguments)}


def micro_batch_name(plan: AnyPlan) -> str:
    """The flag of micro-batches that counts in a run."""
    return MICRO_BATCHES[plan.training.max_tokens_per_device is None]


def micro_batch_flag(ranking: Ranking, each: Candidate) -> dict[str, str]:
    """The flag of a micro-batch, with its value."""
    name = micro_batch_name(ranking.plan)
    return {name: str(each.tokens if name == MICRO_BATCHES[0] else each.rows)}


def command_of(ranking: Ranking, each: Candidate, words: Sequence[str]) -> str:
    """The command, in lines of at most 100 columns if its words allow. On several nodes each one takes it.

    Args:
        ranking: that has the candidate.
        each: the candidate.
        words: of `indictune plan`, with `--config` and `--model_name_or_path`.
    """
    flags, machine, own = read_flags(words), ranking.machine, ranking.plan.model.method
    recipe = flags.get("config", [])
    if (model := Path(" ".join(flags.get("model_name_or_path", [])))).is_file():  # a configuration alone
        flags["model_name_or_path"] = [str(model.parent)]
    asked = {} if "method" not in flags and each.method == own else {"method": [each.method]}
    asked |= {name: [value] for name, value in micro_batch_flag(ranking, each).items()}
    asked |= {name: given for name, given in flags.items() if name not in _DECIDED}
    asked |= {name: [str(ranking.plan.derived[name]).lower()] for name in OF_FP16 if name in ranking.plan.derived}
    asked |= {} if ranking.lengths.rows else {"train_file": ["FILE"]}
    if machine.nodes == 1:
        what = recipe or [next(word for word, name in WORDS.items() if name == ranking.task)]
        launch = {"strategy": [each.strategy], "num_processes": [str(machine.gpus)]}
        return _in_lines(["indictune", "train", *what], launch | asked)
    start = {"config_file": [str(as_seen_from_here(strategies()[each.strategy]))], **_nodes(machine)}
    to_script = ({"config": recipe} if recipe else {}) | {"output_dir": ["FOLDER"]} | asked
    named = str(as_seen_from_here(script(SCRIPTS[ranking.task])))
    return f"{_in_lines(['accelerate', 'launch'], start)} \\\n    {_in_lines([named], to_script)}"


def _nodes(machine: Machine) -> dict[str, list[str]]:
    """Flags of `accelerate launch` on each node."""
    given = {"num_machines": machine.nodes, "num_processes": machine.gpus}
    texts = {"machine_rank": "NODE", "main_process_ip": "HOST_OF_NODE_0", "main_process_port": "29500"}
    return {name: [str(value)] for name, value in (given | texts).items()}


def _in_lines(start: Sequence[str], flags: Mapping[str, Sequence[str]]) -> str:
    """A command whose lines end in a backslash, where they would be too long."""
    lines = [shlex.join(start)]
    for name, values in flags.items():
        is_signed = len(values) == 1 and values[0].startswith("-")
        flag = f"--{name}={shlex.quote(values[0])}" if is_signed else shlex.join([f"--{name}", *values])
        if len(lines[-1]) + len(flag) + 3 > _WIDTH - 4:
            lines[-1] += " \\"
            lines.append(f"    {flag}")
        else:
            lines[-1] += f" {flag}"
    return "\n".join(lines)

"""`indictune plan`: which strategy file fits a run on some GPUs, and how fast it is there."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from indictune.config.command_arguments import PlanArguments
from indictune.config.plan import AnyPlan
from indictune.console_text import printable, table
from indictune.distributed.devices import meta_of
from indictune.distributed.planning.candidates import Candidate, candidates
from indictune.distributed.planning.hardware import Machine, known_gpus, machine_of
from indictune.distributed.planning.rank_weights import ModelWeights
from indictune.errors import Problems, problem, problems_of
from indictune.preflight.derive import plan_of_rows
from indictune.training.prepare import task_of_flags

_UNITS = {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2**20, "GiB": 2**30}
_OF_ROWS = ("no-training-rows", "output-dir-missing")  # which a plan does without


def plan_command(argv: Sequence[str]) -> int:
    """`indictune plan RECIPE.yaml|--model NAME [--gpus N --gpu NAME ...]`; returns the exit code, 1 if nothing fits.

    Raises:
        UserError: all problems of the flags and the recipe.
    """
    words = ["--config", *argv] if argv and not argv[0].startswith("-") else list(argv)
    words = ["--model_name_or_path" if each == "--model" else each for each in words]
    recipe, task = task_of_flags(words, PlanArguments)
    problems = Problems()
    args = problems.attempt(recipe.build, PlanArguments)
    plan, found = plan_of_rows(recipe, task)
    problems.extend(each for each in found if each.code not in _OF_ROWS)
    if not {"config", "model_name_or_path"} & {word.removeprefix("--").partition("=")[0] for word in words}:
        problems.append(problem("plan-of-what", "indictune plan"))
    machine = None if args is None else problems.attempt(_machine, args)
    problems.raise_any()
    assert args is not None
    assert machine is not None
    whole = replace(plan, gpus=machine.of_node)
    meta = meta_of(whole)
    assert meta is not None
    ranked = candidates(whole, ModelWeights(meta), machine)
    print(_as_json(ranked) if args.json else printable(_shown(whole, machine, ranked)))
    return 0 if any(each.fits for each in ranked) else 1


def _machine(args: PlanArguments) -> Machine:
    problems = Problems()
    memory = None if args.gpu_memory is None else problems.attempt(_size, args.gpu_memory)
    if args.gpu not in known_gpus():
        problems.append(problem("plan-unknown-gpu", "--gpu", args.gpu, known=", ".join(known_gpus())))
    if args.gpus % args.nodes:
        problems.append(problem("plan-uneven-nodes", "--nodes", args.nodes, gpus=args.gpus))
    problems.raise_any()
    return machine_of(args.gpu, args.gpus, args.nodes, memory)


def _size(text: str) -> float:
    found = re.fullmatch(r"([\d.]+) ?(MB|GB|TB|MiB|GiB)", text)
    if found is None or problems_of(float, found[1]):
        problems = [problem("plan-memory", "--gpu_memory", text)]
        Problems(problems).raise_any()
    assert found is not None
    return float(found[1]) * _UNITS[found[2]]


def _shown(plan: AnyPlan, machine: Machine, ranked: Sequence[Candidate]) -> str:
    header = ["strategy", "GB of a GPU", "rows at once", "s a step", "idle", "GB sent a step"]
    body = [_line(each) for each in ranked if each.fits]
    gb, rows = machine.memory_bytes / 1e9, plan.training.global_batch_size
    lines = [
        f"{plan.model.model_name_or_path}, --method {plan.model.method}, {rows} rows of {plan.sequence_limit:,} "
        f"tokens a step, on {machine.gpus} GPU(s) of {gb:,.0f} GB",
        table(header, body) if body else "Nothing fits.",
        "The estimates are not calibrated on a GPU.",
    ]
    if body:
        best = next(each for each in ranked if each.fits)
        flags = f"--strategy {best.strategy} --num_processes {machine.gpus} --per_device_train_batch_size {best.rows}"
        lines.append(f"The fastest: indictune train ... {flags}")
    lines += [f"{each.strategy} does not fit: {_why(each)}" for each in ranked if not each.fits and each.memory]
    lines += [f"{each.strategy} cannot run it: {each.refused}" for each in ranked if each.refused]
    return "\n".join(lines)


def _line(each: Candidate) -> list[str]:
    assert each.memory is not None
    assert each.step is not None
    sent = (each.step.data_bytes + each.step.model_bytes) / 1e9
    size = f"{each.memory.total_bytes / 1e9:,.1f}"
    return [each.strategy, size, str(each.rows), f"{each.step.seconds:.3g}", f"{each.step.bubble:.0%}", f"{sent:.3g}"]


def _why(each: Candidate) -> str:
    assert each.memory is not None
    memory = each.memory
    largest = getattr(memory, memory.largest.replace(" ", "_"))
    return f"{memory.total_bytes / 1e9:,.0f} GB, of which {largest / 1e9:,.0f} GB {memory.largest}"


def _as_json(ranked: Sequence[Candidate]) -> str:
    return json.dumps([_record(each) for each in ranked], indent=1)


def _record(each: Candidate) -> dict[str, Any]:
    if each.memory is None or each.step is None:
        return {"strategy": each.strategy, "refused": each.refused}
    values = {"rows_at_once": each.rows, "fits": each.fits, "seconds": each.step.seconds}
    return {"strategy": each.strategy, **values, "memory": asdict(each.memory), "step": asdict(each.step)}

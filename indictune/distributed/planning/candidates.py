"""Every strategy file that can run a plan on a machine: the micro-batch that fits, memory and time of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from indictune.config.plan import AnyPlan, Launch
from indictune.distributed.choose_launcher import Launcher
from indictune.distributed.launch import read_launch
from indictune.distributed.pipeline.limits import check_pipeline
from indictune.distributed.planning.hardware import Machine
from indictune.distributed.planning.memory import Memory, RankMemory
from indictune.distributed.planning.rank_weights import ModelWeights
from indictune.distributed.planning.step_time import Step, estimate_step
from indictune.distributed.strategy_limits import check_optimizer_of_strategy, check_weights
from indictune.distributed.tensor_plans import check_split
from indictune.errors import UserError
from indictune.models.load import stored_quantisation
from indictune.shipped_files import strategies


@dataclass(frozen=True)
class Candidate:
    """A strategy on a machine.

    Attributes:
        strategy: name of its file.
        launch: of a run under it.
        refused: why it cannot run the plan; empty if it can.
        rows: of a micro-batch: the largest that fits, or 1.
        memory: of the process that needs most, with such micro-batches.
        step: the time of a step.
        fits: whether the memory is that of a GPU at most.
    """

    strategy: str
    launch: Launch
    refused: str = ""
    rows: int = 1
    memory: Memory | None = None
    step: Step | None = None
    fits: bool = False


def candidates(plan: AnyPlan, weights: ModelWeights, machine: Machine) -> list[Candidate]:
    """All strategy files on all GPUs of a machine, those that fit first, the fastest of them first."""
    found = [_measured(plan, weights, machine, name, launch) for name, launch in _launches(machine)]
    return sorted(found, key=_order)


def _order(each: Candidate) -> tuple[bool, bool, float]:
    if each.memory is None or each.step is None:
        return True, True, 0.0
    return False, not each.fits, each.step.seconds if each.fits else each.memory.total_bytes


def _launches(machine: Machine) -> Iterator[tuple[str, Launch | UserError]]:
    """What each file asks for. One process uses a file only if that splits nothing over processes."""
    nodes = machine.gpus // machine.of_node
    for name, file in strategies().items():
        is_of_one = name == "single_gpu"
        if is_of_one != (machine.gpus == 1) and not (machine.gpus == 1 and name.endswith("_offload")):
            continue
        if name == "hsdp" and nodes == 1:  # it is FSDP2 there
            continue
        try:
            yield name, _launch(file, machine)
        except UserError as error:
            yield name, error


def _launch(file: Path, machine: Machine) -> Launch:
    environ = {**Launcher(file, machine.gpus).environment(), "LOCAL_WORLD_SIZE": str(machine.of_node)}
    return read_launch(environ)


def _measured(
    plan: AnyPlan, weights: ModelWeights, machine: Machine, name: str, launch: Launch | UserError
) -> Candidate:
    if isinstance(launch, UserError):
        return Candidate(name, Launch(name), refused=launch.message)
    own = replace(plan, launch=launch)
    assert plan.model_config is not None
    problems = [*check_weights(own, stored_quantisation(plan.model_config)), *check_split(own), *check_pipeline(own)]
    problems += check_optimizer_of_strategy(own)
    rows, rest = divmod(plan.training.global_batch_size, launch.data_size)
    if rest:
        return Candidate(name, launch, f"{launch.data_size} groups do not share {rows * launch.data_size + rest} rows")
    if problems:
        return Candidate(name, launch, "; ".join(map(str, problems)))
    memory = RankMemory(own, weights)
    found = []
    for at_once in (each for each in range(1, rows + 1) if rows % each == 0):
        tokens = math.ceil(at_once * plan.sequence_limit / launch.axes.context)
        needed = memory.at(tokens, rows // at_once)
        step = estimate_step(memory, weights, machine, plan.sequence_limit, rows // at_once)
        fits = needed.total_bytes <= machine.memory_bytes
        found.append(Candidate(name, launch, "", at_once, needed, step, fits))
    fitting = [each for each in found if each.fits]
    if not fitting:
        return min(found, key=lambda each: each.memory.total_bytes if each.memory else 0)
    return min(fitting, key=lambda each: (each.step.seconds if each.step else 0.0, -each.rows))

"""Every strategy file that can run a plan on a machine: the micro-batch that fits, memory and time of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from indictune.config.plan import AnyPlan, Launch
from indictune.distributed.choose_launcher import Launcher
from indictune.distributed.context import check_context
from indictune.distributed.launch import read_launch
from indictune.distributed.pipeline.layout import check_pipeline
from indictune.distributed.strategy import check_strategy, check_weights, default_optimizer
from indictune.distributed.tensor import check_split
from indictune.errors import UserError
from indictune.models.load import stored_quantisation
from indictune.planning.hardware import Machine, assumed
from indictune.planning.memory import (
    Memory,
    NodeMemory,
    RankMemory,
    WrittenBytes,
    node_memory,
    row_limit,
    written_bytes,
)
from indictune.planning.rank_weights import ModelWeights
from indictune.planning.step_time import RowLengths, Step, estimate_step, flops_of_gpu, flops_of_step, reading_s
from indictune.versions import strategies


@dataclass(frozen=True)
class MicroBatchSize:
    """What a process computes at once."""

    rows: int
    tokens: int  # at most, of one process
    count: int  # of a step


@dataclass(frozen=True)
class Candidate:
    """A strategy on a machine."""

    strategy: str  # name of its file
    launch: Launch  # of a run under it
    method: str
    refused: str = ""  # why it cannot run the plan; empty if it can
    micro_batch: MicroBatchSize | None = None  # the fastest that fits, or the one of least memory
    largest: MicroBatchSize | None = None  # micro-batch that fits; None if none does
    memory: Memory | None = None  # of the process that needs most, with `micro_batch`
    node: NodeMemory | None = None  # CPU memory of a node
    written: WrittenBytes | None = None  # to disk
    step: Step | None = None  # the time of a step
    # Model FLOPS utilisation: of the GPUs' arithmetic, the share that the model needs without recomputing.
    mfu: float = 0.0
    before_s: float = 0.0  # in which rows are read once, before the first step
    fits: bool = False  # whether a GPU has the memory with room to spare, and a node its own, if that is known

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return 1 if self.micro_batch is None else self.micro_batch.rows

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch of one process, at most."""
        return 0 if self.micro_batch is None else self.micro_batch.tokens


def candidates(
    plan: AnyPlan, weights: ModelWeights, machine: Machine, lengths: RowLengths | None = None, asked: int | None = None
) -> list[Candidate]:
    """All strategy files on all GPUs of a machine, those that fit first, the fastest of them first.

    Without lengths, each row is as long as `--max_length`. The micro-batch that is asked for is in rows, or in tokens
    under `--max_tokens_per_device`; None is the fastest that fits.
    """
    search = _Search(plan, weights, machine, unknown_lengths(plan) if lengths is None else lengths, asked)
    found = [search.best_of(name, launch) for name, launch in _launches(machine, plan.model.method)]
    return sorted(found, key=_order)


def _order(each: Candidate) -> tuple[float, ...]:
    if each.memory is None or each.step is None:
        return (2,)
    if not each.fits:
        return 1, each.memory.total_bytes
    # Of equal times, the plainer file first: without parts of a model, without offloading, with fewer bytes sent.
    is_plain = each.launch.axes.model_ranks == 1, not each.strategy.endswith("_offload")
    return 0, _seconds(each), *(not each for each in is_plain), each.step.sent_bytes


def _seconds(each: Candidate) -> float:
    """Of a step; all that are faster than Python are equal."""
    return 0.0 if each.step is None else max(each.step.seconds, assumed("least_step_s"))


def _launches(machine: Machine, method: str) -> Iterator[tuple[str, Launch | UserError]]:
    """What each file asks for. One process uses a file only if that splits nothing over processes."""
    for name in strategies():
        is_of_one = name == "single_gpu"
        if is_of_one != (machine.gpus == 1) and not (machine.gpus == 1 and name.endswith("_offload")):
            continue
        if (name == "hsdp" and machine.nodes == 1) or (name == "fsdp2_qlora" and method != "qlora"):
            continue  # it is FSDP2 there
        yield name, _launch(name, machine.gpus, machine.of_node)


@cache
def _launch(name: str, processes: int, of_node: int) -> Launch | UserError:
    environ = Launcher(strategies()[name], processes).environment()
    try:
        return read_launch({**environ, "LOCAL_WORLD_SIZE": str(of_node)})
    except UserError as error:
        return error


@dataclass(frozen=True)
class _Search:
    """Looks for the micro-batch of each strategy; arguments as of `candidates`."""

    plan: AnyPlan
    weights: ModelWeights
    machine: Machine
    lengths: RowLengths
    asked: int | None

    def best_of(self, name: str, launch: Launch | UserError) -> Candidate:
        method = self.plan.model.method
        if isinstance(launch, UserError):
            return Candidate(name, Launch(name), method, refused=launch.message)
        own = replace(self.plan, launch=launch)
        optim = default_optimizer(launch, method, has_gpu=own.gpus > 0)
        if optim is not None and "optim" not in own.recipe.values:
            own = own.derive(optim=optim)
        found = check_weights(own, stored_quantisation(own.known_config))
        checks = (check_split, check_pipeline, check_context, check_strategy)
        found += [each for check in checks for each in check(own)]
        batches, problems = micro_batches(own, self.lengths, self.asked), dict.fromkeys(map(str, found))
        if problems or not batches:
            rows = self.asked if own.training.max_tokens_per_device is None else None
            alone = uneven_batch(own.training.global_batch_size, launch.data_size, rows)
            return Candidate(name, launch, method, "; ".join(problems) or alone)
        memory = RankMemory(own, self.weights)
        measured = [self._measured(name, memory, each) for each in batches]
        fitting = [each for each in measured if each.fits]
        if not fitting:
            return min(measured, key=lambda each: each.memory.total_bytes if each.memory else 0)
        best = min(fitting, key=lambda each: (_seconds(each), -each.tokens))
        return replace(best, largest=max(fitting, key=lambda each: each.tokens).micro_batch)

    def _measured(self, name: str, memory: RankMemory, batch: MicroBatchSize) -> Candidate:
        machine, plan, needed = self.machine, memory.plan, memory.at(batch.tokens, batch.count)
        step = estimate_step(memory, self.weights, machine, self.lengths, batch.count)
        node = node_memory(memory, machine.of_node)
        fits = needed.total_bytes <= machine.usable_bytes
        fits &= not machine.host_bytes or node.needed <= machine.host_bytes
        flops = flops_of_step(plan, self.weights, self.lengths, recomputes=False)
        return Candidate(
            *(name, plan.launch, plan.model.method),
            micro_batch=batch,
            memory=needed,
            node=node,
            written=written_bytes(plan, self.weights),
            step=step,
            mfu=flops / (step.seconds * machine.gpus * flops_of_gpu(plan, machine)),
            before_s=reading_s(plan, self.weights, machine, self.lengths),
            fits=fits,
        )


def uneven_batch(rows: int, groups: int, asked: int | None) -> str:
    """That groups of processes cannot share a global batch of rows, and the nearest sizes that they can."""
    unit = groups * (asked or 1)
    sizes = [size for size in (rows // unit * unit, -(-rows // unit) * unit) if size]
    what = f"{groups} x {asked} rows" if asked else f"{groups}"
    return f"--global_batch_size {rows} is no multiple of {what}; use {' or '.join(map(str, sizes))}"


def unknown_lengths(plan: AnyPlan) -> RowLengths:
    """Of rows that are not read: each has `--max_length` tokens."""
    return RowLengths(row_limit(plan), row_limit(plan), plan.sequence_limit)


def micro_batches(plan: AnyPlan, lengths: RowLengths, asked: int | None = None) -> list[MicroBatchSize]:
    """All micro-batches that a run may choose, or that which is asked for, as in `candidates`.

    There are none if the processes cannot share the global batch.
    """
    rows, rest = divmod(plan.training.global_batch_size, plan.launch.data_size)
    if rest:
        return []
    parts = plan.launch.axes.context
    if plan.training.max_tokens_per_device is None:
        sizes = [each for each in range(1, rows + 1) if rows % each == 0 and asked in (None, each)]
        return [MicroBatchSize(each, math.ceil(each * lengths.longest / parts), rows // each) for each in sizes]
    # The limit of the longest row, doubled until one micro-batch takes all rows.
    doublings = max(0, math.ceil(math.log2(max(1.0, rows * lengths.mean / lengths.longest))))
    limits = [math.ceil(lengths.longest / parts) * 2**power for power in range(doublings + 1)]
    found = []
    for limit in limits if asked is None else [asked]:
        count = min(rows, math.ceil(rows * lengths.mean / (limit * parts)))
        found.append(MicroBatchSize(math.ceil(rows / count), limit, count))
    return found

"""The whole examination of machine and ranks, and the quick half that a run does by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from socket import gethostname
from typing import Any

import torch
from torch import distributed
from transformers import TrainingArguments

from indictune.config.plan import AnyPlan, Launch
from indictune.distributed import agreement, collectives
from indictune.distributed.launch import shown_axes
from indictune.doctor import machine, rank_checks, run_files
from indictune.doctor.check_lines import Outcome, merged, of_problem
from indictune.doctor.roll_call import RollCall
from indictune.errors import Problem, UserError, problem

RECIPE_CHECK, LAUNCH_CHECK, _BACKEND_FLAG = "recipe", "launch", "ddp_backend"
_FIRST = (machine.PACKAGES_CHECK, RECIPE_CHECK, run_files.ROWS_CHECK)
_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}  # of the tensor of a collective
_TIMES = {"cpu": 3, "cuda": 10}


@dataclass(frozen=True)
class Subject:
    """What is examined."""

    plan: AnyPlan
    recipe: str  # its path; empty for none
    problems: Sequence[Problem]
    values: Mapping[str, Any]  # that all ranks must have alike
    repository: str | None  # of the Hub that the run pushes to; None if it does not
    is_quantised: bool  # whether the run needs bitsandbytes
    # Starts the process group, as the run does, and gives its training arguments.
    bring_up: Callable[[], TrainingArguments]

    @property
    def local_rank(self) -> int:
        """The number of this process on its node."""
        return int(self.plan.environ.get("LOCAL_RANK", "0"))


def examine(subject: Subject, roll: RollCall, found: list[Outcome]) -> None:
    """Add the lines of all ranks to `found`, as they become known. All ranks must call it, and all get all lines.

    Raises:
        AbsentError: a rank is gone.
    """
    hosts = roll.exchange("the start of all ranks", gethostname(), longer=2)
    ranks = roll.exchange("the checks of each machine", _of_this_rank(subject))
    own = [[Outcome(**{**each, "stack": ()}) for each in rank["lines"]] for rank in ranks]
    lines = merged(own, hosts)
    found += [line for line in lines if line.check in _FIRST]
    found += machine.gpu_lines([rank["gpus"] for rank in ranks], hosts)
    found += rank_checks.difference_lines([rank["values"] for rank in ranks], hosts)
    try:
        with roll.at("bringing up the process group"):
            args = subject.bring_up()
    except UserError as error:
        found += [of_problem(LAUNCH_CHECK, each) for each in error.problems]
    else:
        found.append(_launch_line(subject.plan.launch, args))
        found += _between_ranks(subject, roll, args, [rank["links"] for rank in ranks], hosts)
    found += [line for line in lines if line.check not in _FIRST]


def _of_this_rank(subject: Subject) -> dict[str, Any]:
    """What this rank sees of its machine, as JSON."""
    plan = subject.plan
    own = machine.gpu_facts(subject.local_rank)
    interface = plan.environ.get("NCCL_SOCKET_IFNAME" if own["name"] else "GLOO_SOCKET_IFNAME", "")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if own["visible"] else None  # type: ignore[no-untyped-call]
    rows = run_files.row_digests(plan.configuration)
    values = {**subject.values, **rows, "CUDA of torch": torch.version.cuda, "NCCL": nccl}
    return {
        "lines": [asdict(line) for line in (*_lines_of_machine(subject, own["visible"]), run_files.row_line(rows))],
        "gpus": own,
        "links": rank_checks.link_facts(own["name"], interface),
        "values": agreement.short_values(values),
    }


def _lines_of_machine(subject: Subject, visible_gpus: int) -> list[Outcome]:
    plan = subject.plan
    device = torch.device("cuda", subject.local_rank) if subject.local_rank < visible_gpus else torch.device("cpu")
    with ThreadPoolExecutor(1) as pool:  # the Hub may take its time
        hub = pool.submit(run_files.hub_line, subject.repository) if plan.launch.rank == 0 else None
        found = machine.package_lines(plan.environ, visible_gpus, plan.launch.world_size)
        found += [of_problem(RECIPE_CHECK, each) for each in subject.problems]
        if not subject.problems:
            found.append(Outcome(RECIPE_CHECK, "ok", subject.recipe or "none given"))
        if plan.training.output_dir:
            found.append(run_files.disk_line(plan, timed=subject.local_rank == 0))
        else:
            found.append(Outcome(run_files.OUTPUT_CHECK, "ok", "none given"))
        found += [
            machine.extras_line(),
            machine.shared_memory_line(),
            machine.build_line(plan.launch),
            machine.four_bit_line(device, subject.is_quantised),
        ]
        return found + ([hub.result()] if hub else [])


def _between_ranks(
    subject: Subject, roll: RollCall, args: TrainingArguments, links: Sequence[Mapping[str, Any]], hosts: Sequence[str]
) -> list[Outcome]:
    ranks = roll.world_size
    if ranks == 1 or not distributed.is_initialized():
        return [Outcome("collectives", "ok", "one process: there is nothing to send")]
    device, own = args.device, dict[str, Any]()
    with roll.at("clocks"):
        own["clock"] = rank_checks.clock_readings()
    base = rank_checks.known_numbers(_BYTES[device.type] // 4, device)
    for each in rank_checks.COLLECTIVES:
        with roll.at(each.name):
            own[f"{each.name} right"] = rank_checks.is_right(each, base)
            own[f"{each.name} s"] = rank_checks.seconds(each, base, _TIMES[device.type])
    own["compute"] = rank_checks.compute_s(device)
    with roll.at("pairs of ranks"):
        own["links"] = rank_checks.link_rates(device)
    if subject.plan.training.output_dir:
        with roll.at("a file that all nodes see"):
            own["shared"] = collectives.disk_is_shared(run_files.nearest_folder(subject.plan.output_dir), args)
    of_ranks = roll.exchange("the measurements", own)
    found = rank_checks.clock_lines([each["clock"] for each in of_ranks], hosts)
    right = {each.name: [rank[f"{each.name} right"] for rank in of_ranks] for each in rank_checks.COLLECTIVES}
    found += rank_checks.wrong_lines(right, hosts)
    for each in rank_checks.COLLECTIVES:
        if all(right[each.name]):
            slowest_s = max(rank[f"{each.name} s"] for rank in of_ranks)
            rate = each.share(ranks) * 4.0 * len(base) / slowest_s
            found.append(rank_checks.bandwidth_line(each.name, rate, links, hosts))
    found += rank_checks.rank_lines([each["compute"] for each in of_ranks], hosts)
    found += rank_checks.link_lines([each["links"] for each in of_ranks], hosts)
    if len(set(hosts)) > 1 and "shared" in of_ranks[0]:
        is_shared = of_ranks[0]["shared"]
        text = "all nodes see the same files" if is_shared else "each node has its own disk, and keeps a copy"
        found.append(Outcome("shared disk", "ok", text))
    return found


def _launch_line(launch: Launch, args: TrainingArguments) -> Outcome:
    """The strategy, its axes, processes and backend. `check_strategy_started` has compared strategy and processes."""
    nodes = max(1, launch.world_size // launch.local_world_size)
    axes = shown_axes(launch) or (f"data {launch.data_size}" if launch.data_size > 1 else "")
    asked = f"{launch.strategy}, {launch.world_size} process(es) on {nodes} node(s)" + (f", {axes}" if axes else "")
    if not distributed.is_initialized():
        return Outcome(LAUNCH_CHECK, "ok", f"{asked}, on {args.device}")
    rank, backend = distributed.get_rank(), distributed.get_backend()
    expected = "nccl" if args.device.type == "cuda" else "gloo"
    if rank != launch.rank:
        cure = "Start all processes with one launcher command."
        return Outcome(LAUNCH_CHECK, "fail", f"{asked}; rank {launch.rank} came up as {rank}", cure)
    if expected not in backend:
        cure = f"Leave out --{_BACKEND_FLAG}: {expected} is the backend of {args.device.type}."
        return Outcome(LAUNCH_CHECK, "warn", f"{asked}, on {args.device} over {backend}", cure)
    return Outcome(LAUNCH_CHECK, "ok", f"{asked}, over {backend}")


_NUMBERS = 1 << 16  # float32 numbers of a rank


def check_ranks(plan: AnyPlan, args: TrainingArguments) -> list[str]:
    """What the user is warned of, once the process group is up. All ranks must call it, and all get the same.

    Raises:
        UserError: a collective gives a wrong result.
    """
    base = rank_checks.known_numbers(_NUMBERS, args.device)
    right = {each.name: rank_checks.is_right(each, base) for each in rank_checks.COLLECTIVES}
    own = [
        *machine.package_lines(plan.environ, plan.gpus, args.world_size),
        machine.shared_memory_line(),
        run_files.disk_line(plan, timed=False),
    ]
    everyone = collectives.gather_from_all((gethostname(), own, right, rank_checks.clock_readings()))
    hosts = [each[0] for each in everyone]
    by_name = {name: [each[2][name] for each in everyone] for name in right}
    if wrong := rank_checks.wrong_lines(by_name, hosts):
        raise UserError(problems=[problem("collective-wrong", each.check, each.found) for each in wrong])
    found = merged([each[1] for each in everyone], hosts)
    found += rank_checks.clock_lines([each[3] for each in everyone], hosts)
    return [f"{line.check}: {line.found}. {line.cure}" for line in found if line.status != "ok"]

"""Failures of the machine that a user can mend: memory, ports, network interfaces and `/dev/shm`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple, cast

import psutil
import torch
from accelerate.optimizer import AcceleratedOptimizer
from datasets import Dataset
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from transformers import Trainer

from indictune.config.arguments import Method
from indictune.config.plan import AnyPlan, Axes
from indictune.console_text import shown_bytes
from indictune.data.batching import lengths_of
from indictune.distributed import elastic
from indictune.distributed.devices import meta_of
from indictune.distributed.launch import engine_of
from indictune.distributed.upstream import whole_gradients
from indictune.errors import Problem, problem
from indictune.models.active_vocabulary import active_embedding
from indictune.planning.hardware import assumed, free_and_capacity
from indictune.planning.memory import Memory, RankMemory, micro_batch_tokens, row_limit
from indictune.planning.rank_weights import ModelWeights
from indictune.run import OWN_PROGRESS
from indictune.stop_signals import killed_processes

_SMALLER_METHODS: dict[Method, tuple[Method, ...]] = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ()}
# Files that spread more. FSDP2 keeps whole gradients between micro-batches, and ZeRO-3 shards of them.
_OTHER_FILES = {
    **dict.fromkeys(("ddp", "zero1", "zero2"), ("fsdp2", "zero3", "fsdp2_offload")),
    "fsdp2": ("zero3", "fsdp2_offload"),
    "zero3": ("zero3_offload",),
}
_UNITS = {"byte": 1, "bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_AMOUNT = r"([\d.]+) ?(bytes?|[KMGT]iB)\b"
_ASKED = re.compile(rf"tried to allocate {_AMOUNT}|Unable to allocate {_AMOUNT}|malloc of size (\d+) failed", re.I)
_FREE = re.compile(rf"of which {_AMOUNT} is free", re.I)
_OWN = re.compile(rf"this process has {_AMOUNT} memory in use", re.I)
_CAPACITY = re.compile(rf"total capacity of {_AMOUNT}", re.I)
# Of torch's CPU allocator, CUDA, cuBLAS, bitsandbytes, the system and oneDNN.
_SAYS_SO = re.compile(
    r"can't allocate memory|out of memory|bad_alloc|ALLOC_FAILED|Cannot allocate memory|could not create a primitive",
    re.I,
)
PARTS = ("parameters", "gradients", "optimizer_states")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: torch's own types, and texts of the libraries."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and bool(_SAYS_SO.search(str(error)))


class KnownRows(NamedTuple):
    """What a run knows of its rows once it has read them."""

    longest: int | None = None  # tokens of one; None for `--max_length`
    active: int | None = None  # rows of the embedding that are trained; None for all


_UNKNOWN = KnownRows()


def out_of_memory(
    error: BaseException, plan: AnyPlan | None, step: int, place: str, trainer: Trainer | None = None
) -> Problem:
    """The answer to an error of `is_out_of_memory`, after the last step and place of this rank, as in `Progress`."""
    text = str(error)
    on_gpu = isinstance(error, torch.OutOfMemoryError) or "CUDA" in text
    free, capacity = torch.cuda.mem_get_info() if on_gpu and torch.cuda.is_available() else free_and_capacity()
    free, capacity = _amount(_FREE, text) or free, _amount(_CAPACITY, text) or capacity
    asked = _amount(_ASKED, text)
    used = _amount(_OWN, text) or (capacity - free if on_gpu else psutil.Process().memory_info().rss)
    return problem(
        "out-of-memory",
        device="GPU" if on_gpu else "CPU",
        step=step,
        place=place,
        asked="an unknown amount was" if asked is None else f"{shown_bytes(asked)} were",
        free=shown_bytes(free),
        capacity=shown_bytes(capacity),
        **_advice(plan, capacity, place, trainer, used),
    )


def killed_for_memory(plan: AnyPlan | None) -> Problem:
    """The answer to a rank that is gone after the kernel killed processes for lack of memory."""
    free, capacity = free_and_capacity()
    sizes = {"free": shown_bytes(free), "capacity": shown_bytes(capacity)}
    return problem("rank-killed-for-memory", **sizes, **_advice(plan, capacity, "training"))


def _amount(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    if found is None:
        return None
    number, unit, *_ = [*(each for each in found.groups() if each), "bytes"]
    return int(float(number) * _UNITS[unit.lower()])


def _advice(
    plan: AnyPlan | None, capacity: int, place: str, trainer: Trainer | None = None, used: int = 0
) -> dict[str, str]:
    """The estimate of this process and the smallest change that fits, for a message."""
    known = _known_rows(trainer)
    own = None if plan is None else estimated(plan, known, of_this_rank=True)
    needed = None if plan is None else estimated(plan, known)
    if plan is None or own is None or needed is None:
        return {"estimate": "", "change": "Close other programs, or use a machine with more memory."}
    rows = plan.training.per_device_eval_batch_size
    if "evaluating" in place and rows > 1:
        return {"estimate": "", "change": f"Use --per_device_eval_batch_size {rows // 2}; the metrics stay the same."}
    size = shown_bytes(getattr(own, own.largest.replace(" ", "_")))
    estimate = f" The largest part of an estimated {shown_bytes(own.total_bytes)} is {own.largest}, {size}"
    if trainer is None or trainer.model is None:
        return {"estimate": f"{estimate} ({_listed(asdict(own))}).", "change": smallest_change(plan, needed, capacity)}
    held = held_by_trainer(trainer.model, trainer.optimizer)
    estimate += f". Predicted, and held now: {compared(own, held, used)}{'' if plan.gpus else ' with Python'}."
    return {"estimate": estimate, "change": smallest_change(plan, needed, capacity, known)}


def compared(predicted: Memory, held: Mapping[str, int], used: int) -> str:
    """Terms that are predicted, each with what a process holds by `held_bytes`, and what it uses in all."""
    terms = asdict(predicted)
    pairs = [f"{_term(name, terms.pop(name))}, {shown_bytes(size)}" for name, size in held.items()]
    rest = f"all else {shown_bytes(sum(terms.values()))} ({_listed(terms)})"
    return "; ".join([*pairs, f"{rest}, {shown_bytes(max(0, used - sum(held.values())))}"])


def _listed(terms: Mapping[str, int]) -> str:
    return ", ".join(_term(name, size) for name, size in terms.items() if size)


def _term(name: str, size: int) -> str:
    return f"{name.replace('_', ' ')} {shown_bytes(size)}"


def _known_rows(trainer: Trainer | None) -> KnownRows:
    if trainer is None or trainer.model is None:
        return _UNKNOWN
    active = active_embedding(trainer.model)
    longest = int(lengths_of(cast(Dataset, trainer.train_dataset)).max())
    return KnownRows(longest, None if active is None else len(active[1].row_ids))


def estimated(plan: AnyPlan, known: KnownRows = _UNKNOWN, of_this_rank: bool = False) -> Memory | None:
    """The memory of the process that needs most, or of this one, if all rows are as long as the longest; None for an
    unknown model."""
    meta = meta_of(plan, known.active if plan.model.method == "full" else None)
    if meta is None:
        return None
    memory, launch = RankMemory(plan, ModelWeights(meta)), plan.launch
    sizes = micro_batch_tokens(plan, known.longest or row_limit(plan)), plan.training.gradient_accumulation_steps
    if of_this_rank:
        return memory.of_stage(launch.rank // (launch.world_size // launch.axes.pipeline), *sizes)
    return memory.at(*sizes)


def smallest_change(plan: AnyPlan, needed: Memory, capacity: int, known: KnownRows = _UNKNOWN) -> str:
    """A sentence with the flags of the first change that fits the bytes of the device, those that change least first.

    `needed` is the estimate of the plan, which did not fit. Processes on one CPU share its bytes.
    """
    own = capacity if plan.gpus else capacity // plan.launch.local_world_size
    # It is to be below the same share of the estimate of what did not fit, too.
    limit_bytes = assumed("of_memory") * min(own, needed.total_bytes)
    for flags, effect, changed in _changes(plan):
        fits = estimated(changed, known)
        if fits is not None and fits.total_bytes <= limit_bytes:
            return f"Use {flags} (an estimated {shown_bytes(fits.total_bytes)}{effect})."
    return "No setting fits here: use a smaller model, or devices with more memory."


def _changes(plan: AnyPlan) -> Iterator[tuple[str, str, AnyPlan]]:
    """Flags, what they change in the result or speed, and the plan with them; from the smallest change on."""
    yield from _of_the_batch(plan)
    kept = plan
    if not plan.training.gradient_checkpointing:
        kept = plan.derive(gradient_checkpointing=True)
        yield "--gradient_checkpointing true", "; the result stays the same, steps take a third longer", kept
        for flags, _, changed in _of_the_batch(kept):
            yield f"--gradient_checkpointing true {flags}", "; the result stays the same", changed
    smallest = [(flags, changed) for flags, _, changed in _of_the_batch(kept)][-1:]
    family, splits_model = engine_of(plan.launch.strategy), plan.launch.axes.model_ranks > 1
    spreads = plan.launch.world_size > 1 and not splits_model and plan.model.method != "qlora"
    for strategy in _OTHER_FILES.get(family, ()) if spreads else ():
        axes = Axes(is_sharded=strategy.startswith("fsdp2"))
        spread = replace(plan.launch, strategy=strategy, axes=axes)
        yield f"--strategy {strategy} (accelerate_configs/{strategy}.yaml)", "", replace(plan, launch=spread)
        for flags, changed in smallest:
            yield f"--strategy {strategy} and {flags}", "", replace(changed, launch=spread)
    methods = _SMALLER_METHODS[plan.model.method]
    for method in methods if family in ("single", "ddp") else methods[:1]:
        model = replace(plan.model, method=method)
        yield f"--method {method}", "; it trains an adapter instead of all weights", replace(plan, model=model)
        for flags, changed in smallest:
            yield f"--method {method} and {flags}", "", replace(changed, model=model)


def _of_the_batch(plan: AnyPlan) -> Iterator[tuple[str, str, AnyPlan]]:
    training = plan.training
    given: dict[str, Any] = {"max_tokens_per_device": training.max_tokens_per_device}
    if training.max_tokens_per_device is None:
        given = {"per_device_train_batch_size": training.per_device_train_batch_size}
    ((name, size),) = given.items()
    smallest = plan.sequence_limit // plan.launch.axes.context if name == "max_tokens_per_device" else 1
    steps = training.gradient_accumulation_steps
    while (size := size // 2) >= smallest:
        steps *= 2
        if name == "max_tokens_per_device" or training.global_batch_size % (size * plan.launch.data_size) == 0:
            same = f"; --global_batch_size {training.global_batch_size} and the result stay the same"
            yield f"--{name} {size}", same, plan.derive(**{name: size}, gradient_accumulation_steps=steps)


def held_bytes(
    model: nn.Module, optimizer: Optimizer | None = None, counted: dict[int, torch.Tensor] | None = None
) -> dict[str, int]:
    """Bytes of this process by part of `PARTS`, each tensor once, apart from those `counted` before, by address.

    DeepSpeed (0.19) gives torch's optimizer shards of its own, one group of parameters after the other, and keeps
    those of ZeRO-3 in `ds_tensor`.
    """
    counted = {} if counted is None else counted
    groups = [] if optimizer is None else optimizer.param_groups
    both = [*model.parameters(), *(each for group in groups for each in group["params"])]
    states = [] if optimizer is None else optimizer.state.values()
    parts = (
        [*both, *(vars(each)["ds_tensor"] for each in both if "ds_tensor" in vars(each)), *_scales(both)],
        [*(each.grad for each in both), *whole_gradients(model)],
        [value for state in states for value in state.values()],
    )
    return {name: _bytes_of(each, counted) for name, each in zip(PARTS, parts, strict=True)}


def held_by_trainer(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """As `held_bytes`, of a Trainer's model and its optimizer, which accelerate (1.15) and DeepSpeed (0.19) wrap.

    DeepSpeed keeps gradients, and the weights that ZeRO-3 updates, by names of its own.
    """
    copies, gradients = list[Any](), list[Any]()
    while isinstance(optimizer, AcceleratedOptimizer) or not isinstance(optimizer, Optimizer | None):
        own = vars(optimizer)
        copies += own.get("fp32_partitioned_groups_flat", ())
        if "grad_partitions_flat_buffer" in own:  # of ZeRO-3, whose other names are views of it
            gradients.append(own["grad_partitions_flat_buffer"])
        else:
            groups = [*own.get("averaged_gradients", {}).values(), *own.get("all_grad_tensors", {}).values()]
            gradients += [each for group in groups for each in group or ()]
        optimizer = optimizer.optimizer
    counted = dict[int, torch.Tensor]()
    found = held_bytes(model, optimizer, counted)
    found["parameters"] += _bytes_of(copies, counted)
    found["gradients"] += _bytes_of(gradients, counted)
    return found


def _scales(parameters: Iterable[nn.Parameter]) -> Iterator[Any]:
    """The tensors that unpack 4-bit weights (bitsandbytes 0.50, `QuantState`)."""
    for each in parameters:
        state = getattr(each, "quant_state", None)
        while state is not None:
            yield from (state.absmax, state.code)
            state = state.state2


def _bytes_of(values: Iterable[Any], counted: dict[int, torch.Tensor]) -> int:
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim():
            local = value.to_local() if isinstance(value, DTensor) else value.detach()
            total += local.nbytes if local.data_ptr() not in counted else 0
            counted[local.data_ptr()] = local
    return total


SHARED_MEMORY = "/dev/shm"
# Of torch's store (2.13), NCCL's and torch's shared memory. torch names its files there /torch_<process>_<number>.
_PORT_IN_USE = re.compile(r"port: (\d+).*EADDRINUSE|EADDRINUSE.*port: (\d+)", re.DOTALL)
_NO_SHARED_MEMORY = re.compile(rf"out of shared memory|insufficient shared memory|{SHARED_MEMORY}|</torch_\d")
_LOST_PEER = re.compile(r"Connection (?:closed|reset) by peer")  # gloo's
_KILLED_WORKER = re.compile(r"DataLoader worker \(pid.*\) is killed by signal: Killed")


def explain_failure(
    error: BaseException, plan: AnyPlan | None, killed_before: int, trainer: Trainer | None = None
) -> str | None:
    """The problem behind an error that ended the run on this rank, or behind its cause; None for any other error.

    `killed_before` are the `killed_processes` when the run began.
    """
    cause: BaseException | None = error
    while cause is not None:
        if found := _explained(cause, plan, killed_before, trainer):
            return str(found)
        cause = cause.__cause__ or cause.__context__
    return None


def check_interfaces(plan: AnyPlan) -> list[Problem]:
    """Refuse `NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME` that name no network interface of this machine."""
    if plan.launch.world_size == 1:
        return []
    known, found = sorted(psutil.net_if_addrs()), []
    for variable in ("GLOO_SOCKET_IFNAME", *(("NCCL_SOCKET_IFNAME",) if plan.gpus else ())):
        asked = plan.environ.get(variable, "")
        if asked and not _names_one_of(asked, known, is_exact=variable.startswith("GLOO")):
            found.append(problem("network-interface-missing", variable, asked, known=", ".join(known)))
    return found


def why_gone(plan: AnyPlan | None, killed_before: int) -> list[str]:
    """An answer to a rank that is gone, if the kernel has killed processes for lack of memory; else nothing."""
    return [str(killed_for_memory(plan))] if killed_processes() > killed_before else []


def _names_one_of(asked: str, known: list[str], is_exact: bool) -> bool:
    """Whether a variable names an interface. NCCL takes beginnings, whole names after `=`, and others after `^`."""
    if asked.startswith("^") and not is_exact:
        return True
    if is_exact or asked.startswith("="):
        return any(name in known for name in asked.removeprefix("=").split(","))
    return any(name.startswith(beginning) for name in known for beginning in asked.split(","))


def _explained(
    error: BaseException, plan: AnyPlan | None, killed_before: int, trainer: Trainer | None
) -> Problem | None:
    text = str(error)
    if _NO_SHARED_MEMORY.search(text):
        usage = shutil.disk_usage(SHARED_MEMORY)
        sizes = {"free": shown_bytes(usage.free), "capacity": shown_bytes(usage.total)}
        return problem("shared-memory-full", SHARED_MEMORY, **sizes)
    if port := _PORT_IN_USE.search(text):
        return problem("port-in-use", "MASTER_PORT", port[1] or port[2])
    restarts = 0 if plan is None or plan.launch.is_one_node else elastic.most_restarts(plan.environ)
    if restarts and (lost := _LOST_PEER.search(text)):
        return problem("rank-of-other-node-lost", reason=lost[0], restarts=restarts)
    if is_out_of_memory(error):
        return out_of_memory(error, plan, OWN_PROGRESS.step, OWN_PROGRESS.place, trainer)
    if _KILLED_WORKER.search(text) and killed_processes() > killed_before:
        return killed_for_memory(plan)
    return None

"""Compare what ranks must have alike, and meet the ranks of other nodes before the process group is up."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from socket import gethostname
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from indictune.config.plan import Launch
from indictune.distributed import collectives, elastic, process_group
from indictune.distributed.launch import is_one_node, rank_of
from indictune.distributed.sharding import local_part
from indictune.errors import Problem, problem
from indictune.run import OWN_PROGRESS

_SHOWN = 60  # characters of a value
ABSENT = "none"
# Of accelerate's launcher (1.15): what its file says. Paths may differ between nodes.
_OF_STRATEGY_FILES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
_OF_ONE_NODE = {"ACCELERATE_DEEPSPEED_CONFIG_FILE"}

Values = Mapping[str, Any]  # by the name that a message has for it


class RankDifference(NamedTuple):
    """A value of one rank that is not that of rank 0."""

    rank: int
    host: str
    name: str
    value: str
    expected: str


def of_strategy(launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """The strategy of a launch, its sizes, and what its file says, but for a DeepSpeed file (`launch.deepspeed`)."""
    sizes = {f"{name} size": str(size) for name, size in vars(launch.axes).items() if name != "is_sharded"}
    named = {name for name in environ if name.startswith(_OF_STRATEGY_FILES)} - _OF_ONE_NODE
    return {"strategy": launch.strategy, **sizes, **{name: environ[name] for name in named}}


def short_values(values: Values) -> dict[str, str]:
    """Values as short texts. A long one is cut, and has a digest, so that two texts are equal if the values are."""
    texts = {name: str(value) for name, value in values.items()}
    digests = {name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in texts.items()}
    long = {name: f"{text[:_SHOWN]}... (digest {digests[name]})" for name, text in texts.items() if len(text) > _SHOWN}
    return texts | long


def differences_to_rank_0(
    rank: int, of_host: str, own: Mapping[str, str], expected: Mapping[str, str]
) -> list[RankDifference]:
    """Where the `short_values` of a rank are not those of rank 0. A value may be missing on one of them."""
    names = sorted({*own, *expected})
    both = [(name, own.get(name, ABSENT), expected.get(name, ABSENT)) for name in names]
    return [RankDifference(rank, of_host, *each) for each in both if each[1] != each[2]]


def rank_problems(found: Sequence[RankDifference], host_of_0: str) -> list[Problem]:
    """A problem for each value that differs on a host, with all its ranks."""
    key = RankDifference._replace
    ordered = sorted(found, key=lambda each: (*key(each, rank=0), each.rank))
    problems = []
    for each, group in itertools.groupby(ordered, lambda each: key(each, rank=0)):
        ranks = [one.rank for one in group]
        names = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        place = names if each.host == host_of_0 else f"{names} on {each.host}"
        more = {"ranks": place, "host": host_of_0, "expected": each.expected}
        problems.append(problem("ranks-differ", each.name, each.value, **more))
    return problems


Digests = dict[str, int]  # by the name that a message has for a tensor
# By the part of the model: ranks that hold the same part must hold the same tensors.
DigestsByPart = dict[str, Digests]

_ALL = "all"  # the part of what each rank has alike


class DivergedError(RuntimeError):
    """Two ranks have different copies of a tensor. The last checkpoint is from before that was noticed."""


class Fault(NamedTuple):
    """A copy that is not that of the other ranks."""

    rank: int
    name: str
    other: int


def check_copies(step: int, flag: str, model: nn.Module, optimizer: Optimizer | None, launch: Launch) -> None:
    """Compare the copies that ranks hold after a step. All ranks must call it.

    The ranks gather one number for each part of the model that they hold, and the digests of all tensors only if two
    numbers differ. The model is without the wrappers of a strategy, and the optimizer is torch's own; None if its
    states are split over all ranks. The flag asked for the comparison.

    Raises:
        DivergedError: with the rank and the tensor, on all ranks.
    """
    held = copies_of(model, optimizer, launch)
    everyone = collectives.gather_from_all({part: hash(tuple(own.values())) for part, own in held.items()})
    if all(len({each[part] for each in everyone if part in each}) == 1 for part in set().union(*everyone)):
        return
    details = collectives.gather_from_all((gethostname(), held))
    faults = faults_in([each for _, each in details])
    first = faults[0]
    names: dict[str, Any] = {"step": step, "rank": first.rank, "host": details[first.rank][0], "other": first.other}
    more = len(faults) - 1
    which = f"{first.name} (and {more} more)" if more else first.name
    raise DivergedError(str(problem("ranks-diverged", flag, tensor=which, **names)))


def faults_in(everyone: list[DigestsByPart]) -> list[Fault]:
    """The copies that are in a minority. Of two ranks, the second is named, though either may be wrong."""
    found = []
    for part in dict.fromkeys(part for held in everyone for part in held):
        ranks = [rank for rank, held in enumerate(everyone) if part in held]
        for name in everyone[ranks[0]][part]:
            digests = {rank: everyone[rank][part].get(name) for rank in ranks}
            usual, _ = Counter(digests.values()).most_common(1)[0]
            other = next(rank for rank, digest in digests.items() if digest == usual)
            found += [Fault(rank, name, other) for rank, digest in digests.items() if digest != usual]
    return found


def copies_of(model: nn.Module, optimizer: Optimizer | None, launch: Launch) -> DigestsByPart:
    """Digests of what this rank has a copy of, besides other ranks. Arguments are those of `check_copies`."""
    tensors: dict[str, dict[str, Tensor]] = {}
    names: dict[Any, str] = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        if "ds_shape" not in vars(parameter):  # ZeRO-3 splits each over all ranks
            _add(tensors, f"weight {name}", parameter, launch)
    for trained, states in {} if optimizer is None else optimizer.state.items():
        for state, value in states.items():
            if isinstance(value, Tensor) and trained in names:
                _add(tensors, f"{state} of {names[trained]}", value, launch)
    return {**_generators(launch), **{part: _digests(own) for part, own in tensors.items()}}


def _add(tensors: dict[str, dict[str, Tensor]], name: str, tensor: Tensor, launch: Launch) -> None:
    """Add this rank's part of a tensor, if other ranks hold the same part."""
    shards = _shards(tensor, launch)
    copies = launch.world_size // launch.axes.pipeline
    for _, size in shards.values():
        copies //= size
    own = local_part(tensor)
    if copies > 1 and own.numel():
        places = [f"{axis} {coordinate}" for axis, (coordinate, _) in shards.items()]
        tensors.setdefault(" ".join([_stage(launch), *places]), {})[name] = own


def _stage(launch: Launch) -> str:
    """The stage of a pipeline that this rank has. Without one, all ranks have the same."""
    return f"stage {launch.rank // (launch.world_size // launch.axes.pipeline)}"


def _shards(tensor: Tensor, launch: Launch) -> dict[str, tuple[int, int]]:
    """The axes that a tensor is split over: this rank's place on each, and the size of the axis."""
    if isinstance(tensor, DTensor):
        mesh, places = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert places is not None
        return {
            f"axis {axis}": (places[axis], mesh.size(axis))
            for axis, placement in enumerate(tensor.placements)
            if not placement.is_replicate()
        }
    if vars(tensor).get("ds_is_replaced_module"):  # DeepSpeed's AutoTP
        return {"tensor": (launch.rank % launch.axes.tensor, launch.axes.tensor)}
    return {}


def _generators(launch: Launch) -> DigestsByPart:
    """Seeds of this rank's random generators, and digests of their states where ranks draw the same dropout masks.

    Ranks with other rows, or other tokens, draw other masks.
    """
    seeds = {"seed of the random generator": torch.initial_seed()}
    states = {"random generator": torch.get_rng_state()}
    if torch.cuda.is_available():
        seeds["seed of the GPU's random generator"] = torch.cuda.initial_seed()
        states["random generator of the GPU"] = torch.cuda.get_rng_state()
    if launch.axes.tensor == 1 or launch.axes.context > 1:
        return {_ALL: seeds}
    # Their words are counters too, of which one grows as another falls: a sum would not see it.
    digests = {name: zlib.crc32(state.numpy().tobytes()) for name, state in states.items()}
    return {_ALL: seeds, f"{_stage(launch)} rows {launch.data_rank}": digests}


def _digests(tensors: Mapping[str, Tensor]) -> Digests:
    """A digest of each tensor's bits. The device is waited for once."""
    sums = [_sum_of_bits(each) for each in tensors.values()]
    return dict(zip(tensors, torch.stack([each.to(sums[0].device) for each in sums]).tolist(), strict=True))


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits as numbers of 8 bytes: a flipped bit changes it, and it reads the memory once."""
    found = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if found.storage_offset() % 8:
        found = found.clone()
    whole = len(found) // 8 * 8
    return found[:whole].view(torch.int64).sum() + found[whole:].sum()


_REFUSED = "refused"
_LONGEST_PAUSE_S = 0.5
_STRAGGLERS_S = 10.0  # how long a meeting that has found a difference waits for more
_FAREWELL_S = 1.0  # how long a rank that ends lets the others read why: its launcher may hold the store
_CONNECTED: list[Store] = []  # one at most. It is kept: without a store of the launcher, rank 0 serves it


def agree(
    moment: str, values: Callable[[], Values], launch: Launch, environ: Mapping[str, str], timeout_s: float
) -> list[Problem]:
    """Compare values that all ranks must have alike. All ranks must call it.

    Before the process group is up, the ranks of several nodes meet at the store of the launch; those of one node then
    have nothing to compare. Each moment of a run has another name. A meeting ends after `timeout_s` without those that
    did not come; the process group waits for them next.

    Returns:
        What differs from rank 0, on which rank and host; or why another rank cannot run. The same on all ranks.
    """
    if torch.distributed.is_initialized():
        everyone = collectives.gather_from_all((gethostname(), short_values(values())))
        host_of_0, expected = everyone[0]
        found = [differences_to_rank_0(rank, *each, expected) for rank, each in enumerate(everyone)]
        return rank_problems(list(itertools.chain(*found)), host_of_0)
    if is_one_node(environ):
        return []
    OWN_PROGRESS.passed(f"meeting the other nodes {moment}")
    try:
        return _meet(_store(environ, timeout_s), moment, launch, values(), timeout_s)
    except DistError as error:
        return [unreachable(environ, error)]


def unreachable(environ: Mapping[str, str], error: DistError) -> Problem:
    """The problem of a launch whose store this node does not reach."""
    where = f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
    return problem("first-node-unreachable", "MASTER_ADDR", where, reason=str(error).partition("\n")[0])


def tell_other_nodes(environ: Mapping[str, str], message: str) -> None:
    """Tell the ranks of other nodes, which may wait at a meeting, why this one cannot run."""
    if is_one_node(environ):
        return
    may_wait = elastic.most_restarts(environ) or environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    if may_wait and not _CONNECTED:
        return  # all other ranks would have to come
    with suppress(DistError):
        store = _store(environ, _STRAGGLERS_S)
        store.compare_set(_REFUSED, "", json.dumps([rank_of(environ), gethostname(), message]))
        time.sleep(_FAREWELL_S)


def _store(environ: Mapping[str, str], timeout_s: float) -> Store:
    """The store of this start, the same object each time."""
    if not _CONNECTED:
        timeout = timedelta(seconds=timeout_s)
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        name = elastic.attempt(environ)
        if elastic.most_restarts(environ):  # torchrun may start a run again in the same store, with other nodes
            name = process_group.agree_on_name(store, rank, world_size, timeout)
        _CONNECTED.append(PrefixStore(f"indictune/{name}", store))
    return _CONNECTED[0]


def _meet(store: Store, moment: str, launch: Launch, own: Values, timeout_s: float) -> list[Problem]:
    deadline, mine, place = time.monotonic() + timeout_s, short_values(own), PrefixStore(moment, store)
    if launch.rank == 0:
        place.set("expected", json.dumps([gethostname(), mine]))
    if not _waits_for("expected", place, store, deadline):
        return _refusal(store)
    host_of_0, expected = json.loads(place.get("expected"))
    found = differences_to_rank_0(launch.rank, gethostname(), mine, expected)
    for each in found:
        place.set(f"difference-{place.add('differences', 1)}", json.dumps(each))
    if found:
        place.set("differs", "")
    if place.add("arrived", 1) == launch.world_size:
        place.set("complete", "")
    has_come = _waits_for("complete", place, store, deadline)
    stored = [place.get(f"difference-{each + 1}") for each in range(place.add("differences", 0))]
    differing = [RankDifference(*json.loads(each)) for each in stored]
    return rank_problems(differing, host_of_0) or ([] if has_come else _refusal(store))


def _waits_for(key: str, place: Store, of_launch: Store, deadline: float) -> bool:
    """Whether a key is there in time, and before a rank refuses to run."""
    pause = 0.01
    while not place.check([key]):
        if of_launch.check([_REFUSED]) or time.monotonic() > deadline:
            return False
        if place.check(["differs"]):
            deadline = min(deadline, time.monotonic() + _STRAGGLERS_S)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True


def _refusal(of_launch: Store) -> list[Problem]:
    if not of_launch.check([_REFUSED]):
        return []
    rank, host, message = json.loads(of_launch.get(_REFUSED))
    return [problem("other-node-refused", value=" ".join(message.split()), rank=rank, host=host)]

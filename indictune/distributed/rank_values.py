"""Values that all ranks must have alike: who has another one than rank 0."""

from __future__ import annotations

import hashlib
import itertools
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from indictune.config.plan import Launch
from indictune.errors import Problem, problem

_SHOWN = 60  # characters of a value
_ABSENT = "none"
# Of accelerate's launcher (1.15): what its file says. Paths may differ between nodes.
_OF_STRATEGY_FILES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")
_OF_ONE_NODE = {"ACCELERATE_DEEPSPEED_CONFIG_FILE"}

Values = Mapping[str, Any]  # by the name that a message has for it


class Difference(NamedTuple):
    """A value of one rank that is not that of rank 0."""

    rank: int
    host: str
    name: str
    value: str
    expected: str


def host() -> str:
    """The name of this machine, for messages."""
    return socket.gethostname()


def of_strategy(launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """The strategy of a launch, its sizes, and what its file says, but for a DeepSpeed file (`launch.deepspeed`)."""
    sizes = {f"{name} size": str(size) for name, size in vars(launch.axes).items() if name != "is_sharded"}
    named = {name for name in environ if name.startswith(_OF_STRATEGY_FILES)} - _OF_ONE_NODE
    return {"strategy": launch.strategy, **sizes, **{name: environ[name] for name in named}}


def shown(values: Values) -> dict[str, str]:
    """Values as short texts. A long one is cut, and has a digest, so that two texts are equal if the values are."""
    return {name: _short(str(value)) for name, value in values.items()}


def differences(rank: int, of_host: str, own: Mapping[str, str], expected: Mapping[str, str]) -> list[Difference]:
    """Where the values of a rank, from `shown`, are not those of rank 0. A value may be missing on one of them."""
    names = sorted({*own, *expected})
    both = [(name, own.get(name, _ABSENT), expected.get(name, _ABSENT)) for name in names]
    return [Difference(rank, of_host, *each) for each in both if each[1] != each[2]]


def problems_of(found: Sequence[Difference], host_of_0: str) -> list[Problem]:
    """A problem for each value that differs on a host, with all its ranks."""
    key = Difference._replace
    ordered = sorted(found, key=lambda each: (*key(each, rank=0), each.rank))
    problems = []
    for each, group in itertools.groupby(ordered, lambda each: key(each, rank=0)):
        ranks = [one.rank for one in group]
        names = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        place = names if each.host == host_of_0 else f"{names} on {each.host}"
        more = {"ranks": place, "host": host_of_0, "expected": each.expected}
        problems.append(problem("ranks-differ", each.name, each.value, **more))
    return problems


def _short(text: str) -> str:
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}... (digest {hashlib.sha256(text.encode()).hexdigest()[:8]})"

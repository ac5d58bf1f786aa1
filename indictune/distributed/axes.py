"""How many processes each axis of a run has: what the strategy file says, and what follows from the world size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from indictune.config.plan import Axes, Launch
from indictune.errors import UserError

OPEN = -1  # in a strategy file: as many processes as the other axes leave

# accelerate's launcher passes on `parallelism_config`. It has no pipeline. For stages the launcher has one vocabulary,
# `megatron_lm_config` (accelerate 1.15, `prepare_multi_gpu_env`). Megatron-LM itself is not used.
_HAS_MESH, _HAS_STAGES = "ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_USE_MEGATRON_LM"
_MOST_LISTED = 6

Sizes = dict[str, int]  # of each axis by its name, the innermost last


def read_axes(
    environ: Mapping[str, str], deepspeed: Mapping[str, Any], world_size: int, on_node: int, is_fsdp: bool
) -> Axes:
    """The axes that the strategy file asks for, on this number of processes.

    Args:
        environ: of this process.
        deepspeed: content of the DeepSpeed file; empty without one.
        world_size: processes over all nodes.
        on_node: processes on this node.
        is_fsdp: whether FSDP2 shards the whole model.

    Raises:
        UserError: a size is no number of processes, or `axes-do-not-multiply`, with the sizes that do.
    """
    is_sharded = is_fsdp or _shards_stages(environ)
    pipeline, tensor, context = _asked_of_model(environ, deepspeed)
    asked = {"pipeline": pipeline, "tensor": tensor, "context": context}
    if context == OPEN:  # within a node, where links are fast
        context = max(1, on_node // max(1, tensor))
    if tensor == OPEN:
        tensor = max(1, on_node // (context * max(1, pipeline)))
    if pipeline == OPEN:
        pipeline = max(1, world_size // (tensor * context))
    data = max(1, world_size // (pipeline * context * tensor))
    replicas, shards = _size(environ, "DP_REPLICATE"), _size(environ, "DP_SHARD")
    asked |= {"replicas": replicas, "shards": shards}
    if not is_sharded:  # copies of the model, however many sizes they are given in
        replicas, shards = 1, data if replicas * shards == 1 or OPEN in (replicas, shards) else replicas * shards
    elif replicas == OPEN:  # one on each node
        shards = shards if shards > 1 else max(1, on_node // (context * tensor))
        replicas = max(1, data // shards)
    elif shards in (1, OPEN):
        shards = max(1, data // replicas)
    sizes = {"pipeline": pipeline, "replicas": replicas, "shards": shards, "context": context, "tensor": tensor}
    if not _is_possible(sizes, world_size, is_sharded):
        used = {name: size for name, size in sizes.items() if name == "shards" or size != 1 or asked[name] != 1}
        _refuse(used, world_size, is_sharded)
    return Axes(pipeline, tensor, context, replicas, is_sharded)


def hand_over(axes: Axes, world_size: int, environ: MutableMapping[str, str]) -> None:
    """Give accelerate the sizes of the axes that it runs, FSDP2's, and hide the others."""
    environ.pop(_HAS_STAGES, None)
    if not is_true(environ, "ACCELERATE_USE_FSDP") or axes.tensor > 1:  # `model_split` makes that mesh
        environ.pop(_HAS_MESH, None)
    if is_true(environ, _HAS_MESH):
        # FSDP2 shards over the context axis too. With its size, accelerate (1.15) would run torch's ring attention.
        sizes = {"DP_REPLICATE": axes.replicas, "DP_SHARD": world_size // axes.replicas, "CP": 1, "TP": 1}
        environ.update({_variable(name): str(size) for name, size in sizes.items()})


def shown_axes(launch: Launch) -> str:
    """The axes of a run that splits more than the batch, such as `data 2 x tensor 4`; else empty."""
    axes = launch.axes
    sizes = {"pipeline": axes.pipeline, "replicas": axes.replicas, "context": axes.context, "tensor": axes.tensor}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    return _shown({"shards": launch.data_size // axes.replicas, **sizes}, axes.is_sharded) if sizes else ""


def splits_model(environ: Mapping[str, str]) -> bool:
    """Whether the file of accelerate asks for parts of a model."""
    return any(size != 1 for size in _asked_of_model(environ, {}))


def _asked_of_model(environ: Mapping[str, str], deepspeed: Mapping[str, Any]) -> tuple[int, int, int]:
    """Sizes of the axes that split one model: pipeline, tensor, context."""
    pipeline, tensor, context = 1, _size(environ, "TP"), _size(environ, "CP")
    if is_true(environ, _HAS_STAGES):
        pipeline = _checked("megatron_lm_pp_degree", environ.get("MEGATRON_LM_PP_DEGREE", "1"))
        tensor = _checked("megatron_lm_tp_degree", environ.get("MEGATRON_LM_TP_DEGREE", "1"))
    block = deepspeed.get("tensor_parallel")
    if isinstance(block, Mapping):
        given = block.get("autotp_size") or 1  # DeepSpeed's 0 is off
        tensor = _checked("tensor_parallel.autotp_size", given, least=1)
    return pipeline, tensor, context


def _is_possible(sizes: Sizes, world_size: int, is_sharded: bool) -> bool:
    has_shards = not is_sharded or sizes.get("shards", 1) * sizes.get("context", 1) > 1 or world_size == 1
    return math.prod(sizes.values()) == world_size and has_shards


def _refuse(asked: Sizes, world_size: int, is_sharded: bool) -> None:
    possible = sorted(_products(asked, world_size, is_sharded), key=lambda each: _distance(each, asked))
    listed = "; ".join(_shown(each, is_sharded) for each in possible[:_MOST_LISTED]) or "none"
    raise UserError(
        "axes-do-not-multiply", "--num_processes", world_size, asked=_shown(asked, is_sharded), possible=listed
    )


def _products(asked: Sizes, world_size: int, is_sharded: bool) -> Iterator[Sizes]:
    """Sizes of the same axes whose product is the world size."""
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for chosen in itertools.product(divisors, repeat=len(asked)):
        sizes = dict(zip(asked, chosen, strict=True))
        if _is_possible(sizes, world_size, is_sharded):
            yield sizes


def _distance(sizes: Sizes, asked: Sizes) -> float:
    """How far sizes are from those asked for. The number of shards follows from the others."""
    return sum(abs(math.log(size / max(1, asked[name]))) for name, size in sizes.items() if name != "shards")


def _shown(sizes: Sizes, is_sharded: bool) -> str:
    names = {} if is_sharded else {"shards": "data"}
    return " x ".join(f"{names.get(name, name)} {size}" for name, size in sizes.items())


def _shards_stages(environ: Mapping[str, str]) -> bool:
    """Whether FSDP2 runs inside pipeline stages."""
    return is_true(environ, _HAS_STAGES) and is_true(environ, "MEGATRON_LM_USE_CUSTOM_FSDP")


def _variable(name: str) -> str:
    return f"PARALLELISM_CONFIG_{name}_SIZE"


def _size(environ: Mapping[str, str], name: str) -> int:
    return _checked(f"parallelism_config_{name.lower()}_size", environ.get(_variable(name), "1"))


def _checked(key: str, given: object, least: int = OPEN) -> int:
    """A size of a strategy file: 1 or more, or -1 where that is allowed."""
    text = str(given)
    if not text.removeprefix("-").isdecimal() or int(text) == 0 or int(text) < least:
        raise UserError("strategy-file-not-supported", value=f"{key}: {text}")
    return int(text)


def is_true(environ: Mapping[str, str], name: str) -> bool:
    """Whether a launcher has set a variable to one of accelerate's words for true."""
    return environ.get(name, "false").lower() in ("1", "true", "yes")

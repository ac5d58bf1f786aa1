"""What the launcher asks for, read from its environment variables: the strategy, the processes and the axes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from indictune.config.plan import Axes, Launch
from indictune.credentials import holds_token
from indictune.distributed import zero
from indictune.distributed.fsdp import unsupported_fsdp_keys
from indictune.errors import UserError

OPEN = -1  # in a strategy file: as many processes as the other axes leave

# accelerate's launcher passes on `parallelism_config`. Stages have only `megatron_lm_config`: pipeline.yaml says why.
_HAS_MESH, _HAS_STAGES = "ACCELERATE_USE_PARALLELISM_CONFIG", "ACCELERATE_USE_MEGATRON_LM"
_MOST_LISTED = 6

Sizes = dict[str, int]  # of each axis by its name, the innermost last


def read_axes(
    environ: Mapping[str, str], deepspeed: Mapping[str, Any], world_size: int, on_node: int, is_fsdp: bool
) -> Axes:
    """The axes that the strategy file and the DeepSpeed file ask for, on so many processes, and so many on this node.

    Raises:
        UserError: a size is no number of processes, or `axes-do-not-multiply`, with the sizes that do.
    """
    is_sharded = is_fsdp or (is_true(environ, _HAS_STAGES) and is_true(environ, "MEGATRON_LM_USE_CUSTOM_FSDP"))
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
    if not is_true(environ, "ACCELERATE_USE_FSDP") or axes.tensor > 1:  # `Parallelism` makes that mesh
        environ.pop(_HAS_MESH, None)
    if is_true(environ, _HAS_MESH):
        # FSDP2 shards over the context axis too. With its size, accelerate (1.15) would run torch's ring attention.
        sizes = {"DP_REPLICATE": axes.replicas, "DP_SHARD": world_size // axes.replicas, "CP": 1, "TP": 1}
        environ.update({f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()})


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
    """Refuse sizes, and name those of the same axes whose product is the world size, the nearest ones first."""
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    chosen = itertools.product(divisors, repeat=len(asked))
    products = (dict(zip(asked, sizes, strict=True)) for sizes in chosen)
    possible = [sizes for sizes in products if _is_possible(sizes, world_size, is_sharded)]
    free = asked.keys() - {"shards"}  # their number follows from the others
    possible.sort(key=lambda sizes: sum(abs(math.log(sizes[name] / max(1, asked[name]))) for name in free))
    listed = "; ".join(_shown(each, is_sharded) for each in possible[:_MOST_LISTED]) or "none"
    details = {"asked": _shown(asked, is_sharded), "possible": listed}
    raise UserError("axes-do-not-multiply", "--num_processes", world_size, **details)


def _shown(sizes: Sizes, is_sharded: bool) -> str:
    names = {} if is_sharded else {"shards": "data"}
    return " x ".join(f"{names.get(name, name)} {size}" for name, size in sizes.items())


def _size(environ: Mapping[str, str], name: str) -> int:
    return _checked(f"parallelism_config_{name.lower()}_size", environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1"))


def _checked(key: str, given: object, least: int = OPEN) -> int:
    """A size of a strategy file: 1 or more, or -1 where that is allowed."""
    text = str(given)
    if not text.removeprefix("-").isdecimal() or int(text) == 0 or int(text) < least:
        raise UserError("strategy-file-not-supported", value=f"{key}: {text}")
    return int(text)


def is_true(environ: Mapping[str, str], name: str) -> bool:
    """Whether a launcher has set a variable to one of accelerate's words for true."""
    return environ.get(name, "false").lower() in ("1", "true", "yes")


_ENGINES = {
    **dict.fromkeys(("3d", "ddp_tp"), "tp"),
    **dict.fromkeys(("hsdp", "fsdp2_tp", "fsdp2_cp"), "fsdp2"),
    "zero1_tp": "zero1",
    "zero2_tp": "zero2",
    "pipeline": "ddp",  # plain process groups, as accelerate sees it
}


def engine_of(strategy: str) -> str:
    """The name of a strategy without offloading, and without the axes that its engine or this package adds."""
    name = strategy.removesuffix("_offload")
    return _ENGINES.get(name, name)


def rank_of(environ: Mapping[str, str]) -> int:
    """This process's rank; 0 without a launcher."""
    return int(environ.get("RANK", "0"))


def world_size_of(environ: Mapping[str, str]) -> int:
    """Processes over all nodes; 1 without a launcher."""
    return int(environ.get("WORLD_SIZE", "1"))


def local_world_size_of(environ: Mapping[str, str]) -> int:
    """Processes on this node; `world_size_of` if the launcher does not count them."""
    # torchrun and accelerate set LOCAL_WORLD_SIZE, the deepspeed launcher LOCAL_SIZE.
    return int(environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or world_size_of(environ))


def is_one_node(environ: Mapping[str, str]) -> bool:
    """Whether all processes run on this node."""
    return local_world_size_of(environ) == world_size_of(environ)


def read_launch(environ: Mapping[str, str], deepspeed: str | None = None, fsdp: str | None = None) -> Launch:
    """What the launcher and the flags ask for. `--deepspeed` is the path of a DeepSpeed file or its text (`{...}`).

    Raises:
        UserError: the launcher contradicts the flags or cannot start the strategy, or the DeepSpeed file is invalid.
    """
    source = _deepspeed_source(environ, deepspeed)
    config = None if source is None else read_deepspeed(source)
    if config is None and is_true(environ, "ACCELERATE_USE_DEEPSPEED"):
        config = _deepspeed_of_accelerate(environ)
    world_size, on_node = world_size_of(environ), local_world_size_of(environ)
    is_fsdp = is_true(environ, "ACCELERATE_USE_FSDP") or bool(fsdp)
    axes = read_axes(environ, config or {}, world_size, on_node, is_fsdp)
    if config is not None and (zero := _zero_name(config)):
        strategy = zero + ("_tp" if axes.tensor > 1 else "")
    elif is_fsdp:
        strategy = _fsdp_name(axes, is_true(environ, "FSDP_OFFLOAD_PARAMS"))
    elif axes.pipeline > 1:
        strategy = "pipeline" if axes.tensor == 1 else "3d"
    elif axes.tensor > 1:
        strategy = "tp" if axes.tensor == world_size else "ddp_tp"
    else:
        strategy = "ddp" if "LOCAL_RANK" in environ else "single"
    _check_launcher(environ, strategy, config, axes)
    sizes = world_size, on_node, rank_of(environ)
    return Launch(strategy, *sizes, deepspeed=config, deepspeed_source=source, axes=axes)


def starts_one_of_several(environ: Mapping[str, str]) -> bool:
    """Whether accelerate's plain launcher (`distributed_type: NO`, `--cpu`) was asked for several processes.

    It starts one for any number. The only trace of the number is an address for a group that nobody else joins.
    TRL's `single_gpu.yaml` has 8.
    """
    return "WORLD_SIZE" not in environ and {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= environ.keys()


def for_evaluation(launch: Launch, environ: MutableMapping[str, str]) -> Launch:
    """The launch of an evaluation: DDP instead of ZeRO-1 and ZeRO-2, which shard only what training needs.

    DeepSpeed refuses to evaluate with them ("ZeRO inference only makes sense with ZeRO Stage 3").
    """
    if engine_of(launch.strategy) not in ("zero1", "zero2"):
        return launch
    environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    return replace(launch, strategy="ddp", deepspeed=None, deepspeed_source=None, axes=Axes())


def read_deepspeed(source: str) -> dict[str, Any]:
    """The DeepSpeed configuration in a JSON file, or in JSON text.

    Raises:
        UserError: it cannot be read, or is no JSON object, or holds a token, which checkpoints would repeat.
    """
    try:
        text = source if source.lstrip().startswith("{") else Path(source).read_text(encoding="utf-8")
        config = json.loads(text)
    except OSError as error:
        raise UserError("unreadable", "--deepspeed", source, reason=error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise UserError("invalid-json", "--deepspeed", source, reason=error) from error
    if not isinstance(config, dict):
        reason = f"expected an object, found {type(config).__name__}"
        raise UserError("invalid-json", "--deepspeed", source, reason=reason)
    if holds_token(json.dumps(config, ensure_ascii=False)):
        raise UserError("token-in-the-open", "--deepspeed")
    return config


def _deepspeed_source(environ: Mapping[str, str], flag: str | None) -> str | None:
    """`--deepspeed`, or the file that an accelerate config names."""
    named = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") if is_true(environ, "ACCELERATE_USE_DEEPSPEED") else None
    other = "FSDP" if is_true(environ, "ACCELERATE_USE_FSDP") else named
    if flag is not None and other not in (None, flag):
        raise UserError("launcher-contradicts-flag", "--deepspeed", flag, other=other)
    return named if flag is None else flag


def _deepspeed_of_accelerate(environ: Mapping[str, str]) -> dict[str, Any]:
    """What `deepspeed_config` of an accelerate config says, in the words of a DeepSpeed file."""
    zero: dict[str, Any] = {"stage": int(environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))}
    for name in ("offload_optimizer", "offload_param"):
        zero[name] = {"device": environ.get(f"ACCELERATE_DEEPSPEED_{name.upper()}_DEVICE", "none")}
    steps = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    norm = environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    return {
        "zero_optimization": zero,
        "gradient_accumulation_steps": steps if steps == "auto" else int(steps),
        "gradient_clipping": norm if norm == "auto" else float(norm),
    }


def _check_launcher(
    environ: Mapping[str, str], strategy: str, deepspeed: Mapping[str, Any] | None, axes: Axes
) -> None:
    world_size, is_launched = world_size_of(environ), "LOCAL_RANK" in environ
    if starts_one_of_several(environ) and is_true(environ, "ACCELERATE_USE_CPU"):
        raise UserError("one-process-started", "--num_processes")
    if world_size > 1 and not (environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE")):
        raise UserError("local-world-size-missing", "LOCAL_WORLD_SIZE", world_size)
    if strategy not in ("single", "ddp") and not is_launched:
        raise UserError("launcher-missing", value=strategy)
    keys = unsupported_fsdp_keys(environ)
    keys += [] if deepspeed is None else zero.unsupported_deepspeed_keys(deepspeed)
    if axes.context > 1 and not strategy.startswith("fsdp2_cp"):
        keys.append(f"parallelism_config_cp_size: {axes.context} with {strategy}")
    if axes.pipeline > 1 and axes.is_sharded and axes.tensor > 1:
        keys.append(f"megatron_lm_use_custom_fsdp: true with megatron_lm_tp_degree: {axes.tensor}")
    if axes.pipeline > 1 and strategy not in ("pipeline", "3d"):
        keys.append(f"{strategy} inside megatron_lm_pp_degree: {axes.pipeline}")
    if keys:
        raise UserError("strategy-file-not-supported", value=", ".join(keys))


def _fsdp_name(axes: Axes, offloads: bool) -> str:
    if axes.tensor > 1:
        name = "fsdp2_tp"
    elif axes.context > 1:
        name = "fsdp2_cp"
    else:
        name = "hsdp" if axes.replicas > 1 else "fsdp2"
    return name + "_offload" * offloads


def _zero_name(config: Mapping[str, Any]) -> str | None:
    """`zero<stage>`, with `_offload` if optimizer states or parameters live on the CPU; None if nothing is sharded."""
    zero = config.get("zero_optimization") or {}
    if not zero.get("stage"):
        return None
    offloads = [(zero.get(name) or {}).get("device", "none") for name in ("offload_optimizer", "offload_param")]
    return f"zero{zero['stage']}" + ("_offload" if any(device != "none" for device in offloads) else "")

"""What the launcher asks for, read from its environment variables before anything starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from indictune.config.plan import Axes, Launch
from indictune.credentials import holds_token
from indictune.distributed import deepspeed_config, fsdp_file
from indictune.distributed.axes import is_true, read_axes
from indictune.errors import UserError

_ENGINES = {
    "3d": "tp",
    "ddp_tp": "tp",
    "hsdp": "fsdp2",
    "fsdp2_tp": "fsdp2",
    "fsdp2_cp": "fsdp2",
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
    """What the launcher and the flags ask for.

    Args:
        environ: of this process.
        deepspeed: `--deepspeed`, the path of a DeepSpeed file or its text (`{...}`).
        fsdp: `--fsdp`.

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
    _check_launcher(environ, strategy, config or {}, axes)
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
    except ValueError as error:
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


def _check_launcher(environ: Mapping[str, str], strategy: str, deepspeed: Mapping[str, Any], axes: Axes) -> None:
    """Refuse a launch that would train something else than was asked for."""
    world_size, is_launched = world_size_of(environ), "LOCAL_RANK" in environ
    if starts_one_of_several(environ) and is_true(environ, "ACCELERATE_USE_CPU"):
        raise UserError("one-process-started", "--num_processes")
    if world_size > 1 and not (environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE")):
        raise UserError("local-world-size-missing", "LOCAL_WORLD_SIZE", world_size)
    if strategy not in ("single", "ddp") and not is_launched:
        raise UserError("launcher-missing", value=strategy)
    keys = [*fsdp_file.unsupported_fsdp_keys(environ), *deepspeed_config.unsupported_deepspeed_keys(deepspeed)]
    if axes.context > 1 and not strategy.startswith("fsdp2_cp"):
        keys.append(f"parallelism_config_cp_size: {axes.context} with {strategy}")
    if keys := keys + (_not_with_stages(axes, strategy) if axes.pipeline > 1 else []):
        raise UserError("strategy-file-not-supported", value=", ".join(keys))


def _not_with_stages(axes: Axes, strategy: str) -> list[str]:
    """What a strategy file asks for that stages of a pipeline cannot have."""
    asked = {
        f"megatron_lm_use_custom_fsdp: true with megatron_lm_tp_degree: {axes.tensor}": axes.is_sharded
        and axes.tensor > 1,
        f"{strategy} inside megatron_lm_pp_degree: {axes.pipeline}": strategy not in ("pipeline", "3d"),
    }
    return [key for key, is_asked in asked.items() if is_asked]


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

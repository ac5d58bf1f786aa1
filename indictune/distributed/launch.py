"""What the launcher asked for, read from its environment variables before anything starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from indictune.config.plan import Launch
from indictune.credentials import WAY_OUT, holds_token
from indictune.errors import UserError


def rank_of(environ: Mapping[str, str]) -> int:
    """This process's rank as the launcher numbers it; 0 without a launcher."""
    return int(environ.get("RANK", "0"))


def world_size_of(environ: Mapping[str, str]) -> int:
    """Processes over all nodes, as the launcher counts them; 1 without a launcher."""
    return int(environ.get("WORLD_SIZE", "1"))


def local_world_size_of(environ: Mapping[str, str]) -> int:
    """Processes on this node; all of them where the launcher does not count them, which `read_launch` refuses."""
    # torchrun and accelerate say LOCAL_WORLD_SIZE, the deepspeed launcher LOCAL_SIZE.
    return int(environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or world_size_of(environ))


def starts_all_here(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started all ranks on this node, and so at once: by hand, one may come minutes later."""
    is_launched = environ.keys() & {"TORCHELASTIC_RUN_ID", "CROSS_RANK"}  # torchrun's and accelerate's, deepspeed's
    return bool(is_launched) and local_world_size_of(environ) == world_size_of(environ)


def deepspeed_file(environ: Mapping[str, str], flag: str | None) -> str | None:
    """The DeepSpeed file: `--deepspeed`, or the one that an accelerate config names. Both end in the same place.

    Raises:
        UserError: both are there and say different things.
    """
    named = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") if _is_true(environ, "ACCELERATE_USE_DEEPSPEED") else None
    if flag is not None and named not in (None, flag):
        raise UserError(f"--deepspeed {flag}: the accelerate config names {named}. Leave one of them out.")
    if flag is not None and _is_true(environ, "ACCELERATE_USE_FSDP"):
        raise UserError(f"--deepspeed {flag}: the accelerate config asks for FSDP. Leave one of them out.")
    return named if flag is None else flag


def for_evaluation(launch: Launch, environ: MutableMapping[str, str]) -> Launch:
    """What evaluation runs under. ZeRO-1 and ZeRO-2 split only what training needs, and DeepSpeed refuses to evaluate
    with them ("ZeRO inference only makes sense with ZeRO Stage 3"): their ranks evaluate side by side, as DDP's do."""
    if launch.family not in ("zero0", "zero1", "zero2"):
        return launch
    environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    return replace(launch, strategy="ddp", deepspeed=None, deepspeed_source=None)


def read_launch(environ: Mapping[str, str], deepspeed: str | None = None, fsdp: str | None = None) -> Launch:
    """Read what was asked for.

    Args:
        environ: the process's environment.
        deepspeed: path of the DeepSpeed JSON, or its text (`{...}`).
        fsdp: the Trainer's own `--fsdp`.

    Raises:
        UserError: the DeepSpeed file cannot be read, the launcher was asked for several processes and has started
            one, or it does not tell how many there are on this node: those share the work on a disk; or plain python
            was asked for what needs a launcher.
    """
    world_size = world_size_of(environ)
    _check_fsdp(environ)
    config = None if deepspeed is None else read_deepspeed(deepspeed)
    # accelerate's plain launcher (`distributed_type: NO`, `--cpu`) starts one process whatever --num_processes says.
    # The only trace of the number is an address for a group that nobody else joins.
    if "WORLD_SIZE" not in environ and "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_ADDR" in environ:
        raise UserError(
            "accelerate launch was asked for more than one process and has started one: the config file has "
            "`distributed_type: NO`, or --cpu was given. Use accelerate_configs/ddp.yaml (it also runs on a CPU), or "
            "--num_processes 1."
        )
    if world_size > 1 and not (environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE")):
        raise UserError(
            f"WORLD_SIZE is {world_size}, and LOCAL_WORLD_SIZE, the number of processes on this node, is not set. "
            "Start the script by torchrun (scripts/slurm/train.sbatch does), or export LOCAL_WORLD_SIZE beside RANK, "
            "LOCAL_RANK and WORLD_SIZE."
        )
    if config is not None:
        strategy = _zero_name(config)
    elif _is_true(environ, "ACCELERATE_USE_DEEPSPEED"):
        strategy = f"zero{environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', '2')}"
    elif _is_true(environ, "ACCELERATE_USE_FSDP") or fsdp:
        strategy = "fsdp2_offload" if _is_true(environ, "FSDP_OFFLOAD_PARAMS") else "fsdp2"
    else:
        strategy = "ddp" if "LOCAL_RANK" in environ else "single"
    if strategy.startswith("zero") and "LOCAL_RANK" not in environ:
        raise UserError(
            f"--deepspeed {deepspeed}: plain python cannot start DeepSpeed. Start the script with "
            "`deepspeed --num_gpus 1`, `torchrun --nproc_per_node 1` or `accelerate launch`."
        )
    if strategy.startswith("fsdp") and "LOCAL_RANK" not in environ:
        raise UserError(
            f"{f'--fsdp {fsdp}' if fsdp else 'ACCELERATE_USE_FSDP'}: plain python cannot start FSDP. Start the script "
            "with `torchrun --nproc_per_node 1` or `accelerate launch --config_file accelerate_configs/fsdp2.yaml`, "
            "or leave it out."
        )
    return Launch(
        strategy,
        world_size,
        local_world_size=local_world_size_of(environ),
        rank=rank_of(environ),
        deepspeed={} if config is None and strategy.startswith("zero") else config,
        deepspeed_source=deepspeed,
    )


def _check_fsdp(environ: Mapping[str, str]) -> None:
    """Refuse FSDP 1, which would be trained under the name of FSDP2; without a launcher there is none."""
    is_asked = _is_true(environ, "ACCELERATE_USE_FSDP") and "LOCAL_RANK" in environ
    if is_asked and environ.get("FSDP_VERSION", "1") == "1":
        raise UserError(
            "accelerate was asked for FSDP 1, which it takes where its file does not say. Write `fsdp_version: 2` "
            "below `fsdp_config`, as in accelerate_configs/fsdp2.yaml."
        )


def read_deepspeed(source: str) -> dict[str, Any]:
    """The DeepSpeed configuration in a JSON file, or in JSON text.

    Raises:
        UserError: there is no such file, or it is not a JSON object, or it holds a token: it would stand in
            `training_args.bin` and in DeepSpeed's checkpoints.
    """
    try:
        text = source if source.lstrip().startswith("{") else Path(source).read_text(encoding="utf-8")
        config = json.loads(text)
    except OSError as error:
        raise UserError(
            f"--deepspeed {source}: cannot be read ({error.strerror}). The path counts from the folder in which the "
            "command is typed."
        ) from error
    except ValueError as error:
        raise UserError(f"--deepspeed {source}: is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise UserError(f"--deepspeed {source}: expected a JSON object, found {type(config).__name__}.")
    if holds_token(json.dumps(config, ensure_ascii=False)):
        raise UserError(f"--deepspeed {'(a token)' if holds_token(source) else source}: {WAY_OUT}")
    return config


def _zero_name(config: Mapping[str, Any]) -> str:
    """`zero<stage>`, with `_offload` where optimizer states or parameters live on the CPU."""
    zero = config.get("zero_optimization") or {}
    offloads = [(zero.get(name) or {}).get("device", "none") for name in ("offload_optimizer", "offload_param")]
    return f"zero{zero.get('stage', 0)}" + ("_offload" if any(device != "none" for device in offloads) else "")


def _is_true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "false").lower() in ("1", "true", "yes")

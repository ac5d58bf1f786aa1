"""FSDP2: what a file for FSDP says, which layers it wraps, and a split model that it shards."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from accelerate.utils.constants import FSDP_SHARDING_STRATEGY
from torch import nn

if TYPE_CHECKING:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.device_mesh import DeviceMesh

EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
# What FSDP 1 calls a strategy -> whether FSDP2 frees a layer's gathered weights after its forward pass. The others
# keep copies of the weights.
_RESHARDS = {"FULL_SHARD": "true", "SHARD_GRAD_OP": "false"}


def repeated_blocks(model: nn.Module) -> list[str]:
    """Class names of the layers that a model repeats, the members of its outermost module lists. FSDP wraps them.

    transformers' `_no_split_modules` also names BERT's embeddings, which accelerate would shard twice ("Expects tensor
    to be unsharded", or a None invariant at the first step).

    Raises:
        ValueError: the model has no list of layers.
    """
    lists = {name: each for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each) > 0}
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of repeated layers to shard.")
    outermost = [lists[name] for name in lists if not any(name.startswith(f"{outer}.") for outer in lists)]
    return sorted({type(block).__name__ for blocks in outermost for block in blocks})


def has_shared_bias(model: nn.Module) -> bool:
    """Whether two modules hold one bias, as the heads of BERT, RoBERTa and ALBERT that guess words do.

    accelerate (1.15) shards the output layer as a group of its own. torch (2.13) refuses a weight of two groups.
    """
    biases = [id(each) for name, each in model.named_parameters(remove_duplicate=False) if name.endswith("bias")]
    return len(biases) > len({*biases})


def shard_blocks(model: nn.Module, mesh: DeviceMesh | None, plugin: FullyShardedDataParallelPlugin) -> None:
    """Shard a model by FSDP2 over the data axis, or over replicas x shards, as accelerate would; None: all ranks.

    accelerate (1.15, `_prepare_tp`) would wrap all other weights of a split model as DTensors by a class that
    transformers 5.23 lacks. It leaves a model alone that is sharded already.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # slow

    if isinstance(model, FSDPModule):
        return
    settings: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": plugin.cpu_offload,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
    }
    blocks = set(repeated_blocks(model))
    for module in reversed(list(model.modules())):  # inner ones first
        if type(module).__name__ in blocks:
            fully_shard(module, reshard_after_forward=plugin.reshard_after_forward, **settings)
    fully_shard(model, **settings)
    plugin.transformer_cls_names_to_wrap = [f"FSDP{name}" for name in blocks]  # accelerate looks for them


def is_fsdp_1(environ: Mapping[str, str]) -> bool:
    """Whether an accelerate config asks for FSDP 1, which is its default."""
    return environ.get("ACCELERATE_USE_FSDP") == "true" and environ.get("FSDP_VERSION", "1") == "1"


def unsupported_fsdp_keys(environ: Mapping[str, str]) -> list[str]:
    """`key: value` of each setting that FSDP2 does not have, or that splits rows in other ways than a run here."""
    found = []
    if is_fsdp_1(environ) and (asked := _sharding(environ)) not in _RESHARDS:
        found.append(f"fsdp_sharding_strategy: {asked}")
    if environ.get("ACCELERATE_USE_FSDP") == "true":
        if ignored := environ.get("FSDP_IGNORED_MODULES"):
            found.append(f"fsdp_ignored_modules: {ignored}")
        if environ.get("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD") == "true":
            found.append("fsdp_activation_checkpointing_offload: true")
    if (size := environ.get("PARALLELISM_CONFIG_SP_SIZE", "1")) != "1":
        found.append(f"parallelism_config_sp_size: {size}")
    return found


def note_of_fsdp_1(environ: Mapping[str, str]) -> str:
    """What the user has to know of a config for FSDP 1."""
    asked = _sharding(environ)
    return f"The strategy file is for FSDP 1. FSDP2 runs it: {asked} is reshard_after_forward {_RESHARDS[asked]}."


def use_fsdp_2(environ: MutableMapping[str, str]) -> None:
    """Make accelerate run FSDP2. `sharding.fit_to_model` gives it the layers to shard, of `repeated_blocks`.

    FSDP2 prefetches, broadcasts weights and keeps the original parameters by itself. Checkpoints are always in shards.
    """
    if environ.get("ACCELERATE_USE_FSDP") != "true":
        return
    if is_fsdp_1(environ):
        environ["FSDP_RESHARD_AFTER_FORWARD"] = _RESHARDS[_sharding(environ)]
        environ["FSDP_VERSION"] = "2"
    environ["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"
    environ["FSDP_STATE_DICT_TYPE"] = "SHARDED_STATE_DICT"
    environ["FSDP_ACTIVATION_CHECKPOINTING"] = "false"  # --gradient_checkpointing says it


def _sharding(environ: Mapping[str, str]) -> str:
    """The strategy of FSDP 1, by its name.

    A newer config names it as `fsdp_reshard_after_forward`, where accelerate (1.15) puts "true" if it has none.
    """
    newer = environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").upper()
    asked = newer if newer in FSDP_SHARDING_STRATEGY else environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
    return FSDP_SHARDING_STRATEGY[int(asked) - 1] if asked.isdigit() else asked

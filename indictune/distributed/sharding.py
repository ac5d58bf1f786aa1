"""Shard a model of any architecture, check that the strategy asked for came up, and read sharded parameters."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.state import DistributedType
from accelerate.utils import parse_flag_from_env
from accelerate.utils.constants import FSDP_MODEL_NAME
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter
from transformers import PreTrainedModel, TrainingArguments
from transformers.dynamic_module_utils import custom_object_save
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from indictune.config.plan import Launch
from indictune.distributed import collectives, fsdp, upstream
from indictune.distributed.launch import engine_of
from indictune.distributed.upstream import divide_and_copy, use_first_gpu
from indictune.errors import UserError
from indictune.run import OWN_PROGRESS
from indictune.upstream import set_weight_conversions, weight_conversions

if TYPE_CHECKING:
    from transformers import Trainer  # slow to import

WEIGHT_SHARDS = f"{FSDP_MODEL_NAME}_0"  # the folder in a checkpoint


def check_strategy_started(launch: Launch, training_args: TrainingArguments) -> None:
    """Compare what the launcher asked for with what came up, before the model loads.

    Raises:
        UserError: another strategy, or another number of processes, came up.
    """
    family, asked = started_strategy(training_args), engine_of(launch.strategy)
    if family != ("ddp" if asked == "tp" else asked):  # accelerate knows no matrices that are split without FSDP2
        raise UserError("another-strategy-came-up", value=asked, came_up=family)
    if training_args.world_size != launch.world_size:
        raise UserError("processes-do-not-meet", value=launch.world_size, came_up=training_args.world_size)


def use_one_gpu(training_args: TrainingArguments, device_map: str | None) -> list[str]:
    """Keep one process on one GPU. Return a sentence if others stay unused.

    DataParallel averages losses over parts of a batch, and is slower than one process a GPU. `device_map` may spread
    the layers over all GPUs.
    """
    if training_args.n_gpu <= 1:
        return []
    unused = training_args.n_gpu - 1
    use_first_gpu(training_args)
    if device_map is not None:
        return []
    return [f"One process uses one GPU; {unused} more stay unused. accelerate_configs/ddp.yaml uses them all."]


def started_strategy(training_args: TrainingArguments) -> str:
    """The family of the strategy that came up: `single`, `ddp`, `fsdp2` or `zero<stage>`."""
    kind = training_args.distributed_state.distributed_type
    if training_args.deepspeed_plugin is not None:
        # A stage without a process group is one process that does not know the others.
        grouped = kind == DistributedType.DEEPSPEED and torch.distributed.is_initialized()
        return f"zero{training_args.deepspeed_plugin.zero_stage}" if grouped else "single"
    if kind == DistributedType.NO:
        return "single"
    asked_fsdp = training_args.fsdp_plugin_args is not None or parse_flag_from_env("ACCELERATE_USE_FSDP")
    return "fsdp2" if asked_fsdp and kind != DistributedType.MULTI_CPU else "ddp"


def fit_to_model(model: nn.Module, args: TrainingArguments) -> None:
    """Set the environment variables by which accelerate shards this architecture. Call it before the Trainer exists.

    FSDP2 needs a model that is compiled block by block (accelerate 1.15, `compile_regions_fsdp2`). If it is compiled
    as a whole, the hooks that gather and free its layers never run, and nothing is compiled (torch 2.13).
    """
    os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(fsdp.repeated_blocks(model))
    if started_strategy(args) == "fsdp2":
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            _forget_unused_renamings(module)


def _forget_unused_renamings(model: PreTrainedModel) -> None:
    """Save LayerNorms as `weight` and `bias`, as every other strategy does.

    transformers renames TensorFlow's `LayerNorm.gamma` and `LayerNorm.beta` when it loads a checkpoint that has them,
    and back when it saves. Its ZeRO-3 loader (5.23, `integrations/deepspeed.py`) records the renaming for every
    checkpoint, and saved models would get names that other programs do not know.
    """
    if recorded := weight_conversions(model):
        tensorflow = {"LayerNorm.gamma", "LayerNorm.beta"}
        set_weight_conversions(model, [each for each in recorded if not tensorflow & set(each.source_patterns)])


def architecture_of(model: nn.Module) -> str:
    """The name of a model's class in `config.json`. FSDP2 makes a subclass with a prefix."""
    return type(model).__name__.removeprefix("FSDP")


def save_code(model: nn.Module, folder: str | Path) -> None:
    """Write the custom code of a model sharded by FSDP2 into an existing folder, and name its class in its config.

    transformers 5.23 would write torch's files, which define FSDP2's subclass of the model's class. The Trainer writes
    the code of any other model.
    """
    found = upstream.class_with_code(model)
    if found is None or found[0] is type(model):
        return
    own, auto_class = found
    upstream.save_no_code(model)
    custom_object_save(own, folder)
    plain = cast(PreTrainedModel, model)
    module = own.__module__.rpartition(".")[2]
    plain.config.auto_map = {**plain.config.auto_map, auto_class: f"{module}.{own.__name__}"}


def without_tied_copies(model: nn.Module | None, state: dict[str, Any] | None) -> dict[str, Any] | None:
    """Complete weights by name, without copies of tied ones.

    FSDP2 gathers a weight of two names into two tensors. transformers (5.23, `remove_tied_weights_from_state_dict`)
    drops a second name only if both share memory.
    """
    if not state or not isinstance(model, PreTrainedModel):
        return state
    copies = {
        name
        for name, origin in model.all_tied_weights_keys.items()
        if name in state and origin in state and torch.equal(state[name], state[origin])
    }
    return {name: weight for name, weight in state.items() if name not in copies}


def save_gathered(trainer: Trainer, folder: Path) -> None:
    """Gather the weights of a model that FSDP2 shards, and save them. All ranks must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict  # slow

    model = cast(nn.Module, trainer.model)
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    upstream.save_whole(trainer, folder, without_tied_copies(model, weights))


def unwrapped(trainer: Trainer) -> nn.Module:
    """The model in training, without the wrappers of a strategy or the compiler."""
    model: nn.Module = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return model


def has_own_optimizer(trainer: Trainer) -> bool:
    """Whether torch's optimizer holds its states by parameter. DeepSpeed's engine splits them over the ranks."""
    return bool(trainer.accelerator.distributed_type != DistributedType.DEEPSPEED)


def full_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter before sharding."""
    # A DTensor has the full shape. ZeRO-3 leaves an empty tensor with the shape in an attribute.
    return {name: tuple(vars(each).get("ds_shape", each.shape)) for name, each in model.named_parameters()}


def is_split(model: nn.Module) -> bool:
    """Whether a rank has only parts of some parameters, as DTensors."""
    return any(isinstance(each, DTensor) for each in model.parameters())


def whole_bytes(model: nn.Module) -> int:
    """Size of the trained parameters before sharding."""
    shapes = full_shapes(model)
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    return sum(math.prod(shapes[name]) * each.element_size() for name, each in trained)


def local_part(tensor: Tensor) -> Tensor:
    """The part of a parameter, or of its gradient or state, on this rank; what nothing splits as it is."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    known = vars(tensor)
    if "ds_tensor" not in known:
        return tensor
    # ZeRO-3's parts have equal sizes. The last ones end in uninitialised memory, which may be NaN (DeepSpeed 0.19,
    # `_partition_param`).
    part: Tensor = known["ds_tensor"]
    own = known["ds_numel"] - known["ds_zero_partition_rank"] * part.numel()
    return part[: max(0, own)]


def whole_tensor(tensor: Tensor) -> Tensor:
    """A tensor of which each rank may have a part, as a whole. All ranks that have a part must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_norms(trainer: Trainer) -> dict[str, float]:
    """The Euclidean norm of each trained parameter of all ranks before sharding. All ranks must call it."""
    trained = {name: each for name, each in unwrapped(trainer).named_parameters() if each.requires_grad}
    if trainer.accelerator.distributed_type == DistributedType.DEEPSPEED:
        # ZeRO-3 prefetches parameters for the next step, and then cannot gather them ("Cannot partition a param in
        # flight", DeepSpeed 0.19.8, after a resumed run).
        engine: Any = trainer.model_wrapped
        engine.empty_partition_cache()
        if engine.autotp_size() > 1:  # it gathers matrices on the first rank, as for saving
            weights: dict[str, Tensor] = trainer.accelerator.get_state_dict(engine) or {}
            norms = {name: float(weights[name].detach().double().norm()) for name in trained if name in weights}
            return collectives.gather_from_all(norms)[0]
    norms = {}
    for name, each in trained.items():
        with whole_parameter(each):
            norms[name] = float(whole_tensor(each).detach().double().norm())
    return {name: norm for part in collectives.gather_from_all(norms) for name, norm in part.items()}


@contextmanager
def whole_parameter(parameter: Tensor) -> Iterator[None]:
    """A block in which a parameter that ZeRO-3 sharded can be read in full. All ranks must enter it."""
    if "ds_shape" in vars(parameter):
        import deepspeed  # slow

        with deepspeed.zero.GatheredParameters([parameter]):
            yield
    else:
        yield


@contextmanager
def reading_weights(args: TrainingArguments, are_sent: bool) -> Iterator[bool]:
    """A block that reads a model's weights. It yields whether this rank must read them. All ranks must enter it.

    `are_sent` says that rank 0 sends each rank its part. With `fsdp_cpu_ram_efficient_loading`, accelerate sends rank
    0's weights to all ranks when it shards the model.
    """
    OWN_PROGRESS.passed("reading the weights")
    with _hidden_from_transformers() as is_efficient:
        yield not (is_efficient or are_sent) or args.process_index == 0
    OWN_PROGRESS.passed("making the trainer")


@contextmanager
def _hidden_from_transformers() -> Iterator[bool]:
    """Hide `fsdp_cpu_ram_efficient_loading` from transformers in the block, and yield whether it is on.

    With it, transformers (5.23) still reads all weights on every rank. Weights that the checkpoint lacks get data on
    one rank only ("KeyError" when such an optimizer is saved).
    """
    before = os.environ.pop(fsdp.EFFICIENT, None)
    try:
        yield before == "true"
    finally:
        if before is not None:
            os.environ[fsdp.EFFICIENT] = before


@contextmanager
def whole_models() -> Iterator[None]:
    """A block in which transformers builds models whole, though ZeRO-3 would shard them.

    On the device `meta` it could not ("Cannot copy out of meta tensor", transformers 5.23).
    """
    config = upstream.current_deepspeed_config()
    unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if config is not None:
            set_hf_deepspeed_config(config)  # type: ignore[no-untyped-call]


@contextmanager
def loading_alone() -> Iterator[None]:
    """A block in which one rank loads a model without sharding it and without the other ranks."""
    with whole_models(), _hidden_from_transformers():
        yield


def prepare_for_evaluation(trainer: Trainer) -> None:
    """Shard a model that is only evaluated.

    accelerate 1.15 shards a model for FSDP2 only with an optimizer, and `Trainer.evaluate` has none ("a model and
    optimizer must be passed together"). So it gets an optimizer without states, which never steps.
    """
    accelerator, model = trainer.accelerator, trainer.model
    if accelerator.distributed_type == DistributedType.FSDP and model is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        trainer.model = trainer.model_wrapped = accelerator.prepare(model, optimizer)[0]


def weights_are_finite(model: nn.Module, device: torch.device) -> bool:
    """Whether all trained weights on all ranks are finite. All ranks must call it."""
    bad = torch.zeros((), dtype=torch.int32, device=device)
    for held in (local_part(each) for each in model.parameters() if each.requires_grad):
        if held.numel():
            # A 27th of the time of `isfinite(held).all()`, on one core.
            extremes = torch.stack(torch.aminmax(held.detach()))
            bad |= (~torch.isfinite(extremes).all()).int().to(bad.device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX)
    return not bad.item()


def average_gradients(trained: Iterable[Parameter], group: ProcessGroup, sum_in: torch.dtype | None = None) -> None:
    """Average the gradients of weights, or of this rank's parts of them, over a group. All its ranks must call it.

    Weights without a gradient are passed over, on all ranks alike. Sums are in each gradient's own type by default.
    """
    local = [local_part(each.grad) for each in trained if each.grad is not None]
    sums = [each.to(sum_in or each.dtype) for each in local]  # the same tensors, if they are of this type
    for work in [torch.distributed.all_reduce(each, group=group, async_op=True) for each in sums]:
        assert work is not None
        work.wait()
    divide_and_copy(sums, group.size(), local)


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's own weights by name, each once, as checkpoints hold them; of an adapted model the adapter's."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    if isinstance(model, PeftModel):
        state = get_peft_model_state_dict(model, state, adapter_name=model.active_adapter)
    first_names = {id(weight): name for name, weight in reversed(state.items())}  # tied ones have several
    return {name: weight.detach() for name, weight in state.items() if first_names[id(weight)] == name}


def split_like(target: Tensor, whole: Tensor, name: str) -> Tensor:
    """This rank's part of a whole tensor where `target` is in shards; else the whole tensor."""
    if whole.shape != target.shape:
        raise RuntimeError(f"{name} has the shape {tuple(whole.shape)} instead of {tuple(target.shape)}.")
    if not isinstance(target, DTensor):
        return whole
    # Each rank has the whole, so that none has to send it.
    return distribute_tensor(
        whole.to(target.device, target.dtype), target.device_mesh, target.placements, src_data_rank=None
    )

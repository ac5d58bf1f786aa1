"""Tensor parallelism: which matrices can be split, into how many parts, and how a loaded model is split."""

from __future__ import annotations

import math
import re
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from indictune.config.plan import AnyPlan
from indictune.errors import Problem, problem
from indictune.models.load import without_adapter

# The style of transformers (5.23, `ALL_PARALLEL_STYLES`) that splits each module, by the module's name without layer
# numbers.
Plan = dict[str, str]

_OF_BERT: Plan = {
    **{f"encoder.layer.*.attention.self.{name}": "colwise" for name in ("query", "key", "value")},
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}
_LAYER_OF_ALBERT = "encoder.albert_layer_groups.*.albert_layers.*"
# Plans of encoders, which transformers has none for. Their embeddings stay whole on each rank: an active vocabulary
# makes them small.
_OF_ENCODERS: dict[str, Plan] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), _OF_BERT),
    "albert": {
        **{f"{_LAYER_OF_ALBERT}.attention.{name}": "colwise" for name in ("query", "key", "value")},
        f"{_LAYER_OF_ALBERT}.attention.dense": "rowwise",
        f"{_LAYER_OF_ALBERT}.ffn": "colwise",
        f"{_LAYER_OF_ALBERT}.ffn_output": "rowwise",
    },
    # `Wqkv` and `Wi` hold several matrices. To split each of them would save the exchange of their outputs, but torch
    # (2.13) cannot save such parts ("overlapping chunks"), and reads FSDP2's note of their rows in another order:
    # losses differed by 1e-3.
    "modernbert": {
        "layers.*.attn.Wqkv": "colwise_gather_output",
        "layers.*.attn.Wo": "rowwise_split_input",
        "layers.*.mlp.Wi": "colwise_gather_output",
        "layers.*.mlp.Wo": "rowwise_split_input",
    },
}
# Others are refused. `replicated_with_grad_allreduce` (5.23) sums a gradient again with each micro-batch.
_COMPARED = ("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input")
# How DeepSpeed's AutoTP (0.19.8, `partition_config`) names a style.
_OF_DEEPSPEED = {"colwise": "column", "rowwise": "row", "rowwise_split_input": "row"}
_MATRICES_IN = {"Wqkv": 3, "Wi": 2}  # each of them is split
_SPLIT_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def plan_of(model: PreTrainedModel) -> Plan:
    """The plan of a model that `check_split` accepts."""
    ours = _OF_ENCODERS.get(model.config.model_type)
    if ours is None:
        return dict(model.tp_plan)
    return {f"{model.base_model_prefix}.{name}": style for name, style in ours.items()}


def specs_of_deepspeed(plan: Plan) -> list[dict[str, Any]]:
    """A plan as AutoTP's `layer_specs`. What it leaves out stays whole on each rank.

    That is the output layer of LLaMA too. TRL (1.16) reads its weight to compute the loss: over half of the vocabulary
    the loss is lower by ln 2.
    """
    found = list[dict[str, Any]]()
    for name, style in plan.items():
        pattern = rf".*\b{re.escape(name)}\.weight$".replace(r"\*", r"\d+")
        if style in _OF_DEEPSPEED:
            found.append({"patterns": [pattern], "partition_type": _OF_DEEPSPEED[style]})
        elif packed := _MATRICES_IN.get(name.rpartition(".")[2]):
            found.append({"patterns": [pattern], "partition_type": "column", "shape": [packed, -1]})
    return found


def check_split(plan: AnyPlan) -> list[Problem]:
    """Refuse tensor parallelism of a model or method that it cannot split."""
    config, size = plan.model_config, plan.launch.axes.tensor
    if config is None or size == 1:
        return []
    model, found = plan.model, list[Problem]()
    is_deepspeed = plan.launch.deepspeed is not None
    if reason := _obstacle(config, is_deepspeed):
        found.append(problem("no-tensor-plan", "--model_name_or_path", model.model_name_or_path, reason=reason))
    elif (largest := math.gcd(*(sizes := _sizes(config, is_deepspeed)).values())) % size:
        possible = [str(each) for each in range(1, largest + 1) if largest % each == 0]
        listed = ", ".join(f"{name} {value}" for name, value in sizes.items())
        details: dict[str, Any] = {"size": size, "sizes": listed, "possible": ", ".join(possible)}
        found.append(problem("tensor-does-not-divide", "--model_name_or_path", model.model_name_or_path, **details))
    if plan.training.fp16 and not is_deepspeed:
        # torch's scaler (2.13, `found_inf_reduce_handler`) sends overflows over the mesh of the first weight alone.
        # Here some weights are split and others are not.
        found.append(problem("fp16-under-tensor", "--fp16", "true", strategy=plan.launch.strategy))
    refused = {
        # AutoTP (0.19.8) does not look into a layer with an adapter.
        "method": model.method == "qlora" or (is_deepspeed and model.method != "full"),
        "use_dora": model.use_dora,
        "modules_to_save": model.method != "full" and bool(model.modules_to_save),
    }
    for name in (name for name, is_refused in refused.items() if is_refused):
        value = getattr(model, name)
        shown = " ".join(value) if isinstance(value, list) else str(value).lower()
        found.append(problem("not-under-tensor", f"--{name}", shown, strategy=plan.launch.strategy))
    return found


def _obstacle(config: PreTrainedConfig, is_deepspeed: bool) -> str | None:
    if config.to_dict().get("quantization_config"):
        return "its weights are quantised"
    if config.model_type in _OF_ENCODERS:
        return None
    styles = set((config.get_text_config().base_model_tp_plan or {}).values())
    if not styles:
        return f"no plan says how to split models of type {config.model_type}"
    if others := sorted(styles.difference(("colwise", "rowwise") if is_deepspeed else _COMPARED)):
        return f"no test compares the plan of {config.model_type} with one process ({', '.join(others)})"
    return None


def _sizes(config: PreTrainedConfig, is_deepspeed: bool) -> dict[str, int]:
    of_text = config.get_text_config()
    is_head_whole = is_deepspeed or config.model_type in _OF_ENCODERS
    names = _SPLIT_SIZES if is_head_whole else (*_SPLIT_SIZES, "vocab_size")
    values = {name: of_text.to_dict().get(name) for name in names}
    return {name: int(value) for name, value in values.items() if value is not None}


def split_matrices(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a model, or the stage that was cut from it, over a tensor group in place. Its matrices become DTensors.

    This follows the loading. transformers can split a model while it reads it (`DistributedConfig`, 5.23), and each
    rank reads only its part. But then the Trainer refuses to resume, adapters and new heads are drawn in parts,
    which differ from those of one process, and neither a stage nor an active vocabulary can be cut out first.
    """
    own = without_adapter(model)
    apply_tensor_parallelism(own, mesh, styles_of(own))
    own.tie_weights()


def styles_of(model: PreTrainedModel) -> Plan:
    """The style of each parameter and module that the model's plan splits, parameters first.

    Of an adapter's matrices, that one is split which meets the split side of its weight.
    """
    plan, found = plan_of(model), dict[str, str]()
    for name, module in model.named_modules():
        style = plan.get(replace_layer_number_by_wildcard(name))
        if style is None:
            continue
        places = [name]
        if isinstance(module, LoraLayer):
            matrices = "lora_A" if style.startswith("rowwise") else "lora_B"
            places = [f"{name}.base_layer", *(f"{name}.{matrices}.{each}" for each in module.active_adapters)]
        for place in places:
            part = model.get_submodule(place)
            own = [f"{place}.{parameter}" for parameter, _ in part.named_parameters(recurse=False)]
            if own:  # else the module is of another stage
                found |= dict.fromkeys([*own, place], style)
    return found

"""Split the matrices of a loaded model over the ranks of a tensor group."""

from __future__ import annotations

from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from indictune.distributed.tensor_plans import Plan, plan_of
from indictune.models.own_model import own_model


def split_matrices(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split a model, or the stage that was cut from it, over a tensor group. Its matrices become DTensors.

    This follows the loading. transformers can split a model while it reads it (`DistributedConfig`, 5.23), and each
    rank reads only its part. But then the Trainer refuses to resume, adapters and new heads are drawn in parts,
    which differ from those of one process, and neither a stage nor an active vocabulary can be cut out first.

    Args:
        model: whole on each rank, or an adapter on such a model; changed in place.
        mesh: the tensor axis.
    """
    own = own_model(model)
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

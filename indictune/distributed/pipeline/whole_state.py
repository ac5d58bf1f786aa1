"""Put the weights of all stages together, and take a stage's part of whole optimizer states."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import Trainer

from indictune.distributed.convert_state import own_weights


def write_whole_weights(trainer: Trainer, model: nn.Module, folder: Path, group: ProcessGroup) -> None:
    """Gather the weights of all stages on rank 0, and write them as one process does. All ranks must call it.

    Args:
        trainer: saves.
        model: with the stages of this rank.
        folder: of the model.
        group: the ranks of this pipeline, by stage.
    """
    weights = _gathered(own_weights(model), group, trainer.args.device)
    is_adapter = isinstance(model, PeftModel)
    trained = {name: _whole(each) for name, each in model.named_parameters() if is_adapter and each.requires_grad}
    if not trainer.args.should_save:
        return
    if is_adapter:
        trainer._save(str(folder), state_dict=trained)  # with the adapter's part in the first stage
        save_file(weights, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
    else:
        trainer._save(str(folder), state_dict=weights)


def _gathered(mine: dict[str, Tensor], group: ProcessGroup, device: torch.device) -> dict[str, Tensor]:
    """The weights of all stages by name, on the CPU of rank 0; on other ranks their own."""
    weights = {name: _whole(each) for name, each in mine.items()}
    ranks = torch.distributed.get_process_group_ranks(group)
    if ranks[0] != 0:  # another copy of the model
        return weights
    described: list[Any] = [None] * len(ranks)
    mine_described = {name: (each.shape, each.dtype) for name, each in weights.items()}
    torch.distributed.all_gather_object(described, mine_described, group=group)
    rank = torch.distributed.get_rank()
    whole = {name: each.cpu().contiguous() for name, each in weights.items()} if rank == 0 else weights
    for sender, names in zip(ranks[1:], described[1:], strict=True):
        for name, (shape, dtype) in names.items():
            if rank == sender:
                torch.distributed.send(weights[name].contiguous(), ranks[0], group=group)
            elif rank == 0:
                received = torch.empty(shape, dtype=dtype, device=device)
                torch.distributed.recv(received, sender, group=group)
                whole[name] = received.cpu()
    return whole


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def part_of_states(
    whole: dict[str, Any], model: nn.Module, decayed: Collection[str], order: Sequence[str], group: ProcessGroup
) -> dict[str, Any]:
    """What a rank loads of the optimizer states of a whole model, numbered as one process would number its stages.

    All ranks must call it.

    Args:
        whole: the state dict of one process: parameters with weight decay come first.
        model: with the stages of this rank.
        decayed: names of the parameters of these that weight decay applies to.
        order: names of all trained parameters, as the whole model lists them.
        group: the ranks of this pipeline.
    """
    of_stages: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(of_stages, set(decayed), group=group)
    all_decayed = set[str]().union(*of_stages)
    number_of = {name: number for number, name in enumerate(sorted(order, key=lambda name: name not in all_decayed))}
    own = [name for name, each in model.named_parameters() if each.requires_grad]
    own.sort(key=lambda name: name not in decayed)
    with_decay = sum(name in decayed for name in own)
    numbers = [list(range(with_decay)), list(range(with_decay, len(own)))]
    groups = [each | {"params": mine} for each, mine in zip(whole["param_groups"], numbers, strict=True)]
    return {
        "state": {number: whole["state"][number_of[name]] for number, name in enumerate(own)},
        "param_groups": groups,
    }

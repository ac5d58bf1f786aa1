"""A script in which the last rank's copies are damaged, one after the other, and compared.

    torchrun --nproc_per_node 3 tests/distributed/diverging.py

The first rank prints a line of JSON: what the comparison says of each fault; null where it sees none.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from indictune.config.plan import Axes, Launch
from indictune.distributed.agreement import DivergedError, check_copies

Fault = Callable[[nn.Module, torch.optim.Optimizer], None]


def flip(tensor: Tensor) -> None:
    """The lowest bit of the last number."""
    tensor.detach().view(-1).view(torch.uint8)[-1] ^= 1


def of_weight(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    flip(model.get_parameter("1.weight"))


def of_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    flip(optimizer.state[model.get_parameter("0.bias")]["exp_avg"])


def of_seed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(7)


def of_generator(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.rand(1)


def of_split(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The ranks have different parts of it anyway."""
    flip(model.get_parameter("0.weight").to_local())  # type: ignore[attr-defined]


def of_copied_mesh(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A DTensor that is whole on each rank."""
    flip(model.get_parameter("1.bias").to_local())  # type: ignore[attr-defined]


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Each rank has drawn masks of its own rows."""
    torch.rand(torch.distributed.get_rank())


def trained(is_split: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after a step of AdamW; its first matrix, where that is asked for, is split over the ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    if is_split:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tensor",))
        for module, name, placement in ((model[0], "weight", Shard(0)), (model[1], "bias", Replicate())):
            whole = module.get_parameter(name).detach()
            module.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [placement])))
    optimizer = torch.optim.AdamW(model.parameters())
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    return model, optimizer


def said_of(fault: Fault, launch: Launch) -> str | None:
    model, optimizer = trained(is_split=launch.axes.tensor > 1)
    if launch.rank == launch.world_size - 1:
        fault(model, optimizer)
    try:
        check_copies(5, "--divergence_check_steps", model, optimizer, launch)
    except DivergedError as error:
        return str(error)
    return None


def main() -> None:
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    copies = Launch("ddp", ranks, ranks, rank)
    tensor = Launch("tp", ranks, ranks, rank, axes=Axes(tensor=ranks))
    found = {each.__name__: said_of(each, copies) for each in (of_weight, of_state, of_seed, nothing)}
    found |= {f"tp {each.__name__}": said_of(each, tensor) for each in (of_weight, of_generator, of_split)}
    found |= {"tp of_copied_mesh": said_of(of_copied_mesh, tensor)}
    if rank == 0:
        print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

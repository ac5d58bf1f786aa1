"""Groups of ranks that split a model, without a training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from indictune.config.plan import Axes, Launch
from indictune.distributed.parallelism import PIPELINE, REPLICAS, SHARDS, TENSOR, Parallelism
from indictune.distributed.strategy import notes_on_file
from tests.plans import plan_of


@pytest.mark.parametrize(("reduce_dtype", "average"), [("float32", 1 + 2**-12), ("bfloat16", 1.0)])
def test_copies_sum_gradients_in_the_type_asked_for(reduce_dtype: str, average: float) -> None:
    """bfloat16 has 8 digits: 1 + 2**-12 becomes 1. The group is one rank alone."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1, 1, 1), mesh_dim_names=(PIPELINE, REPLICAS, SHARDS, TENSOR))
        model = nn.Linear(1, 1, bias=False)
        model.weight.grad = torch.full((1, 1), 1 + 2**-12)
        accelerator, args = SimpleNamespace(sync_gradients=True), SimpleNamespace(reduce_dtype=reduce_dtype)
        trainer: Any = SimpleNamespace(model=model, accelerator=accelerator, args=args)
        parallelism = object.__new__(Parallelism)  # without the ranks that share its matrices
        parallelism.launch, parallelism.mesh = Launch("ddp_tp", 4, 4, axes=Axes(tensor=2)), mesh
        parallelism.average_gradients(trainer)
        assert model.weight.grad.dtype == torch.float32
        assert model.weight.grad.item() == average
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("launch", "is_ignored"),
    [
        (Launch("single"), True),
        (Launch("tp", 2, 2, axes=Axes(tensor=2)), True),
        (Launch("ddp_tp", 4, 4, axes=Axes(tensor=2)), False),
        (Launch("ddp", 2, 2), False),
    ],
    ids=str,
)
def test_a_type_of_sums_that_nobody_makes_is_reported(launch: Launch, is_ignored: bool) -> None:
    plan = plan_of({"reduce_dtype": "bfloat16"}, launch=launch)
    assert any("--reduce_dtype" in each for each in notes_on_file(plan)) == is_ignored

"""What is sent in which type: settings that cannot be, and what the settings do to torch's DDP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from indictune.config.arguments import SentimentTrainingArguments
from indictune.config.recipe import read_recipe
from indictune.distributed.ddp import gradient_buckets, passes_until_settled


def test_a_type_that_is_not_there_is_refused_by_name() -> None:
    recipe = read_recipe(["--reduce_dtype", "float16"], (SentimentTrainingArguments,))
    assert [(each.code, each.flag) for each in recipe.problems] == [("wrong-type", "--reduce_dtype")]


def arguments(**settings: Any) -> SentimentTrainingArguments:
    return SentimentTrainingArguments(output_dir="unused", use_cpu=True, **settings)


def test_the_settings_given_to_torch() -> None:
    default = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
    assert gradient_buckets(arguments()).to_kwargs() == {**default, "static_graph": True}
    several = {"gradient_accumulation_steps": 2}
    assert gradient_buckets(arguments(**several)).to_kwargs() == {**default, "find_unused_parameters": True}
    assert gradient_buckets(arguments(**several, ddp_find_unused_parameters=False)).to_kwargs() == default
    assert gradient_buckets(arguments(**several, gradient_checkpointing=True)).to_kwargs() == default
    given = arguments(
        ddp_static_graph=False, ddp_find_unused_parameters=True, ddp_bucket_cap_mb=7, ddp_broadcast_buffers=True
    )
    assert gradient_buckets(given).to_kwargs() == {
        "bucket_cap_mb": 7,
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
    }


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Layers(nn.Module):
    """Three layers of 110 parameters each, and perhaps one of 2 that takes no part."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.used = nn.Sequential(*(nn.Linear(10, 10) for _ in range(3)))
        self.unused = nn.Linear(1, 1) if unused else None

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.used(inputs)


def replica(unused: bool = False, **settings: Any) -> DistributedDataParallel:
    """The layers as a run wraps them."""
    buckets = gradient_buckets(arguments(**settings))
    wrapped = DistributedDataParallel(Layers(unused), **buckets.to_kwargs())
    buckets.register_comm_hook(wrapped)
    return wrapped


def step(model: DistributedDataParallel) -> None:
    model.zero_grad()
    model(torch.linspace(0, 1, 10)[None]).sum().backward()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_are_views_of_the_bucket_that_is_sent(accumulation: int) -> None:
    model = replica(gradient_accumulation_steps=accumulation)
    step(model)
    step(model)
    gradients = [parameter.grad for parameter in model.parameters()]
    storages = {grad.untyped_storage().data_ptr(): grad.untyped_storage().nbytes() for grad in gradients}  # type: ignore[union-attr]
    assert len(gradients) == 6
    assert list(storages.values()) == [4 * 330]  # one bucket; each gradient would have a storage of its own


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_parameter_without_a_gradient_is_found(accumulation: int) -> None:
    model = replica(unused=True, gradient_accumulation_steps=accumulation)
    for _ in range(3):
        step(model)
    assert [name for name, each in model.named_parameters() if each.grad is None or not each.grad.any()] == [
        "module.unused.weight",
        "module.unused.bias",
    ]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({}, 2),
        ({"gradient_checkpointing": True, "gradient_accumulation_steps": 2}, 1),
        ({"ddp_static_graph": False}, 0),
    ],
    ids=["static", "activations computed again", "looked for each time"],
)
def test_torch_makes_other_buckets_after_the_first_passes(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], passes: int
) -> None:
    """torch 2.13. When this fails, `settle_buckets` can go."""
    layers = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))
    model = DistributedDataParallel(layers, **gradient_buckets(arguments(**settings)).to_kwargs())
    sent: list[list[int]] = []
    world = distributed.group.WORLD
    assert world is not None

    def note(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with classes
        sent[-1].append(bucket.buffer().numel())
        return allreduce_hook(world, bucket)

    model.register_comm_hook(None, note)
    for _ in range(5):
        sent.append([])
        model.zero_grad()
        model(torch.linspace(0, 1, 600)[None]).sum().backward()
    assert [sizes == sent[-1] for sizes in sent] == [False] * passes + [True] * (5 - passes)
    assert passes_until_settled(model) == 0  # one rank adds nothing
    monkeypatch.setattr(distributed, "get_world_size", lambda: 3)
    assert passes_until_settled(model) == passes


@pytest.mark.usefixtures("group")
def test_gradients_are_summed_in_bfloat16() -> None:
    gradients = {}
    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(0)
        model = replica(reduce_dtype=dtype)
        step(model)
        gradients[dtype] = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    rounded = [grad.bfloat16().float() for grad in gradients["float32"]]
    assert not all(torch.equal(*pair) for pair in zip(rounded, gradients["float32"], strict=True))
    assert all(torch.equal(*pair) for pair in zip(rounded, gradients["bfloat16"], strict=True))


@pytest.mark.usefixtures("group")
def test_torch_takes_no_static_graph_under_accumulation() -> None:
    """torch 2.13; see `gradient_buckets`. When this fails, the graph can be static always."""
    model = replica(ddp_static_graph=True, gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match="expect_autograd_hooks_ INTERNAL ASSERT FAILED"), model.no_sync():
        step(model)


@pytest.mark.usefixtures("group")
def test_torch_sums_no_gradients_in_another_type_where_weights_take_no_part() -> None:
    """torch 2.13; see `Parallelism.set_up`. When this fails, an adapter's may be in bfloat16."""
    model: Any = Layers(unused=True)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    fully_shard(model.unused, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.set_requires_gradient_sync(False)
    with pytest.raises(AttributeError, match="no attribute '_unsharded_param'"):
        model(torch.ones(1, 10)).sum().backward()


@pytest.mark.usefixtures("group")
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch takes it with NCCL")
def test_torch_takes_its_bf16_hook_only_with_nccl() -> None:
    """torch 2.13; see `SumsInBfloat16`. When this fails, torch's own will do."""
    with pytest.raises(TypeError, match="BF16 all reduce communication hook required"):
        replica().register_comm_hook(None, bf16_compress_hook)

"""Which settings a strategy cannot run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.optim import adamw, ademamix, lion, rmsprop
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from transformers.optimization import Adafactor

from indictune.config.plan import Axes, Launch
from indictune.distributed.strategy import (
    check_strategy,
    check_weights,
    default_optimizer,
    forget_pages,
)
from tests.plans import STRATEGIES, codes, plan_of

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}
NF4_IN_BYTES = {**NF4, "bnb_4bit_quant_storage": "uint8"}  # bitsandbytes' default
EIGHT_BITS = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def found_in(
    strategy: str, quantisation: Mapping[str, Any] | None = None, world_size: int = 8, **model: Any
) -> list[str]:
    """Codes of the problems of a model's weights under a strategy."""
    plan = plan_of(model=model, launch=Launch(strategy, world_size))
    return [each.code for each in check_weights(plan, quantisation or {})]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_unquantised_weights_are_trained_under_every_strategy(method: str) -> None:
    assert [each for each in STRATEGIES if found_in(each, method=method)] == []


@pytest.mark.parametrize(
    ("method", "quantisation"), [("qlora", {}), ("qlora", NF4), ("lora", NF4), ("lora", EIGHT_BITS)]
)
def test_quantised_weights_are_not_trained_under_zero_3(method: str, quantisation: Mapping[str, Any]) -> None:
    families = ("zero3", "fsdp2") if quantisation == EIGHT_BITS else ("zero3",)
    for strategy in STRATEGIES:
        found = found_in(strategy, quantisation, method=method)
        assert found == ["quantised-weights-sharded"] * strategy.startswith(families), strategy


@pytest.mark.parametrize(
    ("strategy", "codes"),
    [("single", []), ("ddp", []), ("zero1", []), ("zero2", []), ("fsdp2", ["quantised-weights-sharded"])],
)
def test_only_fsdp2_refuses_4_bit_weights_stored_in_bytes(strategy: str, codes: list[str]) -> None:
    assert found_in(strategy, NF4_IN_BYTES, method="lora") == codes


def test_fsdp2_refuses_to_train_the_full_output_layer() -> None:
    assert found_in("fsdp2", method="lora", modules_to_save=["lm_head"]) == ["lm-head-under-fsdp2"]
    assert found_in("zero2", method="lora", modules_to_save=["lm_head"]) == []


def test_a_device_map_needs_a_single_process() -> None:
    assert found_in("single", world_size=1, method="qlora", device_map="auto") == []
    assert found_in("ddp", world_size=2, device_map="balanced") == ["device-map-with-processes"]
    both = ["quantised-weights-sharded", "device-map-with-processes"]
    assert found_in("zero3", method="qlora", device_map="auto") == both


def test_qlora_pages_its_optimizer_under_single_and_ddp() -> None:
    for strategy in STRATEGIES:
        paged = "paged_adamw_8bit" if strategy in ("single", "ddp") else None
        assert default_optimizer(Launch(strategy), "qlora", has_gpu=True) == paged, strategy
        assert default_optimizer(Launch(strategy), "qlora", has_gpu=False) is None
        assert default_optimizer(Launch(strategy), "lora", has_gpu=True) is None


@pytest.mark.parametrize(
    ("optim", "families"),
    [
        ("adamw_torch_fused", ()),
        ("adamw_torch_8bit", ()),  # torchao's
        *((name, ("fsdp2",)) for name in ("paged_adamw_8bit", "adamw_bnb_8bit", "ademamix", "adafactor")),
        ("adagrad", ("fsdp2", "zero")),
    ],
)
def test_an_optimizer_whose_states_cannot_be_sharded_is_refused(optim: str, families: tuple[str, ...]) -> None:
    for strategy in STRATEGIES:
        found = codes(check_strategy(plan_of({"optim": optim}, launch=Launch(strategy, 8))))
        sharded = [("optimizer-cannot-be-sharded", "--optim")] if strategy.startswith(families or ("none",)) else []
        replaced = strategy.startswith("zero") and strategy.endswith("_offload") and "adamw" not in optim
        assert found == sharded + [("offload-needs-adamw", "--optim")] * replaced, strategy


def test_the_flag_counts_under_a_deepspeed_file_with_an_optimizer() -> None:
    launch = Launch("zero2", 8, deepspeed={"optimizer": {"type": "AdamW"}})
    found = codes(check_strategy(plan_of({"optim": "adagrad"}, launch=launch)))
    assert found == [("optimizer-cannot-be-sharded", "--optim")]


BF16 = {"reduce_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("launch", "method", "training", "steps", "flags"),
    [
        (Launch("ddp", 2), "full", {}, 2, []),
        (Launch("ddp", 2), "lora", BF16, 2, []),
        (Launch("single"), "full", {}, 2, []),
        (Launch("fsdp2_offload", 2), "full", BF16, 2, []),
        (Launch("fsdp2", 2), "lora", {}, 2, []),
        (Launch("ddp", 2), "full", {"ddp_static_graph": True}, 1, []),
        (Launch("ddp", 2), "full", {"ddp_static_graph": True}, None, []),
        (Launch("ddp", 2), "full", {"ddp_static_graph": True}, 2, ["--ddp_static_graph"]),
        (Launch("single"), "full", BF16, 2, []),
        (Launch("fsdp2", 2), "qlora", BF16, 2, ["--reduce_dtype"]),
    ],
    ids=str,
)
def test_communication_that_the_strategy_does_not_have_is_refused(
    launch: Launch, method: str, training: dict[str, Any], steps: int | None, flags: list[str]
) -> None:
    plan = plan_of(training, {"method": method}, launch, steps=steps)
    assert [each.flag for each in check_strategy(plan)] == flags


@pytest.mark.parametrize(
    ("launch", "method", "code"),
    [
        (Launch("fsdp2", 2), "full", None),
        (Launch("fsdp2_offload", 2), "full", None),
        (Launch("tp", 2, axes=Axes(tensor=2)), "full", None),
        (Launch("pipeline", 2, axes=Axes(pipeline=2)), "full", None),
        (Launch("pipeline", 2, axes=Axes(pipeline=2)), "lora", "async-save-without-shards"),
        (Launch("fsdp2", 1), "full", "async-save-without-shards"),
        (Launch("ddp", 2), "full", "async-save-without-shards"),
        (Launch("zero3", 2), "full", "async-save-without-shards"),
        (Launch("fsdp2", 2), "lora", "async-save-without-shards"),
    ],
    ids=str,
)
def test_async_save_needs_shards_of_all_weights(launch: Launch, method: str, code: str | None) -> None:
    plan = plan_of({"async_save": True}, {"method": method}, launch)
    assert codes(check_strategy(plan)) == ([] if code is None else [(code, "--async_save")])
    assert check_strategy(plan_of({}, {"method": method}, launch)) == []
    pushes = plan_of({"push_to_hub": True, "hub_strategy": "every_save"}, {"method": method}, launch)
    assert codes(check_strategy(pushes)) == ([] if code else [("push-of-shards", "--hub_strategy")])


@pytest.mark.parametrize(
    ("strategy", "asked", "is_refused"),
    [("ddp", "skip", False), ("zero2", "rollback", False), ("zero2", "stop", False), ("zero3_offload", "skip", True)],
)
def test_deepspeed_cannot_skip_every_bad_step(strategy: str, asked: str, is_refused: bool) -> None:
    found = codes(check_strategy(plan_of({"on_nonfinite": asked}, launch=Launch(strategy, 2))))
    assert found == ([("skip-under-deepspeed", "--on_nonfinite")] if is_refused else [])


def test_adafactor_mixes_sharded_and_full_tensors() -> None:
    """transformers 5.23 and torch 2.13; when it does not, `runs_optimizer` can let it through."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        layer: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
        kind: Any = Adafactor
        optimizer = kind(layer.parameters(), lr=0.1, scale_parameter=False, relative_step=False)
        layer(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RuntimeError, match="got mixed torch"):
            optimizer.step()
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    "kind", [adamw.AdamW8bit, adamw.PagedAdamW8bit, ademamix.AdEMAMix, lion.Lion8bit, rmsprop.RMSprop]
)
def test_bitsandbytes_updates_no_sharded_weight(kind: Callable[..., Optimizer]) -> None:
    """bitsandbytes 0.50 and torch 2.13; when one is updated, `runs_optimizer` can let it through."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        layer: Any = fully_shard(nn.Linear(128, 128), mesh=init_device_mesh("cpu", (1,)))
        optimizer = kind(layer.parameters(), lr=0.1)
        layer(torch.ones(2, 128)).sum().backward()
        with pytest.raises((RuntimeError, NotImplementedError), match=r"got mixed torch|sharding strategy"):
            optimizer.step()
    finally:
        distributed.destroy_process_group()


def test_a_loaded_state_is_not_paged(tmp_path: Path) -> None:
    """torch 2.13 keeps what bitsandbytes has noted of a tensor; when it no longer does, `forget_pages` can go."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    vars(optimizer.state[weight]["exp_avg"])["is_paged"] = True
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    states = optimizer.state[weight]
    assert vars(states["exp_avg"]) == {"is_paged": True}
    forget_pages(optimizer)
    assert [vars(value) for value in states.values()] == [{}, {}, {}]

"""Which weights can be trained under which strategy."""

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

from indictune.config.arguments import Method, ModelArguments
from indictune.config.plan import Launch
from indictune.distributed.strategy_limits import check_split_optimizer, check_weights, default_optimizer, forget_pages
from indictune.errors import UserError

STRATEGIES = [
    *("single", "ddp", "fsdp2", "fsdp2_offload", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"),
]
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}
NF4_IN_BYTES = {**NF4, "bnb_4bit_quant_storage": "uint8"}  # bitsandbytes' default
EIGHT_BITS = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def problems_of(
    strategy: str,
    method: Method,
    quantisation: Mapping[str, Any] | None = None,
    device_map: str | None = None,
    world_size: int = 8,
) -> list[str]:
    args = ModelArguments("some/llama", method=method, device_map=device_map)
    try:
        check_weights(Launch(strategy, world_size), args, quantisation or {})
    except UserError as error:
        return error.problems
    return []


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_unquantised_weights_are_trained_under_every_strategy(strategy: str, method: Method) -> None:
    assert problems_of(strategy, method) == []


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2", "fsdp2_offload", "zero1", "zero2", "zero2_offload"])
def test_weights_in_4_bits_are_trained_wherever_they_stay_whole_or_split_evenly(strategy: str) -> None:
    assert problems_of(strategy, "qlora") == []
    assert problems_of(strategy, "lora", NF4) == []


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1", "zero2"])
@pytest.mark.parametrize("quantisation", [EIGHT_BITS, NF4_IN_BYTES])
def test_what_stays_whole_may_be_quantised_and_stored_in_any_way(
    strategy: str, quantisation: Mapping[str, Any]
) -> None:
    assert problems_of(strategy, "lora", quantisation) == []


@pytest.mark.parametrize("strategy", ["zero3", "zero3_offload"])
@pytest.mark.parametrize(
    ("method", "quantisation"), [("qlora", {}), ("qlora", NF4), ("lora", NF4), ("lora", EIGHT_BITS)]
)
def test_zero_3_takes_no_quantised_weights(strategy: str, method: Method, quantisation: Mapping[str, Any]) -> None:
    assert problems_of(strategy, method, quantisation) == [
        f"--method {method} under {strategy}: ZeRO-3 splits weights while they are loaded, and 4-bit or 8-bit weights "
        "cannot be split so. Use accelerate_configs/fsdp2_qlora.yaml, or ddp.yaml or zero2.yaml where the base fits "
        "on one GPU."
    ]


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_offload"])
def test_fsdp_takes_no_weights_in_8_bits(strategy: str) -> None:
    assert problems_of(strategy, "lora", EIGHT_BITS) == [
        "--model_name_or_path some/llama: its weights are in 8 bits, which FSDP cannot split. Give the checkpoint "
        "that they were quantised from with --method qlora (NF4), or use accelerate_configs/ddp.yaml."
    ]


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_offload"])
def test_fsdp_takes_4_bit_weights_only_in_the_type_of_the_rest(strategy: str) -> None:
    assert problems_of(strategy, "qlora", NF4_IN_BYTES) == [
        "--model_name_or_path some/llama: its 4-bit weights are stored as uint8, and FSDP splits only what has the "
        "type of the rest, bfloat16. Give the checkpoint that they were quantised from with --method qlora, which "
        "stores them so."
    ]


def test_a_model_spread_over_all_gpus_needs_them_for_one_process() -> None:
    assert problems_of("single", "qlora", device_map="auto", world_size=1) == []
    assert problems_of("ddp", "lora", device_map="balanced", world_size=2) == [
        "--device_map balanced: spreads one process's model over all GPUs, and there are 2 processes. Leave it out, "
        "or start one process with plain python."
    ]


def test_several_problems_are_told_at_once() -> None:
    problems = problems_of("zero3", "qlora", device_map="auto", world_size=4)
    assert [problem.partition(":")[0] for problem in problems] == [
        "--method qlora under zero3", "--device_map auto",
    ]  # fmt: skip
    problems = problems_of("fsdp2", "lora", EIGHT_BITS, device_map="auto")
    assert [problem.partition(":")[0] for problem in problems] == [
        "--model_name_or_path some/llama", "--device_map auto",
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_paged_optimizer_is_qloras_own_where_it_runs(strategy: str) -> None:
    paged = "paged_adamw_8bit" if strategy in ("single", "ddp") else None
    assert default_optimizer(Launch(strategy), "qlora", has_gpu=True) == paged
    assert default_optimizer(Launch(strategy), "qlora", has_gpu=False) is None
    assert default_optimizer(Launch(strategy), "lora", has_gpu=True) is None
    assert default_optimizer(Launch(strategy), "full", has_gpu=True) is None


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optim", ["paged_adamw_8bit", "adamw_bnb_8bit", "lion_32bit", "ademamix", "rmsprop_bnb"])
def test_fsdp_takes_no_optimizer_of_bitsandbytes(strategy: str, optim: str) -> None:
    check_split_optimizer(Launch(strategy, 8), "adamw_torch_8bit")  # which is torchao's
    if not strategy.startswith("fsdp2"):
        check_split_optimizer(Launch(strategy, 8), optim)
        return
    with pytest.raises(UserError) as caught:
        check_split_optimizer(Launch(strategy, 8), optim)
    assert caught.value.message == (
        f"--optim {optim}: bitsandbytes' optimizers do not take weights that {strategy} has split. Leave --optim out, "
        "or use accelerate_configs/ddp.yaml."
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optim", ["adagrad", "adafactor"])
def test_an_optimizer_whose_states_cannot_be_split_is_refused_where_they_would_be(strategy: str, optim: str) -> None:
    if not strategy.startswith(("fsdp2", "zero") if optim == "adagrad" else "fsdp2"):
        check_split_optimizer(Launch(strategy, 8), optim)
        return
    with pytest.raises(UserError) as caught:
        check_split_optimizer(Launch(strategy, 8), optim)
    assert caught.value.message == (
        f"--optim {optim}: its states cannot be split as {strategy} splits them. Leave --optim out, or use "
        "accelerate_configs/ddp.yaml."
    )


def test_a_deepspeed_files_own_optimizer_takes_the_place_of_the_flag() -> None:
    check_split_optimizer(Launch("zero2", 8, deepspeed={"optimizer": {"type": "AdamW"}}), "adagrad")


def test_adafactor_adds_split_and_whole_tensors() -> None:
    """transformers 5.23 and torch 2.13; when it does not, `check_split_optimizer` can let it through."""
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
def test_bitsandbytes_updates_no_weight_that_is_split(kind: Callable[..., Optimizer]) -> None:
    """bitsandbytes 0.50 and torch 2.13; when one is updated, `check_split_optimizer` can let it through."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        layer: Any = fully_shard(nn.Linear(128, 128), mesh=init_device_mesh("cpu", (1,)))
        optimizer = kind(layer.parameters(), lr=0.1)
        layer(torch.ones(2, 128)).sum().backward()
        with pytest.raises((RuntimeError, NotImplementedError), match=r"got mixed torch|sharding strategy"):
            optimizer.step()
    finally:
        distributed.destroy_process_group()


def test_a_state_that_was_paged_is_an_ordinary_one_when_it_is_loaded(tmp_path: Path) -> None:
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

"""Shards that are written beside the training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from indictune.errors import UserError
from indictune.strategy.launch import Launch
from indictune.strategy.shards import check_async_save, copied


@pytest.mark.parametrize(
    ("strategy", "world_size", "method", "kind", "reason"),
    [
        ("ddp", 8, "full", "", "this run is ddp on 8 process(es), whose checkpoints are no shards. Leave it out, or"),
        ("zero3", 8, "full", "", "this run is zero3 on 8 process(es)"),
        ("fsdp2", 1, "full", "", "this run is fsdp2 on 1 process(es)"),
        ("fsdp2", 8, "lora", "", "--method lora saves an adapter, which is too small to gain by it"),
        ("fsdp2", 8, "full", "FULL_STATE_DICT", "fsdp_state_dict_type is FULL_STATE_DICT"),
    ],
)
def test_what_writes_no_shards_is_refused(strategy: str, world_size: int, method: str, kind: str, reason: str) -> None:
    with pytest.raises(UserError) as raised:
        check_async_save(Launch(strategy, world_size), method, {"FSDP_STATE_DICT_TYPE": kind})
    assert raised.value.message.startswith(f"--async_save true: {reason}")
    assert "Leave it out, or " in raised.value.message


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_offload"])
def test_shards_are_written_beside_the_training(strategy: str) -> None:
    check_async_save(Launch(strategy, 2), "full", {})


def test_copies_stay_as_they_were_when_the_training_goes_on() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    step()
    weight, average = model.weight.detach().clone(), optimizer.state[model.weight]["exp_avg"].clone()
    copies = copied(model, optimizer)
    step()
    assert not model.weight.equal(weight)
    assert copies["pytorch_model_fsdp_0"]["model"]["weight"].equal(weight)
    assert copies["optimizer_0"]["optimizer"]["state"]["weight"]["exp_avg"].equal(average)

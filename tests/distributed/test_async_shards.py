"""Shards that are written while training continues."""

from __future__ import annotations

import torch
from torch import nn

from indictune.checkpoint.model_state import copy_shards


def test_copies_stay_as_they_were_when_the_training_goes_on() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    step()
    weight, average = model.weight.detach().clone(), optimizer.state[model.weight]["exp_avg"].clone()
    copies = copy_shards(model, optimizer)
    step()
    assert not model.weight.equal(weight)
    assert copies["pytorch_model_fsdp_0"]["model"]["weight"].equal(weight)
    assert copies["optimizer_0"]["optimizer"]["state"]["weight"]["exp_avg"].equal(average)

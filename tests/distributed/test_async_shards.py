"""Shards that are written beside the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from indictune.config.plan import Launch
from indictune.distributed.async_shards import SHARDED, check_kept_in_shards, copied
from indictune.distributed.sharding import EFFICIENT
from indictune.errors import UserError

FULL = "FULL_STATE_DICT"
REFUSED = "FSDP would save a FULL_STATE_DICT, from which no other launch could go on. Ask for SHARDED_STATE_DICT"
BY_FLAG = """by --fsdp_config '{"state_dict_type": "SHARDED_STATE_DICT"}'"""
AFTER = "; the final model is one file all the same."


@pytest.mark.parametrize(
    ("in_config", "by_flags", "told"),
    [
        (FULL, None, f"fsdp_state_dict_type: {REFUSED} in the accelerate config{AFTER}"),
        (FULL, {}, f"fsdp_state_dict_type: {REFUSED} in the accelerate config{AFTER}"),
        (None, {"fsdp": "full_shard"}, f"--fsdp: {REFUSED} {BY_FLAG}{AFTER}"),  # the default (transformers 5.23)
        (FULL, {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": SHARDED}}, None),
        (SHARDED, {}, None),
        ("sharded_state_dict", {}, None),
        ("3", None, None),
        (None, None, None),
    ],
)
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_offload", "ddp"])
def test_checkpoints_that_are_no_shards_are_refused_under_fsdp(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    in_config: str | None,
    by_flags: dict[str, Any] | None,
    told: str | None,
) -> None:
    monkeypatch.setenv(EFFICIENT, "false")  # which the arguments set too
    environ = {} if in_config is None else {"FSDP_STATE_DICT_TYPE": in_config}
    args = None if by_flags is None else TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **by_flags)
    if told is None or strategy == "ddp":
        check_kept_in_shards(Launch(strategy, 2), environ, args)
        return
    with pytest.raises(UserError) as raised:
        check_kept_in_shards(Launch(strategy, 2), environ, args)
    assert raised.value.problems == [told]


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

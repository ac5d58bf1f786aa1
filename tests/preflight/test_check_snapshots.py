"""Snapshots need room in the memory of a node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import BertConfig

from indictune.checkpoint import snapshots
from indictune.config.plan import Launch
from indictune.models.config_shapes import meta_model
from indictune.planning import hardware
from indictune.preflight import checks
from tests.plans import codes_of, plan_of

CONFIG = BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)


@pytest.mark.parametrize(
    ("launch", "held", "of_parameter"),
    [
        (Launch("single"), 2, 12),  # bytes of a weight, and of two states of AdamW
        (Launch("fsdp2", 2, 2), 2, 12),
        (Launch("ddp", 4, 2), 4, 12),  # two nodes: each has those of the other too
        (Launch("fsdp2", 4, 2), 2, 12),  # each writes half
        (Launch("zero3", 2, 2), 2, 16),  # DeepSpeed's fp32 copies too
    ],
    ids=str,
)
def test_a_node_without_room_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launch: Launch, held: int, of_parameter: int
) -> None:
    given = plan_of({"snapshot_steps": 5}, launch=launch, output_dir=str(tmp_path))
    plan = replace(given, model_config=CONFIG, head="ForSequenceClassification")
    needed = held * of_parameter * meta_model(plan.model, CONFIG, plan.head).counts.total
    for free, found in ((needed, []), (needed - 1, [("no-room-for-snapshots", "--snapshot_steps")])):
        monkeypatch.setattr(hardware, "free_and_capacity", lambda free=free: (free, free))
        assert codes_of(checks.check_snapshots, plan) == found
    monkeypatch.setattr(snapshots, "MEMORY", tmp_path / "none")
    assert codes_of(checks.check_snapshots, plan) == [("no-room-for-snapshots", "--snapshot_steps")]
    assert checks.check_snapshots(replace(plan, training=plan_of().training)) == []


def test_snapshots_are_written_in_the_background_already(tmp_path: Path) -> None:
    given = plan_of({"snapshot_steps": 5, "async_save": True}, output_dir=str(tmp_path))
    plan = replace(given, model_config=CONFIG, head="ForSequenceClassification")
    assert codes_of(checks.check_snapshots, plan) == [("no-effect", "--async_save")]

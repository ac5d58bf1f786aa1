"""A run says where it trains, and asks before it trains for hours on the CPU what is meant for GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import BertConfig, LlamaConfig, PreTrainedConfig

from indictune.config.arguments import ModelArguments
from indictune.config.plan import AnyPlan, Launch
from indictune.distributed.devices import check_cpu_time, meta_of, missing_gpu, slow_bf16, where_it_runs
from indictune.errors import problems_of
from indictune.models.config_shapes import meta_model
from indictune.preflight.checks import dropout_note
from tests.conftest import FinishedRun
from tests.models.tiny import words_tokenizer
from tests.plans import plan_of
from tests.ranks.launching import SCRIPT, python, start

LARGE = BertConfig(vocab_size=128)  # 12 layers of 768: 86 million parameters
SMALL = BertConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
DDP = Launch("ddp", world_size=2, local_world_size=2)


def plan_for(config: PreTrainedConfig, training: dict[str, Any] | None = None, **more: Any) -> AnyPlan:
    return replace(plan_of(training, **more), model_config=config, head="ForSequenceClassification")


def test_the_first_line_names_device_type_and_strategy(finished_run: FinishedRun) -> None:
    assert finished_run.stderr.splitlines()[0] == "Training on the CPU: one process, float32"


def test_the_metrics_name_devices_and_type(finished_run: FinishedRun) -> None:
    metrics = finished_run.metrics
    assert (metrics["devices"], metrics["dtype"]) == ({"CPU": 1}, "float32")
    assert (metrics["strategy"], metrics["world_size"]) == ("single", 1)


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        (plan_of({"bf16": True}, launch=DDP), "Training on the CPU: 2 processes, bf16, strategy ddp"),
        (plan_of({"bf16": True}, launch=DDP, gpus=2), "Training on 2 x NVIDIA H100 (bf16), strategy ddp"),
        (plan_of({"fp16": True}, gpus=4), "Training on 1 x NVIDIA H100 (fp16)"),
        (plan_of(model={"device_map": "auto"}, gpus=4), "Training on 4 x NVIDIA H100 (float32)"),
    ],
)
def test_gpus_are_counted(plan: AnyPlan, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    assert where_it_runs(plan) == line


@pytest.mark.parametrize(
    ("plan", "mark"),
    [
        (plan_for(LARGE, {"bf16": True}), "(bf16)"),
        (plan_for(LARGE, model={"method": "qlora"}), "(--method qlora)"),
        (plan_for(LARGE, launch=DDP), "(strategy ddp)"),
        (plan_for(LARGE), None),  # written for any machine
        (plan_for(LARGE, {"bf16": True}, gpus=1), None),
        (plan_for(SMALL, {"bf16": True}, launch=DDP), None),
    ],
)
def test_a_large_recipe_for_gpus_warns_in_capitals_without_one(plan: AnyPlan, mark: str | None) -> None:
    warning = missing_gpu(plan)
    assert (mark in warning and warning.startswith("NO GPU WAS FOUND")) if mark else warning == ""


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (plan_for(LARGE, launch=DDP), True),
        (plan_for(LARGE), False),  # one process
        (plan_for(LARGE, launch=DDP, model={"dropout": 0.0}), False),
        (replace(plan_of(launch=DDP), model_config=LlamaConfig(), head="ForCausalLM"), False),
        (replace(plan_of(launch=DDP, model={"method": "lora"}), model_config=LlamaConfig(), head="ForCausalLM"), True),
    ],
)
def test_several_processes_are_told_of_dropout(plan: AnyPlan, told: bool) -> None:
    assert ("--dropout 0" in dropout_note(plan)) == told


@pytest.mark.parametrize(
    ("plan", "seconds_in_bf16", "told"),
    [
        (plan_of({"bf16": True}), 2.0, "at 0.5 of its speed"),
        (plan_of({"bf16": True}), 0.5, ""),
        (plan_of({"bf16": True}, gpus=1), 2.0, ""),
        (plan_of(), 2.0, ""),
    ],
)
def test_a_cpu_that_multiplies_slower_in_bf16_says_so(
    plan: AnyPlan, seconds_in_bf16: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speed(dtype: torch.dtype = torch.float32) -> float:
        return 1 / seconds_in_bf16 if dtype == torch.bfloat16 else 1.0

    monkeypatch.setattr("indictune.distributed.devices.operations_per_second", speed)
    assert told in slow_bf16(plan)
    assert (slow_bf16(plan) == "") == (told == "")


def test_of_an_adapter_the_trained_parameters_are_counted() -> None:
    plan = plan_for(LARGE, {"bf16": True}, model={"method": "lora"})
    meta = meta_of(plan)
    assert meta is not None
    assert meta.counts.trained < meta.counts.total / 10
    assert f" {meta.counts.trained:,} OF {meta.counts.total:,} PARAMETERS TRAIN" in missing_gpu(plan)


def hours_of(plan: AnyPlan) -> float:
    """That a CPU would take."""
    (problem,) = problems_of(check_cpu_time, plan, ROWS)
    return float(problem.details["hours"].replace(",", ""))


def test_bf16_is_taken_for_no_faster_than_fp32() -> None:
    """One product is, up to ten times where a CPU has units for it; a step of SmolLM2-135M is not."""
    fp32 = {**LONG, "bf16": False}
    assert hours_of(plan_for(LARGE, LONG)) > hours_of(plan_for(LARGE, fp32, launch=Launch("ddp", 4)))  # a quarter


def test_a_token_is_multiplied_by_the_layers_and_the_output() -> None:
    sizes: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    for tied in (True, False):
        config = LlamaConfig(num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)
        counts = meta_model(ModelArguments(), config, "ForCausalLM").counts
        layers = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
        assert (counts.multiplied, counts.looked_up) == (layers + 64_000, 0 if tied else 64_000)


ROWS = Dataset.from_dict({"length": [20] * 10})
LONG: dict[str, Any] = {"bf16": True, "num_train_epochs": 1e7}


@pytest.mark.parametrize(
    ("plan", "asks"),
    [
        (plan_for(LARGE, LONG), True),
        (plan_for(SMALL, {**LONG, "num_train_epochs": 1e12}), True),
        (plan_for(LARGE, {**LONG, "allow_cpu": True}), False),
        (plan_for(LARGE, {**LONG, "bf16": False}), False),
        (plan_for(LARGE, {**LONG, "num_train_epochs": 1}), False),
        (plan_for(LARGE, LONG, gpus=1), False),
    ],
)
def test_only_hours_of_what_is_meant_for_gpus_are_asked_for(plan: AnyPlan, asks: bool) -> None:
    assert [each.code for each in problems_of(check_cpu_time, plan, ROWS)] == (["cpu-for-hours"] if asks else [])


def test_the_run_warns_first_and_asks_before_it_reads_weights(tmp_path: Path) -> None:
    """There are none."""
    model = tmp_path / "model"
    LARGE.save_pretrained(model)
    (model / "model.safetensors").touch()
    words_tokenizer().save_pretrained(model)
    rows = [{"text": f"ok {number} .", "label": "ab"[number % 2]} for number in range(10)]
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    flags = ("--output_dir", str(tmp_path / "out"), "--train_file", str(tmp_path / "t.jsonl"), "--bf16", "true")
    long = ("--max_unknown_share", "1", "--num_train_epochs", "1000000", "--model_name_or_path", str(model))
    result = start([*python(), SCRIPT, *flags, *long])
    first, second, *_ = result.stderr.splitlines()
    assert first.startswith("warning: NO GPU WAS FOUND")
    assert second == "Training on the CPU: one process, bf16"
    status = json.loads((tmp_path / "out/status.json").read_text(encoding="utf-8"))
    assert status["state"] == "user_error"
    assert status["message"].endswith("or give --allow_cpu. [cpu-for-hours]")

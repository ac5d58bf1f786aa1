"""What cannot run in a pipeline is refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AlbertConfig, BertConfig, LlamaConfig, PreTrainedConfig, XLNetConfig

from indictune.config.arguments import IndicTrainingArguments, SentimentTrainingArguments
from indictune.config.chat_arguments import LlamaTrainingArguments
from indictune.config.plan import Axes, Launch
from indictune.distributed.launch import read_launch
from indictune.distributed.pipeline.layout import check_pipeline
from indictune.distributed.strategy import notes_on_file
from indictune.errors import Problem
from tests.launch_environment import RANK_1_OF_2
from tests.plans import codes, plan_of
from tests.refusals import refused


def found(
    stages: int = 4,
    config: PreTrainedConfig | None = None,
    steps: int | None = 8,
    model: dict[str, Any] | None = None,
    arguments: type[IndicTrainingArguments] = SentimentTrainingArguments,
    sharded: bool = False,
    **training: Any,
) -> list[Problem]:
    """Problems of BERT with 12 layers, or of another model."""
    launch = Launch("pipeline", stages, stages, axes=Axes(pipeline=stages, is_sharded=sharded))
    plan = plan_of(training=training, model=model, launch=launch, steps=steps, arguments=arguments)
    return check_pipeline(replace(plan, model_config=config or BertConfig()))


def test_a_bert_of_twelve_layers_has_up_to_twelve_stages() -> None:
    assert found(12) == found(6, steps=12, pipeline_schedule="interleaved") == []


@pytest.mark.parametrize(
    ("stages", "schedule", "numbers"), [(13, "1f1b", ["13", "12"]), (7, "interleaved", ["7", "2 stage", "12", "6"])]
)
def test_each_stage_needs_a_layer(stages: int, schedule: str, numbers: list[str]) -> None:
    (only,) = found(stages, steps=stages, pipeline_schedule=schedule)
    assert (only.code, only.flag) == ("more-stages-than-layers", "--num_processes")
    assert all(number in str(only) for number in numbers)


@pytest.mark.parametrize(("steps", "fits"), [(8, True), (6, False), (None, True)])  # None: not known yet
def test_interleaved_stages_need_whole_groups_of_micro_batches(steps: int | None, fits: bool) -> None:
    expected = [] if fits else [("interleaved-micro-batches", "--pipeline_schedule")]
    assert codes(found(steps=steps, pipeline_schedule="interleaved")) == expected
    assert found(steps=steps) == []


@pytest.mark.parametrize("config", [AlbertConfig(), XLNetConfig()])
def test_models_without_a_known_list_of_layers_are_refused(config: PreTrainedConfig) -> None:
    assert codes(found(config=config)) == [("model-without-stages", "--model_name_or_path")]


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_tied_to_its_embedding_is_not_split_in_stages(is_tied: bool) -> None:
    launch = Launch("3d", 4, 4, axes=Axes(pipeline=2, tensor=2))
    plan = replace(plan_of(launch=launch), model_config=LlamaConfig(tie_word_embeddings=is_tied), head="ForCausalLM")
    assert codes(check_pipeline(plan)) == [("model-without-stages", "--model_name_or_path")] * is_tied


def test_models_with_their_own_code_are_refused() -> None:
    config = BertConfig()
    config.update({"auto_map": {"AutoModelForSequenceClassification": "modeling.Own"}})
    expected = [("model-without-stages", "--model_name_or_path")]
    assert codes(found(config=config, model={"trust_remote_code": True})) == expected


@pytest.mark.parametrize(
    ("flag", "value"),
    [("fp16", True), ("torch_compile", True), ("reduce_dtype", "bfloat16"), ("optim", "lomo")],
)
def test_flags_that_stages_do_not_have(flag: str, value: Any) -> None:
    assert codes(found(**{flag: value})) == [("not-in-a-pipeline", f"--{flag}")]


def test_more_flags_that_stages_do_not_have() -> None:
    assert codes(found(model={"modules_to_save": ["lm_head"]})) == [("not-in-a-pipeline", "--modules_to_save")]
    offloaded = found(arguments=LlamaTrainingArguments, activation_offloading=True)
    assert codes(offloaded) == [("not-in-a-pipeline", "--activation_offloading")]


@pytest.mark.parametrize(("flag", "value"), [("pipeline_schedule", "interleaved"), ("optim", "adafactor")])
def test_flags_that_shards_of_stages_do_not_have(flag: str, value: Any) -> None:
    assert found(**{flag: value}) == []
    assert codes(found(sharded=True, **{flag: value})) == [("not-in-a-pipeline", f"--{flag}")]


def test_shards_of_stages_are_not_packed() -> None:
    assert codes(found(sharded=True, model={"method": "qlora"})) == [("not-in-a-pipeline", "--method")]


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (
            {"MEGATRON_LM_TP_DEGREE": "2", "MEGATRON_LM_USE_CUSTOM_FSDP": "true", "WORLD_SIZE": "8"},
            "megatron_lm_use_custom_fsdp: true with megatron_lm_tp_degree: 2",
        ),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "zero2"),
    ],
)
def test_what_a_file_asks_for_inside_stages(variables: dict[str, str], named: str) -> None:
    stages = {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_PP_DEGREE": "2"}
    with refused("strategy-file-not-supported", named):
        read_launch({**RANK_1_OF_2, **stages, **variables})


def test_a_schedule_without_stages_is_reported() -> None:
    assert any("--pipeline_schedule" in each for each in notes_on_file(plan_of({"pipeline_schedule": "gpipe"})))
    launch = Launch("pipeline", 2, 2, axes=Axes(pipeline=2))
    assert notes_on_file(plan_of({"pipeline_schedule": "gpipe"}, launch=launch)) == []

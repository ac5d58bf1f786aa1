"""What follows from launch, machine and recipe together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, LlamaConfig, PreTrainedConfig

from indictune.config.arguments import ModelArguments, SentimentTrainingArguments
from indictune.config.plan import AnyPlan, unresolved
from indictune.config.recipe import read_recipe
from indictune.errors import Problem
from indictune.preflight.derive import make_plan
from indictune.tasks.chat import Chat
from indictune.tasks.classification import Classification
from tests.plans import codes

TWO_RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


class Tiny(Classification):
    """Of a model that no file has."""

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return BertConfig()


def made(*argv: str, **environ: str) -> tuple[AnyPlan, list[Problem]]:
    recipe = read_recipe(["--output_dir", "out", "--dataset_name", "builtin:tweets", *argv], Tiny.arguments)
    return make_plan(recipe, environ, Tiny())


class TinyChat(Chat):
    """Of a language model that no file has."""

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return LlamaConfig()


@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        (["--method", "lora"], 2e-4),
        (["--method", "qlora"], 2e-4),
        (["--method", "full"], 2e-5),
        ([], 2e-5),
        (["--method", "lora", "--learning_rate", "3e-5"], 3e-5),
    ],
)
def test_an_adapter_of_a_language_model_learns_ten_times_as_fast(flags: list[str], rate: float) -> None:
    recipe = read_recipe(["--output_dir", "out", "--dataset_name", "builtin:chats", *flags], Chat.arguments)
    plan, _ = make_plan(recipe, {}, TinyChat())
    assert plan.training.learning_rate == rate
    assert made("--method", "lora")[0].training.learning_rate == made()[0].training.learning_rate


@pytest.mark.parametrize(("ranks", "strategy", "steps"), [(1, "single", 6), (3, "ddp", 2)])
def test_accumulation_follows_from_the_launch(ranks: int, strategy: str, steps: int) -> None:
    environ = TWO_RANKS | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)} if ranks > 1 else {}
    plan, problems = made("--global_batch_size", "48", "--per_device_train_batch_size", "8", **environ)
    assert problems == []
    assert (plan.launch.strategy, plan.launch.world_size) == (strategy, ranks)
    assert plan.training.gradient_accumulation_steps == plan.derived["gradient_accumulation_steps"] == steps


def test_another_accumulation_is_refused() -> None:
    _, problems = made("--gradient_accumulation_steps", "3")
    assert codes(problems) == [("accumulation-is-derived", "--gradient_accumulation_steps")]


@pytest.mark.parametrize(
    ("metric", "greater"),
    [("ece", False), ("eval_ece", False), ("f1_positive", None), ("f1_loss", True), ("loss", None)],
)
def test_the_lowest_calibration_error_is_the_best(metric: str, greater: bool | None) -> None:
    plan, problems = made("--metric_for_best_model", metric)
    assert problems == []
    assert plan.training.greater_is_better is greater


@pytest.mark.parametrize(
    ("metric", "right"), [("macro_f1", "true"), ("loss", "false"), ("ece", "false"), ("eval_f1_positive", "true")]
)
def test_the_worst_checkpoint_is_never_the_best(metric: str, right: str) -> None:
    wrong = "false" if right == "true" else "true"
    flags = ("--metric_for_best_model", metric, "--greater_is_better")
    assert made(*flags, right)[1] == []
    assert codes(made(*flags, wrong)[1]) == [("worst-as-best", "--greater_is_better")]


@pytest.mark.parametrize("has_tf32", [True, False])
@pytest.mark.parametrize(
    ("flags", "tf32"),
    [
        (("--bf16", "true"), True),
        (("--bf16", "true", "--torch_compile", "true"), True),
        (("--torch_compile", "true"), False),
        (("--torch_compile_mode", "max-autotune"), False),
        ((), None),
    ],
)
def test_half_precision_uses_tf32_and_a_compiled_model_in_fp32_does_not(
    monkeypatch: pytest.MonkeyPatch, has_tf32: bool, flags: tuple[str, ...], tf32: bool | None
) -> None:
    """A T4 and a V100 have no TF32, and transformers refuses the flag there."""
    monkeypatch.setattr("indictune.distributed.devices.is_torch_tf32_available", lambda: has_tf32)
    assert made(*flags)[0].derived.get("tf32") is (tf32 if has_tf32 else None)
    assert "tf32" not in made(*flags, "--tf32", "true")[0].derived


def test_an_unreadable_launch_is_a_problem_of_a_complete_plan() -> None:
    plan, problems = made("--deepspeed", "no.json", **TWO_RANKS)
    assert len(problems) == 1
    assert problems[0].flag == "--deepspeed"
    assert (plan.launch.is_known, plan.launch.world_size) == (False, 2)


def test_values_that_are_refused_stay_in_the_plan() -> None:
    plan, problems = made("--lora_r", "0", "--method", "lora")
    assert codes(problems) == [("expected-at-least", "--lora_r")]
    assert (plan.model.lora_r, plan.model.method) == (0, "lora")


def test_the_training_arguments_of_a_plan_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SentimentTrainingArguments, "__post_init__", lambda _: pytest.fail("completed"))
    plan, _ = made()
    assert plan.training.seed == 42
    assert plan.output_dir == Path("out")


def test_every_field_has_its_value() -> None:
    values: dict[str, Any] = vars(unresolved(SentimentTrainingArguments, {"seed": 7}))
    assert values["seed"] == 7
    assert values["report_to"] == ["none"]
    assert {"learning_rate", "fsdp", "active_vocabulary"} < values.keys()

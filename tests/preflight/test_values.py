"""Values that a run would fail on late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import BertConfig

from indictune.config.arguments import DataArguments, IndicTrainingArguments, SentimentTrainingArguments
from indictune.config.chat_arguments import LlamaTrainingArguments
from indictune.config.plan import unresolved
from indictune.preflight.values import check_metric, check_values
from indictune.tasks.chat import Chat
from indictune.tasks.classification import Classification
from indictune.tasks.protocol import Task
from indictune.tasks.tokens import TokenClassification
from tests.plans import codes, codes_of, plan_of

BOTH = [SentimentTrainingArguments, LlamaTrainingArguments]


@pytest.mark.parametrize("arguments", BOTH)
def test_the_defaults_pass(arguments: type[IndicTrainingArguments]) -> None:
    plan = plan_of(arguments=arguments)
    assert check_values(plan) == []


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("global_batch_size", 0, "expected-at-least"),
        ("per_device_train_batch_size", -1, "expected-at-least"),
        ("per_device_eval_batch_size", 0, "expected-at-least"),
        ("max_tokens_per_device", 0, "expected-at-least"),
        ("eval_accumulation_steps", 0, "expected-at-least"),
        ("early_stopping_patience", 0, "expected-at-least"),
        ("learning_rate", -1.0, "expected-at-least"),
        ("learning_rate", float("nan"), "expected-at-least"),
        ("weight_decay", -0.1, "expected-at-least"),
        ("warmup_steps", -1.0, "expected-at-least"),
        ("ddp_timeout", 0, "expected-at-least"),
        ("dataloader_num_workers", -1, "expected-at-least"),
        ("dataloader_prefetch_factor", 0, "expected-at-least"),
        ("seed", -1, "expected-at-least"),
        ("save_total_limit", 0, "expected-at-least"),
        ("num_train_epochs", 0.0, "nothing-to-train"),
        ("max_steps", 0, "nothing-to-train"),
        ("label_smoothing_factor", 1.0, "share-expected"),
    ],
)
def test_a_value_out_of_its_range_is_refused(name: str, value: object, code: str) -> None:
    assert codes_of(check_values, plan_of({name: value})) == [(code, f"--{name}")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_needs_a_gpu_is_refused_without_one() -> None:
    given = {"use_liger_kernel": True, "activation_offloading": True}
    assert codes_of(check_values, plan_of(given, arguments=LlamaTrainingArguments)) == [
        ("liger-kernel-missing", "--use_liger_kernel"),
        ("activation-offloading-without-gpu", "--activation_offloading"),
    ]


@pytest.mark.parametrize(
    ("task", "metric", "is_known"),
    [
        (Classification(), "macro_f1", True),
        (Classification(), "eval_macro_f1_ta", True),
        (Classification(), "f1_positive", True),
        (Classification(), "eval_ece", True),
        (Classification(), "recall_positive", True),
        (Classification(), "macro_recall_romanised", True),
        (Classification(), "f1", False),
        (Chat(), "eval_loss", True),
        (Chat(), "answer_token_accuracy", True),
        (Chat(), "loss_hi", True),
        (Chat(), "macro_f1", False),
        (Chat(), "macro_f1_hi", False),
        (TokenClassification(), "f1", True),
        (TokenClassification(), "precision_PER", True),
        (TokenClassification(), "macro_f1", False),
    ],
)
def test_checkpoints_are_compared_by_the_metrics_of_the_task(
    task: Task[Any, Any, Any], metric: str, is_known: bool
) -> None:
    plan = plan_of({"metric_for_best_model": metric}, arguments=task.arguments[-1])
    assert codes(check_metric(plan, task)) == ([] if is_known else [("metric-unknown", "--metric_for_best_model")])


def test_flags_of_another_problem_type_are_named_with_their_values() -> None:
    plan: Any = plan_of({"class_weights": "balanced", "label_smoothing_factor": 0.1})
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    plan = replace(plan, data=unresolved(DataArguments, {"problem_type": "regression"}), model_config=config)
    assert [str(each).partition(" Leave")[0] for each in Classification().check(plan)] == [
        "--class_weights balanced has no effect with --problem_type regression.",
        "--label_smoothing_factor 0.1 has no effect with --problem_type regression.",
    ]

"""Values that a run would fail on late."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from indictune.config.arguments import IndicTrainingArguments, SentimentTrainingArguments
from indictune.config.chat_arguments import LlamaTrainingArguments
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
    plan = plan_of({"metric_for_best_model": metric}, arguments=task.training_arguments)
    assert codes(check_metric(plan, task)) == ([] if is_known else [("metric-unknown", "--metric_for_best_model")])

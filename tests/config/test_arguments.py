"""What a run is: ranges, combinations, and settings that must stay as they are."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.select_algorithm import create_precompile_key

from indictune.config.arguments import (
    DataArguments,
    IndicTrainingArguments,
    ModelArguments,
    SentimentTrainingArguments,
)
from indictune.config.chat_arguments import LlamaTrainingArguments
from indictune.config.shared_arguments import EvaluationArguments, TextArguments
from indictune.errors import Problem, UserError
from tests.plans import codes


def problems_of(make: Callable[..., Any], **values: Any) -> list[Problem]:
    with pytest.raises(UserError) as raised:
        make(**values)
    return raised.value.problems


@pytest.mark.parametrize("arguments", [ModelArguments, TextArguments, DataArguments, EvaluationArguments])
def test_every_field_of_ours_has_a_help_text(arguments: type[Any]) -> None:
    fields = dataclasses.fields(arguments)
    assert len(fields) >= 4
    for field in fields:
        assert field.metadata["help"].endswith("."), field.name


def test_every_training_field_that_we_add_or_change_has_a_help_text() -> None:
    ours = {**IndicTrainingArguments.__annotations__, **SentimentTrainingArguments.__annotations__}
    assert "global_batch_size" in ours
    for field in dataclasses.fields(SentimentTrainingArguments):
        if field.name in ours:
            assert field.metadata["help"].endswith("."), field.name


class TestModelArguments:
    @pytest.mark.parametrize("dropout", [0.0, 0.5, 0.999])
    def test_dropout_is_a_probability_below_one(self, dropout: float) -> None:
        assert ModelArguments(dropout=dropout, lora_dropout=dropout).dropout == dropout

    @pytest.mark.parametrize("dropout", [-0.1, 1.0])
    def test_other_dropouts_are_refused(self, dropout: float) -> None:
        assert codes(problems_of(ModelArguments, dropout=dropout)) == [("share-expected", "--dropout")]

    def test_lora_has_at_least_one_rank(self) -> None:
        assert ModelArguments(lora_r=1, lora_alpha=1).lora_r == 1
        assert codes(problems_of(ModelArguments, lora_r=0)) == [("expected-at-least", "--lora_r")]

    def test_all_problems_come_at_once(self) -> None:
        problems = problems_of(ModelArguments, dropout=2.0, lora_dropout=-1.0, lora_r=0, lora_alpha=-2)
        assert {each.flag for each in problems} == {"--dropout", "--lora_dropout", "--lora_r", "--lora_alpha"}


class TestDataArguments:
    def test_three_tokens_are_the_least(self) -> None:
        assert TextArguments(max_length=3).max_length == 3
        assert codes(problems_of(TextArguments, max_length=2)) == [("expected-at-least", "--max_length")]

    def test_rows_come_from_one_source(self) -> None:
        found = problems_of(DataArguments, dataset_name="owner/set", train_file="a.csv")
        assert codes(found) == [("two-data-sources", "--dataset_name")]

    def test_a_run_needs_training_rows(self) -> None:
        assert codes(problems_of(DataArguments)) == [("no-training-rows", "--train_file")]
        assert codes(problems_of(DataArguments, test_file="c.csv")) == [("no-training-rows", "--train_file")]

    def test_a_configuration_needs_its_dataset(self) -> None:
        found = problems_of(DataArguments, train_file="a.csv", dataset_config_name="hi")
        assert codes(found) == [("dataset-config-without-name", "--dataset_config_name")]

    def test_a_dataset_may_have_other_validation_and_test_rows(self) -> None:
        args = DataArguments(
            dataset_name="owner/set", dataset_config_name="hi", validation_file="v.csv", test_file="t"
        )
        assert (args.dataset_name, args.validation_file, args.test_file) == ("owner/set", "v.csv", "t")

    def test_all_problems_come_at_once(self) -> None:
        problems = problems_of(DataArguments, max_length=1, dataset_config_name="hi")
        assert [each.flag for each in problems] == ["--max_length", "--train_file", "--dataset_config_name"]


class TestTrainingArguments:
    def test_our_defaults(self) -> None:
        args = SentimentTrainingArguments(output_dir="out", use_cpu=True)
        assert args.metric_for_best_model == "macro_f1"
        assert args.greater_is_better is True
        assert args.load_best_model_at_end is True
        assert (args.eval_strategy, args.save_strategy) == ("epoch", "epoch")
        assert args.logging_nan_inf_filter is False
        assert args.report_to == []
        assert args.global_batch_size == 64


# Of a matrix product that several kernels can compute.
COMPILED_WITH_TF32 = """
from torch._inductor.select_algorithm import create_precompile_key
from transformers.utils.import_utils import enable_tf32
enable_tf32(True)
create_precompile_key("mm", "", [])
"""


@pytest.mark.slow
def test_torch_does_not_compile_for_tf32_as_transformers_sets_it() -> None:
    """torch 2.13, transformers 5.23. When this fails, `IndicTrainingArguments.__post_init__` can go.

    In a separate process: a process that has read the older setting never mixes the two.
    """
    done = subprocess.run([sys.executable, "-c", COMPILED_WITH_TF32], capture_output=True, text=True, check=False)
    assert "mix of the legacy and new APIs" in done.stderr


@pytest.mark.usefixtures("tf32_as_before")
@pytest.mark.parametrize("arguments", [SentimentTrainingArguments, LlamaTrainingArguments])
def test_torch_compiles_for_tf32(
    arguments: type[IndicTrainingArguments], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)  # which is asked of a GPU
    arguments(str(tmp_path), use_cpu=True, bf16=True, tf32=True)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert "high" in create_precompile_key("mm", "", [])

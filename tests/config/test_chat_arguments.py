"""What a run of a LLaMA model is: ranges, and what of TRL's own fields is a flag."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl.trainer.sft_config import SFTConfig

from indictune.config.arguments import IndicTrainingArguments, ModelArguments, SourceArguments
from indictune.config.chat_arguments import ChatArguments, ChatDataArguments, LlamaTrainingArguments
from indictune.config.recipe import read_recipe, resolved
from indictune.errors import Problem, UserError
from indictune.training.chat_trainer import for_trl
from tests.plans import codes

RUN = (ModelArguments, ChatDataArguments, LlamaTrainingArguments)

# What TRL would do to rows and models, which is done before it gets them.
NO_FLAGS = [
    *("model_init_kwargs", "router_aux_loss_coef", "chat_template_path", "dataset_text_field", "dataset_kwargs"),
    *("dataset_num_proc", "eos_token", "truncation_mode", "shuffle_dataset", "packing_strategy", "padding_free"),
    *("pad_to_multiple_of", "eval_packing", "completion_only_loss", "assistant_only_loss", "loss_type", "pad_token"),
    "label_smoothing_factor",
]


def problems_of(**values: Any) -> list[Problem]:
    with pytest.raises(UserError) as raised:
        ChatDataArguments(**values)
    return raised.value.problems


@pytest.mark.parametrize("arguments", [ChatArguments, SourceArguments, ChatDataArguments])
def test_every_field_of_ours_has_a_help_text(arguments: type[Any]) -> None:
    fields = dataclasses.fields(arguments)
    assert len(fields) >= 3
    for field in fields:
        assert field.metadata["help"].endswith("."), field.name


def test_every_training_field_that_we_add_or_change_has_a_help_text() -> None:
    ours = {**IndicTrainingArguments.__annotations__, **LlamaTrainingArguments.__annotations__}
    fields = [field for field in dataclasses.fields(LlamaTrainingArguments) if field.name in ours and field.init]
    assert {"global_batch_size", "learning_rate", "activation_offloading"} <= {field.name for field in fields}
    for field in fields:
        assert field.metadata["help"].endswith("."), field.name


class TestFlags:
    @pytest.mark.parametrize("name", NO_FLAGS)
    def test_trls_preparation_of_rows_is_no_flag(self, name: str) -> None:
        assert name in {field.name for field in dataclasses.fields(SFTConfig)}
        (problem,) = read_recipe([f"--{name}", "1"], RUN).problems
        assert (problem.code, problem.flag) == ("unknown-name", f"--{name}")

    def test_every_field_that_trl_adds_is_a_flag_or_fixed(self) -> None:
        """A field of a later version shows up here, so that somebody decides what it is."""
        base = {field.name for field in dataclasses.fields(IndicTrainingArguments)}
        added = {field.name for field in dataclasses.fields(SFTConfig)} - base
        ours = {"trust_remote_code", "packing", "max_length"}  # read by ModelArguments and ChatDataArguments
        assert added - set(NO_FLAGS) - ours == {"activation_offloading"}

    def test_names_that_trl_has_too_are_read_as_ours(self) -> None:
        recipe = read_recipe(
            ["--packing", "--max_length", "99", "--trust_remote_code", "--train_file", "a.jsonl"], RUN
        )
        assert recipe.problems == []
        data = recipe.build(ChatDataArguments)
        assert (data.packing, data.max_length, recipe.build(ModelArguments).trust_remote_code) == (True, 99, True)
        args = for_trl(recipe.build(LlamaTrainingArguments, output_dir="out", use_cpu=True, bf16=False))
        assert (args.packing, args.max_length, args.trust_remote_code) == (False, None, False)

    def test_trl_gets_rows_that_are_prepared(self, tmp_path: Path) -> None:
        ours = LlamaTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
        args = for_trl(ours)
        assert isinstance(args, SFTConfig)
        assert args.dataset_kwargs == {"skip_prepare_dataset": True}
        assert (args.loss_type, args.label_smoothing_factor, args.shuffle_dataset) == ("nll", 0.0, False)
        assert (args.max_length, args.pad_to_multiple_of, args.router_aux_loss_coef) == (None, None, 0.0)
        off = ("packing", "padding_free", "assistant_only_loss", "trust_remote_code", "eval_packing")
        assert not any(getattr(args, name) for name in (*off, "completion_only_loss", "model_init_kwargs"))
        assert (args.bf16, resolved(args)) == (True, resolved(ours))

    def test_a_run_written_down_reads_back(self, tmp_path: Path) -> None:
        argv = [
            *("--output_dir", "out", "--train_file", "a.jsonl", "--method", "lora", "--use_dora", "--packing"),
            *("--max_length", "77", "--learning_rate", "1e-4", "--use_cpu", "--bf16", "false"),
            *("--modules_to_save", "lm_head", "embed_tokens", "--gradient_checkpointing", "false"),
        ]
        recipe = read_recipe(argv, RUN)
        built = [recipe.build(arguments) for arguments in RUN]
        first = resolved(*built)
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(first), encoding="utf-8")
        again = read_recipe(["--config", str(path), "--use_cpu"], RUN)
        assert again.problems == []
        assert [again.build(arguments) for arguments in RUN[:2]] == built[:2]
        assert resolved(*(again.build(arguments) for arguments in RUN)) == first
        assert (first["max_length"], first["packing"]) == (77, True)
        assert (first["learning_rate"], first["gradient_checkpointing"], first["bf16"]) == (1e-4, False, False)


class TestRanges:
    def test_answers_have_a_number_and_a_length(self) -> None:
        data = ChatDataArguments(train_file="a.jsonl", num_sample_generations=0, max_new_tokens=1)
        assert (data.num_sample_generations, data.max_new_tokens) == (0, 1)
        for name, value in (("num_sample_generations", -1), ("max_new_tokens", 0)):
            found = problems_of(train_file="a.jsonl", **{name: value})
            assert codes(found) == [("expected-at-least", f"--{name}")]

    def test_all_problems_come_at_once(self) -> None:
        problems = problems_of(max_length=0, num_sample_generations=-2, max_new_tokens=-3, dataset_config_name="hi")
        assert {each.flag for each in problems} == {
            *("--max_length", "--train_file", "--dataset_config_name", "--num_sample_generations"),
            "--max_new_tokens",
        }

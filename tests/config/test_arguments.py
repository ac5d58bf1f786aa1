"""What a run is: ranges, combinations, and settings that must stay as they are."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.select_algorithm import create_precompile_key
from transformers.utils.import_utils import enable_tf32

from indictune.config.arguments import (
    FIXED,
    DataArguments,
    IndicTrainingArguments,
    ModelArguments,
    SentimentTrainingArguments,
    TextArguments,
    check_fixed,
)
from indictune.config.chat_arguments import LlamaTrainingArguments
from indictune.config.command_arguments import EvaluateArguments
from indictune.config.recipe import Recipe
from indictune.errors import Problems, UserError
from indictune.preflight.values import check_best, check_evaluations, check_optimizer, check_values


def problems_of(make: Callable[..., Any], **values: Any) -> list[str]:
    with pytest.raises(UserError) as raised:
        make(**values)
    return raised.value.problems


@pytest.mark.parametrize("arguments", [ModelArguments, TextArguments, DataArguments, EvaluateArguments])
def test_every_field_of_ours_says_what_it_is(arguments: type[Any]) -> None:
    fields = dataclasses.fields(arguments)
    assert len(fields) >= 4
    for field in fields:
        assert field.metadata["help"].endswith("."), field.name


def test_every_training_field_that_we_add_or_change_says_what_it_is() -> None:
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
        assert problems_of(ModelArguments, dropout=dropout) == [
            f"--dropout {dropout}: expected a probability from 0 up to, not including, 1."
        ]

    def test_lora_has_at_least_one_rank(self) -> None:
        assert ModelArguments(lora_r=1, lora_alpha=1).lora_r == 1
        assert problems_of(ModelArguments, lora_r=0) == ["--lora_r 0: expected a whole number of at least 1."]

    def test_all_problems_come_at_once(self) -> None:
        problems = problems_of(ModelArguments, dropout=2.0, lora_dropout=-1.0, lora_r=0, lora_alpha=-2)
        assert [problem.partition(" ")[0] for problem in problems] == [
            "--dropout", "--lora_dropout", "--lora_r", "--lora_alpha",
        ]  # fmt: skip


class TestDataArguments:
    def test_three_tokens_are_the_least(self) -> None:
        assert TextArguments(max_length=3).max_length == 3
        assert problems_of(TextArguments, max_length=2) == [
            "--max_length 2: expected at least 3 tokens (two of them are special)."
        ]

    def test_rows_come_from_one_source(self) -> None:
        assert problems_of(DataArguments, dataset_name="owner/set", train_file="a.csv") == [
            "--dataset_name owner/set and --train_file a.csv: rows come from one of them; leave one out."
        ]

    def test_a_run_without_training_rows_is_told_what_to_give(self) -> None:
        told = "No training rows: give --train_file FILE or --dataset_name NAME (a builtin: one needs no file)."
        assert problems_of(DataArguments) == [told]
        assert problems_of(DataArguments, test_file="c.csv") == [
            f"{told} A flag that names rows takes the place of all that the recipe names."
        ]

    def test_a_configuration_needs_its_dataset(self) -> None:
        assert problems_of(DataArguments, train_file="a.csv", dataset_config_name="hi") == [
            "--dataset_config_name hi: has no effect without --dataset_name."
        ]

    def test_a_dataset_may_have_other_validation_and_test_rows(self) -> None:
        args = DataArguments(
            dataset_name="owner/set", dataset_config_name="hi", validation_file="v.csv", test_file="t"
        )
        assert (args.dataset_name, args.validation_file, args.test_file) == ("owner/set", "v.csv", "t")

    def test_all_problems_come_at_once(self) -> None:
        problems = problems_of(DataArguments, max_length=1, dataset_config_name="hi")
        assert [problem.split()[0] for problem in problems] == ["--max_length", "No", "--dataset_config_name"]


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

    def test_the_defaults_are_what_the_exact_batches_rest_on(self) -> None:
        args = SentimentTrainingArguments(output_dir="out", use_cpu=True)
        check_fixed(lambda name: getattr(args, name))

    @pytest.mark.parametrize(
        ("name", "other"),
        [
            ("average_tokens_across_devices", False),
            ("dataloader_drop_last", True),
            ("dataloader_persistent_workers", True),
            ("auto_find_batch_size", True),
            ("train_sampling_strategy", "group_by_length"),
            ("logging_nan_inf_filter", True),
            ("prediction_loss_only", True),
            ("batch_eval_metrics", True),
            ("ignore_data_skip", True),
            ("restore_callback_states_from_checkpoint", False),
            ("save_only_model", True),
            ("save_on_each_node", True),
            ("hub_strategy", "every_save"),
            ("enable_jit_checkpoint", True),
            ("eval_on_start", True),
        ],
    )
    def test_a_setting_that_would_break_them_is_refused(self, name: str, other: object) -> None:
        args = SentimentTrainingArguments(output_dir="out", use_cpu=True)

        def planned(field: str) -> Any:
            return other if field == name else getattr(args, field)

        (problem,) = problems_of(check_fixed, planned=planned)
        value, reason = FIXED[name]
        assert problem == f"--{name} {other}: must stay {value}, because {reason}; leave it out."

    def test_all_of_them_are_told_at_once(self) -> None:
        assert len(problems_of(check_fixed, planned=lambda name: "other")) == len(FIXED) == 18


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("per_device_eval_batch_size", 0),
        ("max_tokens_per_device", 0),
        ("eval_accumulation_steps", 0),
        ("early_stopping_patience", 0),
        ("learning_rate", -1.0),
        ("weight_decay", -0.1),
        ("warmup_steps", -1.0),
        ("learning_rate", float("nan")),
        ("ddp_timeout", 0),
        ("seed", -1),
        ("seed", 2**32),
        ("dataloader_num_workers", -1),
        ("dataloader_prefetch_factor", 2),
        ("save_strategy", "often"),
        ("eval_strategy", "best"),
        ("logging_strategy", "x"),
        ("logging_steps", 0),
        ("logging_steps", -1),
        ("logging_steps", 1.5),
        ("save_total_limit", 0),
        ("num_train_epochs", 0.0),
        ("max_steps", 0),
        ("label_smoothing_factor", 1.0),
        ("metric_for_best_model", "f1"),
    ],
)
def test_a_value_that_would_fail_late_is_refused(name: str, value: object) -> None:
    planned = {field.name: field.default for field in dataclasses.fields(SentimentTrainingArguments)}
    check_values(SentimentTrainingArguments, planned.__getitem__)
    with pytest.raises(UserError, match=f"--{name} {value}: ") as raised:
        check_values(SentimentTrainingArguments, {**planned, name: value}.__getitem__)
    assert len(raised.value.problems) == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 0},
            "--dataloader_prefetch_factor 0: expected at least 1.",
        ),
        ({"gradient_checkpointing_kwargs": '{"foo": 1, "debug": true}'}, "--gradient_checkpointing_kwargs: has foo; "),
        ({"accelerator_config": {"split_batches": True}}, "--accelerator_config: has no effect, "),
        ({"gradient_checkpointing_kwargs": "foo"}, "--gradient_checkpointing_kwargs: has foo; expected some of debug"),
    ],
)
def test_settings_that_a_step_would_fail_on_are_refused(given: dict[str, object], told: str) -> None:
    (problem,) = problems_of(check_values, arguments=SentimentTrainingArguments, planned=moments(**given))
    assert problem.startswith(told)
    fine = moments(gradient_checkpointing_kwargs={"use_reentrant": False}, dataloader_num_workers=1)
    check_values(SentimentTrainingArguments, fine)


def test_the_metric_of_a_language_may_choose_the_best_model() -> None:
    planned = {field.name: field.default for field in dataclasses.fields(SentimentTrainingArguments)}
    check_values(SentimentTrainingArguments, {**planned, "metric_for_best_model": "eval_macro_f1_ta"}.__getitem__)


def test_early_stopping_needs_evaluations() -> None:
    planned = {field.name: field.default for field in dataclasses.fields(SentimentTrainingArguments)}
    planned |= {"early_stopping_patience": 2, "eval_strategy": "no"}
    with pytest.raises(UserError, match="--early_stopping_patience 2: goes by evaluations, and --eval_strategy is no"):
        check_values(SentimentTrainingArguments, planned.__getitem__)


def moments(**given: object) -> Callable[[str], Any]:
    """When a run saves and evaluates, beside the defaults."""
    return planned(SentimentTrainingArguments, **given)


def planned(arguments: type[IndicTrainingArguments], **given: object) -> Callable[[str], Any]:
    """The values that were given, beside the defaults."""
    return partial(Recipe(dict(given), Problems()).planned, arguments)


@pytest.mark.parametrize(("name", "value"), [("save_steps", 0.0), ("eval_steps", 0.0), ("save_steps", 2.5)])
def test_steps_count_where_they_are_counted(name: str, value: float) -> None:
    check_values(SentimentTrainingArguments, moments(**{name: value}))
    by_steps = {"save_strategy": "steps", "eval_strategy": "steps", name: value}
    with pytest.raises(UserError, match=f"--{name} {value:g}: expected a whole number of at least 1, or a share"):
        check_values(SentimentTrainingArguments, moments(**by_steps))
    check_values(SentimentTrainingArguments, moments(**{**by_steps, name: 0.25}))


def test_one_half_precision_is_enough() -> None:
    check_values(SentimentTrainingArguments, moments(bf16=True))
    with pytest.raises(UserError, match="--bf16 true and --fp16 true: a run computes in one of them"):
        check_values(SentimentTrainingArguments, moments(bf16=True, fp16=True))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, None),
        ({"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 20.0, "eval_steps": 10.0}, None),
        ({"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 0.3, "eval_steps": 0.1}, None),
        ({"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 20.0}, None),  # --logging_steps 10
        ({"save_strategy": "steps", "load_best_model_at_end": False}, None),
        ({"save_strategy": "best"}, None),
        (
            {"save_strategy": "steps"},
            "--save_strategy steps and --eval_strategy epoch: the best checkpoint is known where each is evaluated; "
            "give both the same value, or give --load_best_model_at_end false, which keeps the last weights.",
        ),
        (
            {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 30.0, "eval_steps": 20.0},
            "--save_steps 30 and --eval_steps 20: the best checkpoint is known where each is evaluated; give "
            "--save_steps a multiple of --eval_steps, or give --load_best_model_at_end false, which keeps the last "
            "weights.",
        ),
        (
            {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 20.0, "eval_steps": 0.3},
            "--save_steps 20 and --eval_steps 0.3: the best checkpoint is known where each is evaluated; give "
            "--save_steps a multiple of --eval_steps, or give --load_best_model_at_end false, which keeps the last "
            "weights.",
        ),
    ],
)
def test_the_best_checkpoint_is_saved_where_it_is_evaluated(given: dict[str, object], problem: str | None) -> None:
    """As transformers would refuse it, when the rows are prepared."""
    args: dict[str, Any] = {"output_dir": "out", "use_cpu": True, **given}
    if problem is None:
        check_best(moments(**given))
        SentimentTrainingArguments(**args)
        return
    assert problems_of(check_best, planned=moments(**given)) == [problem]
    with pytest.raises(ValueError, match="--load_best_model_at_end requires"):
        SentimentTrainingArguments(**args)


class TestOptimizer:
    """Made before anything slow, as the Trainer would make it after the weights are read."""

    def problems(
        self, arguments: type[IndicTrainingArguments] = SentimentTrainingArguments, /, **given: object
    ) -> list[str]:
        try:
            check_optimizer(arguments, planned(arguments, **given), ())
        except UserError as error:
            return error.problems
        return []

    @pytest.mark.parametrize("arguments", [SentimentTrainingArguments, LlamaTrainingArguments])
    @pytest.mark.parametrize(
        "optim",
        ["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", "lion_8bit", "ademamix"],
    )
    def test_those_that_are_there_are_taken(self, arguments: type[IndicTrainingArguments], optim: str) -> None:
        assert self.problems(arguments, optim=optim) == []

    @pytest.mark.parametrize(
        ("optim", "module", "named"),
        [
            ("galore_adamw", "galore_torch", "ImportError: You need to install `galore_torch`"),
            ("galore_adamw_layerwise", "galore_torch", "ImportError: You need to install `galore_torch`"),
            ("apollo_adamw", "apollo_torch", "ImportError: You need to install `apollo_torch`"),
            ("lomo", "lomo_optim", "ImportError: You need to install `lomo_optim`"),
            ("grokadamw", "grokadamw", "ValueError: Please install grokadamw with `pip install grokadamw`"),
            ("schedule_free_sgd", "schedulefree", "ImportError: You need to install `schedulefree`"),
            ("adamw_torch_4bit", "torchao", "ImportError: You need to have `torchao>=0.4.0`"),
            ("stable_adamw", "optimi", "ImportError: You need to install `torch-optimi`"),
        ],
    )
    def test_a_package_that_is_missing_is_named(self, optim: str, module: str, named: str) -> None:
        if find_spec(module) is not None:
            pytest.skip(f"{module} is installed")
        (problem,) = self.problems(optim=optim)
        assert problem.startswith(f"--optim {optim}: cannot be made ({named}")
        assert problem.endswith("Mend that, or give another; adamw_torch needs no package of its own.")

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            (
                {"adam_beta1": 2.0},
                "--optim adamw_torch_fused: cannot be made (ValueError: Invalid beta parameter at index 0",
            ),
            (
                {"optim": "sgd", "optim_args": "lr"},
                "--optim sgd --optim_args lr: cannot be made (ValueError: not enough",
            ),
            (
                {"optim": "sgd", "optim_args": "nesterov=true"},
                "--optim sgd --optim_args nesterov=true: cannot be made (",
            ),
            ({"optim_args": "a=1"}, "--optim_args a=1: has no effect with --optim adamw_torch_fused; leave it out."),
            (
                {"optim_target_modules": ["q", "k"]},
                "--optim_target_modules q k: has no effect with --optim adamw_torch_fused; leave it out.",
            ),
        ],
    )
    def test_a_setting_that_does_not_fit_is_refused(self, given: dict[str, object], told: str) -> None:
        (problem,) = self.problems(**given)
        assert problem.startswith(told)

    @pytest.mark.parametrize(
        ("name", "settings"),
        [
            *((name, None) for name in ("linear", "constant", "polynomial", "inverse_sqrt", "greedy")),
            ("reduce_lr_on_plateau", '{"patience": 2}'),
            ("cosine_with_min_lr", '{"min_lr": 1e-6}'),
            ("warmup_stable_decay", '{"num_decay_steps": 10}'),
            ("polynomial", '{"lr_end": "0"}'),  # which transformers takes for a number
        ],
    )
    def test_a_schedule_with_its_settings_is_taken(self, name: str, settings: str | None) -> None:
        assert self.problems(lr_scheduler_type=name, lr_scheduler_kwargs=settings) == []

    @pytest.mark.parametrize(
        ("name", "settings", "told"),
        [
            ("cosine_with_min_lr", None, "ValueError: One of min_lr or min_lr_rate should be set"),
            ("warmup_stable_decay", None, "TypeError: get_wsd_schedule() missing 1 required positional"),
            ("linear", '{"num_cycles": 2}', "TypeError: get_linear_schedule_with_warmup() got an unexpected"),
            ("polynomial", '{"lr_end": 1}', "ValueError: lr_end (1) must be smaller than initial lr (5e-05)"),
            ("cosine", "num_cycles=2", "JSONDecodeError: "),
        ],
    )
    def test_a_schedule_whose_settings_do_not_fit_is_refused(self, name: str, settings: str | None, told: str) -> None:
        (problem,) = self.problems(lr_scheduler_type=name, lr_scheduler_kwargs=settings)
        given = f" --lr_scheduler_kwargs {settings}" if settings else ""
        assert problem.startswith(f"--lr_scheduler_type {name}{given}: cannot be made ({told}")

    def test_both_are_told_at_once_but_for_what_a_deepspeed_file_brings(self) -> None:
        given = planned(SentimentTrainingArguments, optim_args="x", lr_scheduler_type="warmup_stable_decay")
        told = problems_of(check_optimizer, arguments=SentimentTrainingArguments, planned=given, in_file=())
        assert [problem.partition(" ")[0] for problem in told] == ["--optim", "--lr_scheduler_type"]
        for section, other in (("optimizer", "--lr_scheduler_type"), ("scheduler", "--optim")):
            (problem,) = problems_of(
                check_optimizer, arguments=SentimentTrainingArguments, planned=given, in_file=(section,)
            )
            assert problem.startswith(other)
        check_optimizer(SentimentTrainingArguments, given, ("optimizer", "scheduler"))

    @pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "greedy"])
    def test_a_schedule_by_evaluations_needs_some(self, name: str) -> None:
        check_values(SentimentTrainingArguments, moments(lr_scheduler_type=name))
        check_evaluations(moments(lr_scheduler_type=name), has_validation=True)
        assert problems_of(check_evaluations, planned=moments(lr_scheduler_type=name), has_validation=False) == [
            f"--lr_scheduler_type {name}: needs validation rows (--validation_file); give some, or another, such as "
            "linear."
        ]
        given: dict[str, Any] = {"lr_scheduler_type": name, "eval_strategy": "no"}
        with pytest.raises(
            UserError, match=f"--lr_scheduler_type {name}: goes by evaluations, and --eval_strategy is"
        ):
            check_values(SentimentTrainingArguments, moments(**given))
        with pytest.raises(ValueError, match=f"lr_scheduler_type {name} requires an eval strategy"):
            SentimentTrainingArguments(output_dir="out", use_cpu=True, load_best_model_at_end=False, **given)


@pytest.fixture
def _tf32_as_before() -> Iterator[None]:
    yield
    enable_tf32.cache_clear()
    torch.set_float32_matmul_precision("highest")
    backends: Any = torch.backends
    for each in (backends.cuda.matmul, backends.mkldnn.matmul, backends):
        each.fp32_precision = "none"


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

    In a process of its own: where the older setting has ever been asked for, the two are not mixed.
    """
    done = subprocess.run([sys.executable, "-c", COMPILED_WITH_TF32], capture_output=True, text=True, check=False)
    assert "mix of the legacy and new APIs" in done.stderr


@pytest.mark.usefixtures("_tf32_as_before")
@pytest.mark.parametrize("arguments", [SentimentTrainingArguments, LlamaTrainingArguments])
def test_torch_compiles_for_tf32(
    arguments: type[IndicTrainingArguments], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)  # which is asked of a GPU
    arguments(str(tmp_path), use_cpu=True, bf16=True, tf32=True)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert "high" in create_precompile_key("mm", "", [])

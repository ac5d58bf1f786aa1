"""Optimizers and schedules are made before anything slow, as the Trainer would make them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from indictune.config.arguments import IndicTrainingArguments, SentimentTrainingArguments
from indictune.config.chat_arguments import LlamaTrainingArguments
from indictune.config.plan import Launch
from indictune.preflight.values import check_optimizer
from tests.plans import codes_of, plan_of


@pytest.mark.parametrize("arguments", [SentimentTrainingArguments, LlamaTrainingArguments])
@pytest.mark.parametrize(
    "optim", ["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop", "lion_8bit", "ademamix"]
)
def test_an_optimizer_whose_package_is_there_passes(arguments: type[IndicTrainingArguments], optim: str) -> None:
    assert check_optimizer(plan_of({"optim": optim}, arguments=arguments)) == []


@pytest.mark.parametrize(
    ("optim", "module", "named"),
    [
        ("galore_adamw", "galore_torch", "galore_torch"),
        ("apollo_adamw", "apollo_torch", "apollo_torch"),
        ("lomo", "lomo_optim", "lomo_optim"),
        ("grokadamw", "grokadamw", "grokadamw"),
        ("schedule_free_sgd", "schedulefree", "schedulefree"),
        ("adamw_torch_4bit", "torchao", "torchao"),
        ("stable_adamw", "optimi", "torch-optimi"),
    ],
)
def test_a_missing_package_is_named(optim: str, module: str, named: str) -> None:
    if find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    (found,) = check_optimizer(plan_of({"optim": optim}))
    assert (found.code, found.flag, found.value) == ("optimizer-cannot-be-made", "--optim", optim)
    assert named in str(found)


@pytest.mark.parametrize(
    ("given", "code", "flag"),
    [
        ({"adam_beta1": 2.0}, "optimizer-cannot-be-made", "--optim"),
        ({"optim": "sgd", "optim_args": "lr"}, "optimizer-cannot-be-made", "--optim"),
        ({"optim": "sgd", "optim_args": "nesterov=true"}, "optimizer-cannot-be-made", "--optim"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused(given: dict[str, Any], code: str, flag: str) -> None:
    assert codes_of(check_optimizer, plan_of(given)) == [(code, flag)]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, None) for name in ("linear", "constant", "polynomial", "inverse_sqrt", "greedy")),
        ("reduce_lr_on_plateau", '{"patience": 2}'),
        ("cosine_with_min_lr", '{"min_lr": 1e-6}'),
        ("warmup_stable_decay", '{"num_decay_steps": 10}'),
        ("polynomial", '{"lr_end": "0"}'),  # transformers reads the text as a number
    ],
)
def test_a_schedule_with_its_settings_passes(name: str, settings: str | None) -> None:
    assert check_optimizer(plan_of({"lr_scheduler_type": name, "lr_scheduler_kwargs": settings})) == []


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("cosine_with_min_lr", None),
        ("warmup_stable_decay", None),
        ("linear", '{"num_cycles": 2}'),
        ("polynomial", '{"lr_end": 1}'),
        ("cosine", "num_cycles=2"),
    ],
)
def test_a_schedule_whose_settings_do_not_fit_is_refused(name: str, settings: str | None) -> None:
    plan = plan_of({"lr_scheduler_type": name, "lr_scheduler_kwargs": settings})
    assert codes_of(check_optimizer, plan) == [("schedule-cannot-be-made", "--lr_scheduler_type")]


def test_the_flags_count_under_a_deepspeed_file_with_an_optimizer_and_a_schedule() -> None:
    given = {"optim_args": "x", "lr_scheduler_type": "warmup_stable_decay"}
    launch = Launch("zero2", deepspeed={"optimizer": {}, "scheduler": {}})
    found = [flag for _, flag in codes_of(check_optimizer, plan_of(given, launch=launch))]
    assert found == ["--optim", "--lr_scheduler_type"]

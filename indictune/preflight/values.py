"""Values of a run that would fail late, or train nothing: told with its other problems."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import Trainer, get_scheduler
from transformers.training_args import ParallelMode, _convert_str_dict

from indictune.config.arguments import IndicTrainingArguments
from indictune.errors import Problems, UserError

# When a run logs, evaluates and saves.
MOMENTS = {
    "logging": ("no", "steps", "epoch"),
    "eval": ("no", "steps", "epoch"),
    "save": ("no", "steps", "epoch", "best"),
}

# What torch's checkpoint takes, as far as JSON can hold it (2.13).
RECOMPUTING = ("debug", "determinism_check", "early_stop", "preserve_rng_state", "use_reentrant")

# Learning rates that fall, or rise, when evaluations are no longer better.
BY_EVALUATIONS = ("reduce_lr_on_plateau", "greedy")


def check_values(arguments: type[IndicTrainingArguments], planned: Callable[[str], Any]) -> None:
    """Refuse values that transformers or torch would fail on later, or that would train nothing.

    Args:
        arguments: the training arguments, for the metrics that there are.
        planned: the value that a field of them will have.

    Raises:
        UserError: all such values.
    """
    duration = "num_train_epochs" if planned("max_steps") < 0 else "max_steps"
    at_least = {
        "per_device_eval_batch_size": (planned("per_device_eval_batch_size"), 1),
        "max_tokens_per_device": (planned("max_tokens_per_device"), 1),
        "early_stopping_patience": (planned("early_stopping_patience"), 1),
        "max_nonfinite_steps": (planned("max_nonfinite_steps"), 0),
        "ddp_timeout": (planned("ddp_timeout"), 1),
        "dataloader_num_workers": (planned("dataloader_num_workers"), 0),
        "dataloader_prefetch_factor": (planned("dataloader_prefetch_factor"), 1),
        "eval_accumulation_steps": (planned("eval_accumulation_steps"), 1),
        "learning_rate": (planned("learning_rate"), 0),
        "weight_decay": (planned("weight_decay"), 0),
        "warmup_steps": (planned("warmup_steps"), 0),
    }
    problems = [
        f"--{name} {value}: expected at least {smallest}."
        for name, (value, smallest) in at_least.items()
        if value is not None and not value >= smallest
    ]
    if (limit := planned("save_total_limit")) is not None and limit < 1:
        problems.append(
            f"--save_total_limit {limit}: expected at least 1; --save_strategy no --load_best_model_at_end false "
            "saves none."
        )
    if not 0 <= planned("seed") < 2**32:
        problems.append(f"--seed {planned('seed')}: expected a whole number from 0 to {2**32 - 1}.")
    if not planned(duration) > 0:
        problems.append(f"--{duration} {planned(duration)}: nothing would be trained; give more than 0.")
    smoothing = planned("label_smoothing_factor")
    if not 0 <= smoothing < 1:
        problems.append(f"--label_smoothing_factor {smoothing}: expected a share from 0 up to, not including, 1.")
    metric = str(planned("metric_for_best_model")).removeprefix("eval_")
    prefix = arguments.LANGUAGE_METRICS
    if metric not in arguments.METRICS and not (prefix and metric.startswith(prefix)):
        expected = [*arguments.METRICS, *([f"{prefix}<language>"] if prefix else [])]
        problems.append(f"--metric_for_best_model {metric}: expected {' or '.join(expected)}.")
    if planned("bf16") and planned("fp16"):
        problems.append("--bf16 true and --fp16 true: a run computes in one of them; leave one out.")
    if planned("accelerator_config") is not None:
        problems.append("--accelerator_config: has no effect, for rows are dealt without accelerate; leave it out.")
    if planned("dataloader_prefetch_factor") is not None and planned("dataloader_num_workers") == 0:
        problems.append(
            f"--dataloader_prefetch_factor {planned('dataloader_prefetch_factor')}: has no effect with "
            "--dataloader_num_workers 0; leave it out, or give workers."
        )
    problems += [*_problems_of_moments(planned), *_problems_of_recomputing(planned("gradient_checkpointing_kwargs"))]
    if problems:
        raise UserError(problems)


def _problems_of_recomputing(given: dict[str, Any] | str | None) -> list[str]:
    """What is wrong with the settings by which activations are computed again."""
    try:
        settings = {} if given is None else json.loads(given) if isinstance(given, str) else given
        unknown = sorted(settings.keys() - set(RECOMPUTING))
    except (ValueError, AttributeError):
        unknown = [str(given)]
    return [
        f"--gradient_checkpointing_kwargs: has {each}; expected some of {', '.join(RECOMPUTING)}, as in "
        """--gradient_checkpointing_kwargs '{"use_reentrant": false}'."""
        for each in unknown
    ]


def _problems_of_moments(planned: Callable[[str], Any]) -> list[str]:
    """What is wrong with when a run logs, evaluates and saves."""
    problems = []
    evaluates = str(planned("eval_strategy")) != "no"
    if (patience := planned("early_stopping_patience")) is not None and not evaluates:
        problems.append(
            f"--early_stopping_patience {patience}: goes by evaluations, and --eval_strategy is no; give "
            "--eval_strategy epoch, or leave it out."
        )
    if (schedule := planned("lr_scheduler_type")) in BY_EVALUATIONS and not evaluates:
        problems.append(
            f"--lr_scheduler_type {schedule}: goes by evaluations, and --eval_strategy is no; give --eval_strategy "
            "epoch, or another, such as linear."
        )
    for what, kinds in MOMENTS.items():
        kind = planned(f"{what}_strategy")
        steps = planned(f"{what}_steps")
        if what == "eval" and steps is None:
            steps = planned("logging_steps")  # as transformers does
        if kind not in kinds:
            problems.append(f"--{what}_strategy {kind}: expected {', '.join(kinds[:-1])} or {kinds[-1]}.")
        elif kind == "steps" and not (0 < steps < 1 or (steps >= 1 and steps == int(steps))):
            problems.append(
                f"--{what}_steps {steps:g}: expected a whole number of at least 1, or a share of all steps below 1."
            )
    return problems


def check_evaluations(planned: Callable[[str], Any], has_validation: bool) -> None:
    """Check what is compared during training.

    Args:
        planned: the value that a field of the training arguments will have.
        has_validation: whether there are rows to evaluate on during training.

    Raises:
        UserError: there are none, and a flag needs them; or checkpoints would not be compared.
    """
    if has_validation:
        check_best(planned)
        return
    problems = []
    if (patience := planned("early_stopping_patience")) is not None:
        problems.append(f"--early_stopping_patience {patience}: needs validation rows (--validation_file).")
    if (schedule := planned("lr_scheduler_type")) in BY_EVALUATIONS:
        problems.append(
            f"--lr_scheduler_type {schedule}: needs validation rows (--validation_file); give some, or another, such "
            "as linear."
        )
    if problems:
        raise UserError(problems)


def check_best(planned: Callable[[str], Any]) -> None:
    """Refuse checkpoints that would not be compared, where the best of them is wanted and there are rows to do it by.

    Args:
        planned: the value that a field of the training arguments will have.

    Raises:
        UserError: checkpoints are saved where nothing is evaluated.
    """
    saves, evaluates = planned("save_strategy"), planned("eval_strategy")
    are_moments = saves in MOMENTS["save"] and evaluates in MOMENTS["eval"]  # else `check_values` says so
    if not planned("load_best_model_at_end") or saves == "best" or not are_moments:
        return
    way_out = "or give --load_best_model_at_end false, which keeps the last weights"
    if saves != evaluates:
        raise UserError(
            f"--save_strategy {saves} and --eval_strategy {evaluates}: the best checkpoint is known where each is "
            f"evaluated; give both the same value, {way_out}."
        )
    save_steps, eval_steps = planned("save_steps"), planned("eval_steps") or planned("logging_steps")
    if saves == "steps" and min(save_steps, eval_steps) > 0 and not _is_multiple(save_steps, eval_steps):
        raise UserError(
            f"--save_steps {save_steps:g} and --eval_steps {eval_steps:g}: the best checkpoint is known where each is "
            f"evaluated; give --save_steps a multiple of --eval_steps, {way_out}."
        )


def _is_multiple(number: float, of: float) -> bool:
    """Both steps, or both shares of all steps."""
    in_millionths = 1_000_000 if number < 1 and of < 1 else 1  # as transformers counts shares (5.23)
    return (number < 1) == (of < 1) and (number * in_millionths) % (of * in_millionths) == 0


def check_optimizer(
    arguments: type[IndicTrainingArguments], planned: Callable[[str], Any], in_file: Collection[str]
) -> None:
    """Refuse an optimizer and a schedule that cannot be made, by making them for a layer of one weight.

    Args:
        arguments: the training arguments.
        planned: the value that a field of them will have.
        in_file: sections of the DeepSpeed file, whose own take the place of the flags'.

    Raises:
        UserError: a package is missing, or a setting does not fit.
    """
    if not planned("learning_rate") >= 0:  # `check_values` says so
        return
    problems = Problems()
    if "optimizer" not in in_file:
        with problems.collecting():
            _try_optimizer(arguments, planned)
    if "scheduler" not in in_file:
        with problems.collecting():
            _try_schedule(planned)
    problems.raise_any()


def _try_optimizer(arguments: type[IndicTrainingArguments], planned: Callable[[str], Any]) -> None:
    values = {field.name: planned(field.name) for field in fields(arguments) if field.init}
    if values["optim_target_modules"] is not None:
        values["optim_target_modules"] = "all-linear"  # those that are named are not in this layer
    args: Any = SimpleNamespace(**values, parallel_mode=ParallelMode.NOT_PARALLEL)
    layer = nn.Linear(1, 1)
    model: Any = nn.Sequential(layer)
    try:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
        chooses_weights = {"params", "model", "optimizer_dict"} & settings.keys()
        if not chooses_weights:
            kind(layer.parameters(), **settings)
        plain: Any = SimpleNamespace(**{**values, "optim_args": None}, parallel_mode=ParallelMode.NOT_PARALLEL)
        is_read = not str(values["optim"]).startswith(("adamw_torch", "adafactor"))  # others may be given a default
        same = Trainer.get_optimizer_cls_and_kwargs(plain, model)[1] == settings
    except Exception as error:
        given = f" --optim_args {values['optim_args']}" if values["optim_args"] else ""
        raise UserError(
            f"--optim {values['optim']}{given}: cannot be made ({_said(error)}). Mend that, or give another; "
            "adamw_torch needs no package of its own."
        ) from error
    if values["optim_args"] and same and not is_read:
        raise UserError(
            f"--optim_args {values['optim_args']}: has no effect with --optim {values['optim']}; leave it out."
        )
    if values["optim_target_modules"] is not None and not chooses_weights:
        raise UserError(
            f"--optim_target_modules {_in_words(planned('optim_target_modules'))}: has no effect with --optim "
            f"{values['optim']}; leave it out."
        )


def _try_schedule(planned: Callable[[str], Any]) -> None:
    name, given = planned("lr_scheduler_type"), planned("lr_scheduler_kwargs")
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), planned("learning_rate"))
    try:
        settings = _convert_str_dict(json.loads(given)) if isinstance(given, str) else given
        get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=1, scheduler_specific_kwargs=settings)
    except Exception as error:
        shown = f" --lr_scheduler_kwargs {given}" if given else ""
        raise UserError(
            f"--lr_scheduler_type {name}{shown}: cannot be made ({_said(error)}). Its settings are given as in "
            """--lr_scheduler_kwargs '{"num_cycles": 2}'; linear needs none."""
        ) from error


def _in_words(names: list[str] | str) -> str:
    return names if isinstance(names, str) else " ".join(names)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().rstrip('.')}"

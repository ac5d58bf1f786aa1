"""From a recipe and the environment to the plan of a run: what follows from launch, machine and recipe together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig

from indictune.config.arguments import IndicTrainingArguments, ModelArguments
from indictune.config.command_arguments import EvaluateArguments
from indictune.config.plan import Launch, RowArguments, RunPlan, unresolved
from indictune.config.recipe import Recipe
from indictune.distributed import batch_size, tf32
from indictune.distributed.launch import (
    deepspeed_file,
    for_evaluation,
    local_world_size_of,
    rank_of,
    read_launch,
    world_size_of,
)
from indictune.distributed.strategy_limits import default_optimizer
from indictune.errors import Problem, Problems, UserError
from indictune.models.adapter_base import config_file
from indictune.tasks.protocol import Task

Arguments = TypeVar("Arguments")
Data = TypeVar("Data", bound=RowArguments)
Training = TypeVar("Training", bound=IndicTrainingArguments)


def make_plan(
    recipe: Recipe, environ: Mapping[str, str], task: Task[Any, Data, Training]
) -> tuple[RunPlan[Data, Training], list[Problem]]:
    """The plan of a run, as far as it can be made, and the problems found on the way, those of the recipe first.

    Args:
        recipe: what the user gave.
        environ: of this process.
        task: names the arguments, and reads the configuration of the model.
    """
    plan, problems = plan_of_rows(recipe, task)
    plan = replace(plan, launch=_launch(environ, plan.training, problems), environ=environ)
    default = task.metrics(plan)[0]
    if "metric_for_best_model" not in recipe.values and plan.training.metric_for_best_model != default:
        plan = plan.derive(metric_for_best_model=default)
    metric = str(plan.training.metric_for_best_model).removeprefix("eval_")
    if metric in task.lower_is_better and "greater_is_better" not in recipe.values:
        plan = plan.derive(greater_is_better=False)
    return _derive(plan, problems), problems


def plan_of_rows(recipe: Recipe, task: Task[Any, Data, Training]) -> tuple[RunPlan[Data, Training], Problems]:
    """As `make_plan`, as far as the rows need it: no launch is read, and nothing follows from one."""
    problems = Problems(recipe.problems)
    model_args = _built(recipe, task.model_arguments, problems)
    plan = RunPlan(
        recipe=recipe,
        model=model_args,
        data=_built(recipe, task.data_arguments, problems),
        training=unresolved(task.training_arguments, recipe.values),
        launch=Launch("single"),
        output_dir=Path(recipe.values.get("output_dir") or "."),
        gpus=torch.cuda.device_count(),
        environ={},
        model_config=problems.attempt(task.read_config, model_args),
    )
    return plan, problems


def make_evaluation_plan(
    recipe: Recipe,
    environ: MutableMapping[str, str],
    training: type[Training],
    read_config: Callable[[ModelArguments], PreTrainedConfig],
) -> tuple[RunPlan[EvaluateArguments, Training], list[Problem]]:
    """As `make_plan`, of an evaluation without training.

    Args:
        recipe: flags of `indictune evaluate`.
        environ: of this process; DeepSpeed's variables are removed where it cannot evaluate.
        training: arguments of the training that made the model.
        read_config: reads the configuration of the trained model.
    """
    problems = Problems(recipe.problems)
    asked = _built(recipe, EvaluateArguments, problems)
    model = ModelArguments(asked.model, trust_remote_code=asked.trust_remote_code)
    model.trust_checkpoint = asked.trust_checkpoint
    arguments = unresolved(training, recipe.values)
    launch = _launch(environ, arguments, problems)
    launch = for_evaluation(launch, environ) if launch.is_known else launch
    plan = RunPlan(
        recipe=recipe,
        model=model,
        data=asked,
        training=arguments,
        launch=launch,
        output_dir=Path(recipe.values.get("output_dir") or "."),
        gpus=torch.cuda.device_count(),
        environ=environ,
        model_config=problems.attempt(read_config, model) if config_file(asked.model).is_file() else None,
    )
    deepspeed = launch.deepspeed_source if launch.deepspeed is not None else None
    never = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
    return plan.derive(deepspeed=deepspeed, **never), problems


def _built(recipe: Recipe, arguments: type[Arguments], problems: Problems) -> Arguments:
    """The arguments; where they are refused, their values as they were given."""
    return problems.attempt(recipe.build, arguments) or unresolved(arguments, recipe.values)


def _launch(environ: Mapping[str, str], training: IndicTrainingArguments, problems: Problems) -> Launch:
    with problems.collecting():
        source = deepspeed_file(environ, None if training.deepspeed is None else str(training.deepspeed))
        return read_launch(environ, source, training.fsdp)
    sizes = world_size_of(environ), local_world_size_of(environ), rank_of(environ)
    return Launch("single", *sizes, is_known=False)


def _derive(plan: RunPlan[Data, Training], problems: Problems) -> RunPlan[Data, Training]:
    """The plan with all values that follow from others and that no row decides."""
    given, derived = plan.recipe.values, dict[str, Any](deepspeed=plan.launch.deepspeed_source)
    if "optim" not in given:
        optim = default_optimizer(plan.launch, plan.model.method, has_gpu=plan.gpus > 0)
        derived |= {} if optim is None else {"optim": optim}
    if "tf32" not in given and (decided := tf32.default(plan.training)) is not None:
        derived["tf32"] = decided
    if plan.training.max_tokens_per_device is None:
        with problems.collecting():
            derived |= _accumulation(plan)
    return plan.derive(**derived)


def _accumulation(plan: RunPlan[Any, Any]) -> dict[str, int]:
    """The accumulation that the global batch asks for.

    Raises:
        UserError: there is none, or another was given.
    """
    training = plan.training
    steps = batch_size.accumulation_steps(
        training.global_batch_size, training.per_device_train_batch_size, plan.launch.world_size
    )
    return {"gradient_accumulation_steps": checked_accumulation(plan, steps, "--global_batch_size")}


def checked_accumulation(plan: RunPlan[Any, Any], steps: int, flag: str) -> int:
    """The accumulation steps that follow from a flag.

    Raises:
        UserError: other steps were given.
    """
    given = plan.recipe.values.get("gradient_accumulation_steps", steps)
    if given != steps:
        raise UserError("accumulation-is-derived", "--gradient_accumulation_steps", given, source=flag, steps=steps)
    return steps

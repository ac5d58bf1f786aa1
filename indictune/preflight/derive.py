"""Make the plan of a run from its recipe and environment, with all values that follow from them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import Any, TypeVar

from indictune.config.arguments import IndicTrainingArguments, ModelArguments
from indictune.config.command_line import SCRIPTS
from indictune.config.plan import Launch, RunPlan, unresolved
from indictune.config.recipe import Recipe
from indictune.config.shared_arguments import EvaluationArguments
from indictune.distributed import devices
from indictune.distributed.batch_size import split_batch, steps_of_run
from indictune.distributed.launch import for_evaluation, local_world_size_of, rank_of, read_launch, world_size_of
from indictune.distributed.strategy import default_optimizer, take_values
from indictune.errors import Problem, Problems, UserError, problem
from indictune.evaluation.breakdown import WORST
from indictune.models.adapters import config_file
from indictune.models.load import trained_config
from indictune.tasks.protocol import Data, Task, Training

logger = logging.getLogger(__name__)

Arguments = TypeVar("Arguments")

# transformers (5.23) evaluates as often as it logs, and cannot mix a share of the run with whole --save_steps.
DEFAULT_EVAL_STEPS = 10.0

_RATES_OF_ADAPTERS = {"chat": 2e-4, "clm": 2e-4, "dpo": 1e-5, "kto": 1e-5}  # whole weights take a tenth of it


def make_plan(
    recipe: Recipe, environ: Mapping[str, str], task: Task[Any, Data, Training]
) -> tuple[RunPlan[Data, Training], list[Problem]]:
    """The plan of a run and the problems found so far, those of the recipe first."""
    plan, problems = plan_of_rows(recipe, task)
    plan = replace(plan, launch=_launch(environ, plan.training, problems), environ=environ)
    plan = take_values(plan)
    given, training = plan.recipe.values, plan.training
    metric = given.get("metric_for_best_model", task.metrics(plan)[0])
    is_lower_better = metric.removeprefix("eval_").removeprefix(WORST).startswith(task.lower_is_better)
    is_ours = has_score(task, plan, metric.removeprefix("eval_"))  # else it is by --metrics, or unknown
    if is_ours and (asked := given.get("greater_is_better")) is not None and asked == is_lower_better:
        best = "lowest" if is_lower_better else "highest"
        problems.append(problem("worst-as-best", "--greater_is_better", str(asked).lower(), metric=metric, best=best))
    defaults = {
        "metric_for_best_model": metric,
        # transformers (5.23) takes every metric that ends with "loss" for one.
        "greater_is_better": not is_lower_better if is_ours and is_lower_better != metric.endswith("loss") else None,
        "optim": default_optimizer(plan.launch, plan.model.method, has_gpu=plan.gpus > 0),
        "tf32": devices.default_tf32(training),
        "learning_rate": None if plan.model.method == "full" else _RATES_OF_ADAPTERS.get(task.name),
    }
    changes = {name: value for name, value in defaults.items() if value not in (None, getattr(training, name))}
    derived = {name: value for name, value in changes.items() if name not in given}
    if str(training.eval_strategy) == "steps" and not {"eval_steps", "logging_steps"} & given.keys():
        derived["eval_steps"] = DEFAULT_EVAL_STEPS
    if plan.launch.is_known and min(training.global_batch_size, training.per_device_train_batch_size) > 0:
        with problems.collecting():
            derived |= split_batch(plan)
    return plan.derive(**derived), problems


def has_score(task: Task[Any, Any, Any], plan: RunPlan[Any, Any], name: str) -> bool:
    """Whether a run has a score of that name without `--metrics`: of all rows, or maybe of a group or a label."""
    starts = (*task.group_scores(plan), *task.label_scores(plan))
    return name in task.metrics(plan) or name.startswith(tuple(f"{each}_" for each in starts))


def plan_of_rows(recipe: Recipe, task: Task[Any, Data, Training]) -> tuple[RunPlan[Data, Training], Problems]:
    """The part of `make_plan` that reading rows needs: without a launch, and nothing derived from one."""
    asked = recipe.values.get("task") or task.name
    if asked != task.name:  # other problems would follow from this one
        raise UserError("recipe-of-other-task", "task", asked, task=task.name, script=SCRIPTS[asked])
    problems, (of_model, of_rows, of_training) = Problems(recipe.problems), task.arguments
    model = _built(recipe, of_model, problems)
    plan = RunPlan(
        recipe=recipe,
        model=model,
        data=_built(recipe, of_rows, problems),
        training=unresolved(of_training, recipe.values),
        model_config=problems.attempt(task.read_config, model),
        head=task.head,
    )
    return task.with_first_rows(plan), problems


def make_evaluation_plan(
    recipe: Recipe, environ: MutableMapping[str, str], task: Task[Any, Any, Training]
) -> tuple[RunPlan[EvaluationArguments, Training], list[Problem]]:
    """The plan of an evaluation without training, by the flags of `indictune evaluate`, and the problems found so far.

    DeepSpeed's environment variables are removed if it cannot evaluate.
    """
    problems = Problems(recipe.problems)
    asked = _built(recipe, EvaluationArguments, problems)
    model = ModelArguments(asked.model, trust_remote_code=asked.trust_remote_code)
    arguments = unresolved(task.arguments[-1], recipe.values)
    launch = _launch(environ, arguments, problems)
    launch = for_evaluation(launch, environ) if launch.is_known else launch
    plan = RunPlan(
        recipe=recipe,
        model=model,
        data=asked,
        training=arguments,
        launch=launch,
        environ=environ,
        model_config=problems.attempt(trained_config, model) if config_file(asked.model).is_file() else None,
        head=task.head,
    )
    plan = take_values(plan)
    never: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
    return plan.derive(**never), problems


def _built(recipe: Recipe, arguments: type[Arguments], problems: Problems) -> Arguments:
    """The arguments. If they are refused, they keep the given values."""
    return problems.attempt(recipe.build, arguments) or unresolved(arguments, recipe.values)


def _launch(environ: Mapping[str, str], training: IndicTrainingArguments, problems: Problems) -> Launch:
    with problems.collecting():
        deepspeed = None if training.deepspeed is None else str(training.deepspeed)
        return read_launch(environ, deepspeed, training.fsdp)
    sizes = world_size_of(environ), local_world_size_of(environ), rank_of(environ)
    return Launch("single", *sizes, is_known=False)


# Ten evaluations of a longer run, which ends after three without a better metric.
_ENDED_EARLY = {"eval_strategy": "steps", "eval_steps": 0.1, "save_strategy": "steps", "save_steps": 0.1}
_PATIENCE = "early_stopping_patience"
_ENDED_EARLY |= {_PATIENCE: 3}


def with_least_steps(plan: RunPlan[Data, Training], rows: int, has_validation: bool) -> RunPlan[Data, Training]:
    """The plan with as many epochs of so many rows as `--min_steps` needs."""
    training = plan.training
    batch, least, epochs = training.global_batch_size, training.min_steps, training.num_train_epochs
    if training.max_steps > 0 or steps_of_run(rows, batch, training.max_steps, epochs) >= least:
        return plan
    needed = math.ceil(least / math.ceil(rows / batch))
    ended = {} if not has_validation else _ended_early(plan, needed, needed * math.ceil(rows / batch))
    note = f", and an end after {ended[_PATIENCE]} evaluations without a better score" if ended else ""
    logger.info("--min_steps %d: %d epochs of %s rows instead of %g%s", least, needed, f"{rows:,}", epochs, note)
    return plan.derive(num_train_epochs=float(needed), **ended)


def _ended_early(plan: RunPlan[Data, Training], epochs: int, steps: int) -> dict[str, Any]:
    """How a longer run is evaluated, and after how many evaluations without a gain it ends: three tenths of all."""
    training, given = plan.training, plan.recipe.values.keys()
    if not _ENDED_EARLY.keys() & given:
        return _ENDED_EARLY
    if _PATIENCE in given or training.eval_strategy == "no" or not training.load_best_model_at_end:
        return {}
    every = training.eval_steps or training.logging_steps
    evaluations = epochs if training.eval_strategy == "epoch" else 1 / every if every < 1 else steps / every
    return {_PATIENCE: max(3, math.ceil(0.3 * evaluations))}

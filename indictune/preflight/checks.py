"""All checks of a plan: every problem is found before anything slow starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from indictune.config.plan import AnyPlan, RunPlan
from indictune.distributed.devices import missing_gpu, where_it_runs
from indictune.distributed.strategy_limits import (
    check_bad_steps,
    check_communication,
    check_optimizer_of_strategy,
    check_saving,
    check_weights,
)
from indictune.errors import Problem, Problems, problem, problems_of
from indictune.models.adapters import check_published_base
from indictune.models.learned_vocabulary import check_learned_vocabulary
from indictune.models.load import check_max_length, stored_quantisation
from indictune.preflight.surroundings import (
    check_hub,
    check_launcher_settings,
    check_loggers,
    check_number_type,
    check_processes,
    check_resume,
    check_snapshots,
    resumed_checkpoint,
)
from indictune.preflight.values import (
    check_evaluations,
    check_fixed_values,
    check_long_texts,
    check_metric,
    check_optimizer,
    check_schedule,
    check_values,
)
from indictune.tasks.protocol import Data, Rows, Task, Training

logger = logging.getLogger(__name__)

Check = Callable[[AnyPlan], list[Problem]]

CHECKS: tuple[Check, ...] = (
    check_fixed_values,
    check_values,
    check_schedule,
    check_optimizer,
    check_launcher_settings,
    check_number_type,
    check_hub,
    check_loggers,
    check_resume,
)

# Checks that read the launch.
OF_THE_LAUNCH: tuple[Check, ...] = (
    check_processes,
    check_optimizer_of_strategy,
    check_communication,
    check_saving,
    check_bad_steps,
)


def check_launch(plan: AnyPlan) -> list[Problem]:
    """Check the machine of several processes, and each axis that they split. What a launch lacks is not imported."""
    axes, checks = plan.launch.axes, list[Check]()
    if axes.pipeline > 1:
        from indictune.distributed.pipeline.layout import check_pipeline

        checks.append(check_pipeline)
    if axes.context > 1:
        from indictune.distributed.context import check_context

        checks.append(check_context)
    if axes.tensor > 1:
        from indictune.distributed.tensor import check_split

        checks.append(check_split)
    if plan.launch.world_size > 1:
        from indictune.distributed.machine_failures import check_interfaces

        checks.append(check_interfaces)
    return [each for check in checks for each in check(plan)]


def check_model(plan: AnyPlan) -> list[Problem]:
    """Check the configuration of the model against method, strategy and length of texts. The plan has it."""
    config = plan.model_config
    assert config is not None
    return [
        *(check_learned_vocabulary(plan.model) if plan.model.vocabulary_from_train is not None else []),
        *problems_of(check_max_length, config, plan.data.max_length),
        *(check_weights(plan, stored_quantisation(config)) if plan.launch.is_known else []),
        *(check_snapshots(plan) if plan.launch.is_known and plan.training.snapshot_steps else []),
        *(problems_of(check_published_base, plan.model, True) if plan.training.push_to_hub else []),
    ]


def preflight(plan: RunPlan[Any, Any], task: Task[Any, Any, Any]) -> list[Problem]:
    """Everything in the plan that cannot work, each problem once. Nothing is changed and no row is read."""
    checks = CHECKS + ((*OF_THE_LAUNCH, check_launch) if plan.launch.is_known else ())
    found = [*(each for check in checks for each in check(plan)), *check_metric(plan, task)]
    found += [*check_long_texts(plan.data, task), *check_do_predict(plan)]
    if plan.model_config is not None:
        found += [*check_model(plan), *task.check(plan)]
    choice = plan.configuration.get("active_vocabulary")  # of a task that has the flag
    if choice == "on":
        from indictune.distributed.vocabulary_choice import check_active_vocabulary

        found += check_active_vocabulary(choice, plan.model.method, str(plan.training.optim))
    return list(dict.fromkeys(found))


def check_do_predict(plan: AnyPlan) -> list[Problem]:
    """Refuse `--do_predict` without test rows. With them, every run writes their predictions."""
    values = plan.configuration
    if not plan.training.do_predict:
        return []
    has_test_rows = values.get("test_file") or values.get("dataset_name")
    return [] if has_test_rows else [problem("needs-test-rows", "--do_predict", plan.training.do_predict)]


def preflight_of_evaluation(plan: AnyPlan) -> list[Problem]:
    """As `preflight`, of an evaluation without training."""
    checks: tuple[Check, ...] = (check_launcher_settings, check_number_type)
    checks += (check_processes, check_launch) if plan.launch.is_known else ()
    return list(dict.fromkeys(each for check in checks for each in check(plan)))


def say_where_it_runs(plan: AnyPlan) -> None:
    """Write the first line of a run, below a warning in capitals if a large recipe for GPUs finds none."""
    if warning := missing_gpu(plan):
        logger.warning(warning)
    logger.info(where_it_runs(plan))


def read_rows(plan: RunPlan[Data, Training], task: Task[Rows, Data, Training], found: list[Problem]) -> Rows:
    """The rows of a run, read and checked, and before that the first line of the run: where it trains.

    Args:
        plan: of the run.
        task: reads the rows.
        found: problems of the plan. With any, only the first rows are read, which tell of missing columns.

    Raises:
        UserError: all problems, those of the plan and those of the rows.
    """
    problems = Problems(found)
    if not problems:
        say_where_it_runs(plan)
    inputs = replace(task.open(plan, problems), checkpoint=None if problems else resumed_checkpoint(plan))
    if inputs.sources is not None and "train" in inputs.sources:
        is_split = bool(plan.configuration.get("validation_split"))  # of a task that has the flag
        problems.extend(check_evaluations(plan, is_split or "validation" in inputs.sources))
    rows = task.read(plan, inputs, problems)
    problems.raise_any()
    assert rows is not None
    return rows

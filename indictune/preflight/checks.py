"""All checks of a plan: every problem is found before anything slow starts."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from huggingface_hub import get_token
from transformers.integrations.integration_utils import get_available_reporting_integrations

from indictune.checkpoint import compatibility
from indictune.checkpoint.resume import DamageReader, ResumePoint, check_trusted, choose_resume_point
from indictune.config.plan import AnyPlan, RunPlan
from indictune.distributed import elastic
from indictune.distributed.devices import missing_gpu, slow_bf16, where_it_runs
from indictune.distributed.pipeline.layout import check_pipeline
from indictune.distributed.strategy import check_strategy, check_weights
from indictune.errors import Problem, Problems, UserError, missing_extra, problem, problems_of
from indictune.files import AUTO
from indictune.models.adapters import check_published_base
from indictune.models.load import check_max_length, stored_quantisation
from indictune.models.task_models import check_learned_vocabulary, dropout_of
from indictune.models.trusted_files import are_pickled
from indictune.preflight import values
from indictune.tasks.protocol import Data, Rows, Task, Training

logger = logging.getLogger(__name__)

Check = Callable[[AnyPlan], list[Problem]]


def check_resume(plan: AnyPlan) -> list[Problem]:
    """Refuse a checkpoint that does not exist, is not trusted, or does not fit the plan."""
    asked, max_restarts = plan.training.resume_from_checkpoint, elastic.most_restarts(plan.environ)
    found = problems_of(_check_checkpoint, plan)
    if max_restarts and asked not in (None, AUTO):  # without a name, the restarted command resumes by itself
        given = "--resume_from_checkpoint", asked
        found.insert(0, problem("restarts-from-named-checkpoint", *given, max_restarts=max_restarts))
    return found


def _check_checkpoint(plan: AnyPlan) -> None:
    point, trusts = _at_a_glance(plan), plan.model.trust_checkpoint
    for each in filter(None, (point.checkpoint, point.best)):
        check_trusted(each, plan.output_dir, trusts)
    if point.checkpoint is not None and plan.launch.is_known:
        compatibility.check_fits(point.checkpoint, plan.launch, plan.configuration, plan.model_values)


def _at_a_glance(plan: AnyPlan) -> ResumePoint:
    """The resume point, as far as this node's disk and the sizes of large files show it."""
    asked = plan.training.resume_from_checkpoint
    if asked is None:
        return ResumePoint()
    try:
        return choose_resume_point(plan.output_dir, asked, DamageReader(thorough=False))
    except UserError:
        if plan.launch.is_one_node:
            raise
        return ResumePoint()  # another node's disk may hold the checkpoint


def check_snapshots(plan: AnyPlan) -> list[Problem]:
    """Refuse `--snapshot_steps` with `--async_save`, and without room for two snapshots of each node held here."""
    training, launch = plan.training, plan.launch
    if not training.snapshot_steps:
        return []
    from indictune.checkpoint.snapshots import FLAG, MEMORY
    from indictune.models.config_shapes import meta_model
    from indictune.planning.memory import checkpoint_of_node

    found = []
    if training.async_save:
        found.append(problem("no-effect", "--async_save", "true", other=f"{FLAG} {training.snapshot_steps}"))
    size = checkpoint_of_node(plan, meta_model(plan.model, plan.known_config, plan.head))
    needed = 2 * size * (1 if launch.is_one_node else 2)
    free = _free_bytes(plan)
    if needed > free:
        sizes = {"needed": f"{needed / 2**30:.1f}", "free": f"{free / 2**30:.1f}"}
        found.append(problem("no-room-for-snapshots", FLAG, training.snapshot_steps, folder=MEMORY, **sizes))
    return found


def _free_bytes(plan: AnyPlan) -> int:
    """What a run may use of the folder in memory: what is free, and what its own snapshots of before take."""
    from indictune.checkpoint.snapshots import MEMORY, folder_of
    from indictune.planning.hardware import free_and_capacity

    if not MEMORY.is_dir():
        return 0
    free, _ = free_and_capacity()
    own = folder_of(plan.output_dir)
    taken = sum(each.stat().st_size for each in own.rglob("*") if each.is_file()) if own is not None else 0
    return min(shutil.disk_usage(MEMORY).free, free) + taken


def check_processes(plan: AnyPlan) -> list[Problem]:
    """Refuse several processes a GPU."""
    processes = plan.launch.local_world_size
    if not 0 < plan.gpus < processes:  # without a GPU, any number of processes runs on the CPU
        return []
    return [problem("more-processes-than-gpus", "--num_processes", processes, gpus=plan.gpus)]


def check_number_type(plan: AnyPlan) -> list[Problem]:
    """Refuse fp16 without a GPU: accelerate (1.15) would train in fp32 without a warning."""
    return [problem("fp16-without-gpu", "--fp16", "true")] if plan.training.fp16 and not plan.gpus else []


def check_launcher_settings(plan: AnyPlan) -> list[Problem]:
    """Refuse fp8, which no flag can give: `recipe.yaml` would not record it."""
    asked, instead = plan.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower(), "--bf16 true or --fp16 true"
    return [problem("launcher-sets", "--mixed_precision", asked, instead=instead)] if asked == "fp8" else []


def check_hub(plan: AnyPlan) -> list[Problem]:
    """Refuse to train towards a push that cannot succeed: no token, or no valid name of a repository."""
    training, found = plan.training, []
    if not training.push_to_hub:
        return []
    from indictune.config.early_values import name_problems
    from indictune.hub.publish import repository_name

    if get_token() is None:
        found.append(problem("hub-token-missing", "--push_to_hub"))
    name = repository_name(training.hub_model_id, plan.output_dir)
    flag, value = ("--hub_model_id", name) if training.hub_model_id else ("--output_dir", plan.output_dir)
    return found + name_problems(name, flag, value)


def check_loggers(plan: AnyPlan) -> list[Problem]:
    """Refuse a logger that transformers does not know or that is not installed."""
    names = plan.training.report_to
    if names in (["none"], ["all"]):
        return []
    available = get_available_reporting_integrations()  # type: ignore[no-untyped-call]
    missing = [name for name in names if name not in available]
    return [problem("logger-missing", "--report_to", name, installed=", ".join(available)) for name in missing]


CHECKS: tuple[Check, ...] = (
    values.check_fixed_values,
    values.check_values,
    values.check_schedule,
    values.check_optimizer,
    check_launcher_settings,
    check_number_type,
    check_hub,
    check_loggers,
    check_resume,
)


def check_launch(plan: AnyPlan) -> list[Problem]:
    """Check the machine of several processes, and each axis that they split. What a launch lacks is not imported."""
    axes, checks = plan.launch.axes, list[Check]()
    if axes.pipeline > 1:
        checks.append(check_pipeline)
    if axes.context > 1:
        from indictune.distributed.context import check_context

        checks.append(check_context)
    if axes.tensor > 1:
        from indictune.distributed.tensor import check_split

        checks.append(check_split)
    if plan.launch.world_size > 1:
        from indictune.planning.machine_failures import check_interfaces

        checks.append(check_interfaces)
    return [each for check in checks for each in check(plan)]


def check_packages(plan: AnyPlan, task: Task[Any, Any, Any], trains: bool = True) -> list[Problem]:
    """Refuse what needs the extra `train`. One process evaluates a model without what trains its task."""
    launch, model, needed = plan.launch, plan.model, list[tuple[str, object, str]]()
    if trains or launch.world_size > 1:
        needed += [("task", task.name, package) for package in task.packages]
    if launch.deepspeed is not None:
        needed.append(("--deepspeed", launch.deepspeed_source or launch.strategy, "deepspeed"))
    if model.method == "qlora":
        needed.append(("--method", "qlora", "bitsandbytes"))
    elif plan.model_config is not None and stored_quantisation(plan.model_config):
        needed.append(("--model_name_or_path" if trains else "--model", model.model_name_or_path, "bitsandbytes"))
    return [each for flag, value, package in needed for each in missing_extra(flag, value, "train", package)]


def check_model(plan: AnyPlan) -> list[Problem]:
    """Check the model's weights, and its configuration, which the plan has, against method, strategy and lengths."""
    config, found = plan.known_config, problems_of(are_pickled, plan.model)
    found += check_learned_vocabulary(plan.model)
    found += problems_of(check_max_length, config, plan.data.max_length)
    if plan.launch.is_known:
        found += [*check_weights(plan, stored_quantisation(config)), *check_snapshots(plan)]
    return found + (problems_of(check_published_base, plan.model, True) if plan.training.push_to_hub else [])


def preflight(plan: RunPlan[Any, Any], task: Task[Any, Any, Any]) -> list[Problem]:
    """Everything in the plan that cannot work, each problem once. Nothing is changed and no row is read."""
    checks = CHECKS + ((check_processes, check_strategy, check_launch) if plan.launch.is_known else ())
    found = [*(each for check in checks for each in check(plan)), *values.check_metric(plan, task)]
    found += [*values.check_long_texts(plan.data, task), *check_do_predict(plan), *check_packages(plan, task)]
    if plan.model_config is not None:
        found += [*check_model(plan), *task.check(plan)]
    choice = plan.configuration.get("active_vocabulary")  # of a task that has the flag
    if choice == "on":
        from indictune.distributed.vocabulary_choice import check_active_vocabulary

        found += check_active_vocabulary(choice, plan.model.method, str(plan.training.optim))
    return list(dict.fromkeys(found))


def check_do_predict(plan: AnyPlan) -> list[Problem]:
    """Refuse `--do_predict` without test rows. With them, every run writes their predictions."""
    asked, given = plan.training.do_predict, plan.configuration
    lacks_rows = asked and not (given.get("test_file") or given.get("dataset_name"))
    return [problem("needs-test-rows", "--do_predict", asked)] if lacks_rows else []


def preflight_of_evaluation(plan: AnyPlan, task: Task[Any, Any, Any]) -> list[Problem]:
    """As `preflight`, of an evaluation without training."""
    checks: tuple[Check, ...] = (check_launcher_settings, check_number_type)
    checks += (check_processes, check_launch) if plan.launch.is_known else ()
    found = [each for check in checks for each in check(plan)]
    return list(dict.fromkeys([*found, *check_packages(plan, task, trains=False)]))


def dropout_note(plan: AnyPlan) -> str:
    """What dropout does to a comparison of strategies; empty for one process, and for a model without dropout."""
    of_adapter = plan.model.lora_dropout if plan.model.method != "full" else 0.0
    of_model = plan.model_config is not None and any(dropout_of(plan.model_config).values())
    draws = bool(of_adapter or of_model) if plan.model.dropout is None else plan.model.dropout > 0
    if plan.launch.world_size == 1 or not draws:
        return ""
    return (
        "Each process draws its own dropout, so another number of processes trains a slightly other model. "
        "To compare runs, give --dropout 0."
    )


def read_rows(plan: RunPlan[Data, Training], task: Task[Rows, Data, Training], found: list[Problem]) -> Rows:
    """The rows of a run, read and checked, and before that the first line of the run: where it trains.

    A warning in capitals stands above it if a large recipe for GPUs finds none. If problems of the plan are found,
    only the first rows are read, which tell of missing columns.

    Raises:
        UserError: all problems, those of the plan and those of the rows.
    """
    problems = Problems(found)
    if not problems:
        if warning := missing_gpu(plan):
            logger.warning(warning)
        logger.info(where_it_runs(plan))
        for note in filter(None, (slow_bf16(plan), dropout_note(plan))):
            logger.info(note)
    inputs = replace(task.open(plan, problems), checkpoint=None if problems else _at_a_glance(plan).checkpoint)
    if inputs.sources is not None and "train" in inputs.sources:
        is_split = bool(plan.configuration.get("validation_split"))  # of a task that has the flag
        problems.extend(values.check_evaluations(plan, is_split or "validation" in inputs.sources))
    rows = task.read(plan, inputs, problems)
    problems.raise_any()
    assert rows is not None
    return rows

"""From a plan to a run that may train: batches are cut, the process group is up, the resume point is chosen."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import TypeVar

from transformers import set_seed

from indictune.checkpoint import abandoned, compatibility, copying, flag_files, resume, store
from indictune.checkpoint.resume_point import ResumePoint
from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import AnyPlan, RowArguments, RunPlan
from indictune.config.recipe import resolved
from indictune.distributed import batch_size, collectives, launch_check, node_disks, process_group
from indictune.distributed.deepspeed_config import check_deepspeed_file
from indictune.distributed.strategy_limits import check_communication
from indictune.errors import UserError
from indictune.files import AUTO, RECIPE, write_yaml
from indictune.preflight.derive import checked_accumulation
from indictune.run import Run
from indictune.tasks.protocol import Tokens

logger = logging.getLogger("indictune")

Data = TypeVar("Data", bound=RowArguments)
Training = TypeVar("Training", bound=IndicTrainingArguments)


def fit_batches(plan: RunPlan[Data, Training], tokens: Tokens, padded: bool, run: Run) -> RunPlan[Data, Training]:
    """Cut global batches so that no process gets more than `--max_tokens_per_device` at once, where that is given.

    Args:
        plan: of the run.
        tokens: of the rows.
        padded: whether rows are padded to the longest of their micro-batch.
        run: warns of a flag without effect.

    Raises:
        UserError: a row is too long, or the DeepSpeed file has other sizes.
    """
    training = plan.training
    if (max_tokens := training.max_tokens_per_device) is None:
        return plan
    given = plan.recipe.values.get("per_device_train_batch_size")
    if given is not None:
        run.warn([f"Ignoring --per_device_train_batch_size {given}: --max_tokens_per_device is given."])
    rows, world_size = training.global_batch_size, plan.launch.world_size
    seed = training.seed if training.data_seed is None else training.data_seed
    run_steps = batch_size.steps_of_run(len(tokens.lengths), rows, training.max_steps, training.num_train_epochs)
    steps = batch_size.accumulation_for_tokens(
        tokens.lengths, tokens.row_location, max_tokens, rows, world_size, seed, run_steps, padded
    )
    plan = plan.derive(
        gradient_accumulation_steps=checked_accumulation(plan, steps, "--max_tokens_per_device"),
        per_device_train_batch_size=math.ceil(rows / (world_size * steps)),
    )
    problems = [*check_deepspeed_file(plan), *check_communication(plan)]
    if problems:
        raise UserError(problems=problems)
    return plan


def start(
    plan: RunPlan[Data, Training], run: Run, has_validation: bool
) -> tuple[RunPlan[Data, Training], Training, ResumePoint]:
    """Bring up the process group, and choose the checkpoint to resume from. All ranks must call it.

    Raises:
        UserError: transformers refuses a value, another strategy came up, or the checkpoint cannot be resumed.
        Finished: there is nothing to do.
    """
    if not has_validation:
        plan = plan.derive(eval_strategy="no", load_best_model_at_end=False)
        run.warn(["No validation rows: the run is not evaluated while it trains, and the last weights are kept."])
    plan, args = bring_up(plan, run)
    point = _resume_point(plan, args, run)
    trusts = plan.model.trust_checkpoint
    run.warn(resume.doubts_to_come(plan.output_dir, trusts))
    if point.checkpoint is not None:
        logger.info("Resuming from %s", point.checkpoint)
    elif plan.training.resume_from_checkpoint == AUTO:
        logger.info("%s holds no whole checkpoint: starting afresh", plan.output_dir)
        run.warn(abandoned.notes(plan.output_dir))
    logger.info(
        "%s on %d process(es), global batch of %d rows = %d x %d rows x %d accumulation step(s)",
        *(plan.launch.strategy, args.world_size, args.global_batch_size, args.world_size),
        *(args.per_device_train_batch_size, args.gradient_accumulation_steps),
    )
    return plan, args, point


def bring_up(plan: RunPlan[Data, Training], run: Run) -> tuple[RunPlan[Data, Training], Training]:
    """Start the process group, with the CPU fallback where it is needed, and check that it is the one asked for.

    Raises:
        UserError: transformers refuses a value, or another strategy came up.
    """
    decided, limits = process_group.bring_up(plan.launch, os.environ, plan.training.ddp_timeout)
    run.warn(limits)
    plan = plan.derive(**decided)
    args = plan.recipe.build(type(plan.training), **plan.derived)
    launch_check.check_came_up(plan.launch, args)
    run.warn(launch_check.use_one_gpu(args, plan.model.device_map))
    set_seed(args.seed)
    return plan, args


def _resume_point(plan: AnyPlan, args: IndicTrainingArguments, run: Run) -> ResumePoint:
    """The checkpoint to resume from, after what a killed run left half-written is gone.

    Raises:
        UserError: another run writes to this disk, or the checkpoint is damaged or does not fit.
    """
    output_dir, trusts = plan.output_dir, plan.model.trust_checkpoint
    args.save_on_each_node = not node_disks.disk_is_shared(output_dir, args)
    if args.should_save:
        copying.recover(output_dir)
    collectives.barrier()
    asked = plan.recipe.values.get("resume_from_checkpoint")
    resume.end_if_finished(output_dir, asked)
    found = store.listed(output_dir)
    if asked != AUTO:
        found = [] if asked is None else [Path(asked)]
    chosen, best = resume.newest_whole(found, asked, args, trusts)
    for each in filter(None, (chosen, best)):
        resume.check_trusted(each, output_dir, trusts)
    if chosen is not None:
        configuration = resolved(plan.model, plan.data, args)
        run.warn(resume.check_fits(chosen, plan.launch, configuration, plan.model_values))
        run.warn(compatibility.differences(chosen, configuration, flag_contents(plan), args.world_size))
    return ResumePoint(chosen, best)


def flag_contents(plan: AnyPlan) -> flag_files.Content:
    """What the files that flags name say of the steps."""
    return flag_files.read(plan.configuration, plan.launch.deepspeed)


def write_recipe(plan: AnyPlan, args: IndicTrainingArguments, point: ResumePoint) -> None:
    """Write `recipe.yaml` on every disk, once nothing can refuse the run any more."""
    if args.should_save:
        whole = plan.recipe.to_record((plan.model, plan.data, args), plan.derived)
        checkpoint = None if point.checkpoint is None else str(point.checkpoint)
        configuration = whole | compatibility.in_the_states(checkpoint)
        write_yaml(plan.output_dir / RECIPE, configuration)
        flag_files.write(plan.output_dir, flag_contents(plan))

"""From a plan to a run that trains: batches cut, process group up, resume point chosen, model loaded."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import (
    EarlyStoppingCallback,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import TrainOutput

from indictune.checkpoint import compatibility, resume, snapshots, store
from indictune.checkpoint.resume import AllRanksReader, Finished, ResumePoint, choose_resume_point
from indictune.config.arguments import IndicTrainingArguments
from indictune.config.command_line import DECIDED, LAUNCHED_BY, OBJECTS_FILE, PARITY_TRACE
from indictune.config.plan import AnyPlan, Launch, RunPlan
from indictune.config.recipe import resolved
from indictune.data import labels
from indictune.data.bad_rows import keep_rejected
from indictune.data.batching import lengths_of
from indictune.data.health.row_health import check_health
from indictune.data.read.hub_datasets import commit_read
from indictune.data.read.row_sources import BUILTIN
from indictune.distributed import agreement, collectives, process_group, sharding, strategy, zero
from indictune.distributed.batch_size import split_batch
from indictune.distributed.devices import check_cpu_time
from indictune.distributed.launch import is_one_node
from indictune.distributed.parallelism import splits_one_model
from indictune.distributed.sharding import reading_weights
from indictune.distributed.strategy import check_strategy
from indictune.errors import Problem, Problems, problem
from indictune.files import AUTO, HEALTH, METRICS, NOTHING_TO_DO, RECIPE, Record, is_finished, write_json, write_yaml
from indictune.models.load import Model
from indictune.models.unpadded import padding_notes
from indictune.preflight.checks import check_launch
from indictune.preflight.derive import with_least_steps
from indictune.preflight.values import check_evaluations, check_metric_of_rows
from indictune.run import OWN_PROGRESS, Run
from indictune.tasks.protocol import Data, Objective, Task, Tokens, Training
from indictune.training import bad_steps
from indictune.training.callbacks.every_step import CheckDivergence, StepFlags, TrainLog
from indictune.training.exact_trainer import ExactTrainer, IndicTrainer
from indictune.training.task_trainer import NothingLeft, RunContext
from indictune.upstream import end_training

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger("indictune")

_ROWS_TIMEOUT_S = 12 * 3600.0  # a node with its own disk may prepare its rows alone


@dataclass(eq=False)
class LoadBest(TrainerCallback):
    """Commits the last checkpoint, then loads the best one.

    The Trainer (5.23) would load the best before that, and delete the last checkpoint before the model is saved.
    """

    trainer: ExactTrainer

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.trainer.checkpoints.end()
        self.trainer.load_best()


class ReportProgress(TrainerCallback):
    """Records which step has ended, and that this rank still moves."""

    def _passed(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        OWN_PROGRESS.step = state.global_step
        OWN_PROGRESS.passed("ending a step, a micro-batch or a checkpoint")

    on_step_end = on_substep_end = on_prediction_step = on_save = _passed


def watch(trainer: ExactTrainer, plan: AnyPlan, run: Run, point: ResumePoint) -> None:
    """Add the callbacks that the run asks for. Code of the others is not imported."""
    trainer.add_callback(TrainLog(Record(plan.output_dir / "train_log.jsonl"), trainer.throughput))
    trainer.add_callback(StepFlags(trainer))
    if every := trainer.args.divergence_check_steps:
        if trainer.args.world_size > 1:
            trainer.add_callback(CheckDivergence(trainer, every))
        else:
            run.warn([f"Ignoring --divergence_check_steps {every}: one process has nothing to compare with."])
    if trainer.args.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(trainer.args.early_stopping_patience))
    if OBJECTS_FILE in os.environ:
        from indictune.python_objects import functions_of_program

        for each in functions_of_program()["callbacks"]:
            trainer.add_callback(each)
    trainer.add_callback(ReportProgress())
    trainer.remove_callback(PrinterCallback)  # `TrainLog` writes what is logged
    trainer.add_callback(LoadBest(trainer))
    if trainer.args.push_to_hub and trainer.args.hub_strategy == "every_save":
        from indictune.hub.publish import destination_of
        from indictune.training.callbacks.push_saves import PushSaves

        trainer.add_callback(PushSaves(plan.output_dir, destination_of(plan.output_dir, trainer.args)))
    if point.checkpoint is not None:
        from indictune.training.callbacks.restore_progress import RestoreProgress

        trainer.add_callback(RestoreProgress(trainer, point))
    if trace := os.environ.get(PARITY_TRACE):
        from indictune.training.callbacks.parity_trace import ParityTrace

        trainer.add_callback(ParityTrace(trainer, Record(Path(trace))))
    if trainer.args.profile_steps:
        from indictune.training.callbacks.profile_steps import ProfileSteps

        trainer.add_callback(ProfileSteps(trainer.args.profile_steps, run))


def check_first_step(plan: AnyPlan) -> list[Problem]:
    """Refuse a script that would leave the pretraining out, which `indictune train` does first."""
    recipe = plan.configuration.get("pretrain")
    left_out = recipe and LAUNCHED_BY not in os.environ
    return [problem("pretrain-without-train", "--pretrain", recipe)] if left_out else []


def meet_nodes(plan: AnyPlan) -> list[Problem]:
    """What another node has other than the first, before a row is read. All ranks must call it, and meet here."""
    if is_one_node(plan.environ):
        return []
    from indictune.training.rank_consistency import values_of_node

    in_files = Problems().attempt(flag_contents, plan) or {}  # the preflight reports a file that is missing
    values = partial(values_of_node, plan, in_files)
    return agreement.agree("before the rows", values, plan.launch, plan.environ, plan.training.ddp_timeout)


def fit_batches(plan: RunPlan[Data, Training], tokens: Tokens, padded: bool, run: Run) -> RunPlan[Data, Training]:
    """The whole plan, with what follows from the tokens: `--max_length`, the split of the batch, no evaluations.

    `padded` says whether rows are padded to the longest of their micro-batch.

    Raises:
        UserError: the rows pass a limit of their health, a CPU would take hours, a row is too long, or the strategy
            has no such communication.
    """
    check_health(tokens.health, plan.configuration)
    plan = with_least_steps(plan, len(tokens.train), tokens.validation is not None)
    check_cpu_time(plan, tokens.train)
    plan = plan.with_max_length(tokens.max_length)
    by_tokens = plan.training.max_tokens_per_device is not None
    given = plan.recipe.values.get("per_device_train_batch_size")
    if by_tokens and given is not None:
        run.warn([f"Ignoring --per_device_train_batch_size {given}: --max_tokens_per_device is given."])
    found: dict[str, Any] = {}
    if by_tokens:
        found |= split_batch(plan, lengths_of(tokens.train, padded), tokens.row_location, padded)
    if tokens.validation is None:
        found |= {"eval_strategy": "no", "load_best_model_at_end": False}
    plan = plan.derive(**found)
    if by_tokens:
        Problems(check_strategy(plan) + check_launch(plan)).raise_any()
    return plan


def start_ranks(plan: RunPlan[Data, Training], run: Run, tokens: Tokens) -> tuple[Training, ResumePoint]:
    """Bring up the process group, and choose the checkpoint to resume from. All ranks must call it.

    Raises:
        UserError: another node has other rows, transformers refuses a value, another strategy came up, a collective
            is wrong, or the checkpoint cannot be resumed.
        Finished: there is nothing to do.
    """
    if not is_one_node(plan.environ):
        from indictune.training.rank_consistency import values_of_rows

        values = partial(values_of_rows, tokens)
        Problems(agreement.agree("with their rows", values, plan.launch, plan.environ, _ROWS_TIMEOUT_S)).raise_any()
    run.warn([] if plan.model_config is None else padding_notes(plan.model_config, trains=True))
    if tokens.validation is not None:
        Problems(check_metric_of_rows(str(plan.training.metric_for_best_model), tokens)).raise_any()
    else:
        Problems(check_evaluations(plan, has_validation=False)).raise_any()
        if plan.training.metrics and tokens.test is None:
            run.warn([f"Ignoring --metrics {' '.join(plan.training.metrics)}: there are no rows to score."])
        run.warn(["No validation rows: the run is not evaluated while it trains, and the last weights are kept."])
    args = bring_up(plan, run)
    if args.world_size > 1:
        from indictune.doctor.examination import check_ranks

        run.warn(check_ranks(plan, args))
    point = _resume_point(plan, args, run)
    if point.checkpoint is not None:
        logger.info("Resuming from %s", point.checkpoint)
    elif plan.training.resume_from_checkpoint == AUTO:
        logger.info("%s holds no whole checkpoint: starting afresh", plan.output_dir)
    logger.info(
        "a step: %d rows = %d at once x %d %s x %d time%s",
        *(args.global_batch_size, args.per_device_train_batch_size),
        *(plan.launch.data_size, _ranks(plan.launch)),
        *(args.gradient_accumulation_steps, "s" if args.gradient_accumulation_steps > 1 else ""),
    )
    return args, point


def _ranks(launch: Launch) -> str:
    if launch.axes.model_ranks > 1:
        return f"group{'s' * (launch.data_size > 1)} of {launch.axes.model_ranks} processes"
    return "processes" if launch.data_size > 1 else "process"


def load_model(
    task: Task[Any, Data, Training],
    plan: RunPlan[Data, Training],
    args: Training,
    rows: Any,
    tokens: Tokens,
    point: ResumePoint,
) -> Model:
    """The model, ready to train. All ranks must call it: one may read the weights and send them."""
    with reading_weights(args, splits_one_model(plan.launch)) as reads_weights:
        model = task.load_model(plan, args, rows, reads_weights)
    if "active_vocabulary" in plan.configuration:
        from indictune.distributed.vocabulary_choice import use_active_vocabulary

        datasets = tokens.train, tokens.validation, tokens.test
        use_active_vocabulary(model, cast(Any, args), datasets, rows.tokenizer, point.checkpoint)
    return model


def context_of(plan: AnyPlan, run: Run, tokens: Tokens) -> RunContext:
    """What the trainer of a run knows of it."""
    return RunContext(
        launch=plan.launch,
        stop_request=run.stop_request,
        trusts_checkpoint=plan.model.trust_checkpoint,
        row_location=tokens.row_location,
        bad_steps=Record(plan.output_dir / bad_steps.FILE) if run.rank == 0 else None,
        validation_origins=tokens.origins.get("validation"),
        samples=tokens.samples,
        test_rows=tokens.test,
    )


def make_trainer(
    model: Model,
    args: Any,
    train_dataset: Dataset | None,
    eval_dataset: Dataset | None,
    tokenizer: PreTrainedTokenizerBase,
    objective: Objective,
    padded: bool,
    context: RunContext,
) -> ExactTrainer:
    """The trainer of an objective: for one without a loss TRL's, which evaluations do without if it is missing."""
    if objective.loss is not None or find_spec("trl") is None:
        return IndicTrainer(model, args, train_dataset, eval_dataset, tokenizer, objective, padded, context)
    from indictune.training.chat_trainer import LlamaTrainer  # imports TRL

    assert train_dataset is not None
    return LlamaTrainer(model, args, train_dataset, eval_dataset, tokenizer, padded, context, objective)


def bring_up(plan: RunPlan[Data, Training], run: Run) -> Training:
    """Start the process group, on a CPU if there is no GPU, and complete the training arguments.

    What transformers refuses, and another strategy that came up, is a `UserError`.
    """
    run.warn(strategy.notes_on_file(plan))
    if plan.launch.from_file:
        logger.info("From the strategy file: %s", strategy.taken_values(plan))
    decided = process_group.start_process_group(plan.launch, os.environ, plan.training.ddp_timeout)
    args = plan.recipe.build(type(plan.training), **{**plan.derived, **decided, **run.console_values})
    sharding.check_strategy_started(plan.launch, args)
    run.warn(sharding.use_one_gpu(args, plan.model.device_map))
    set_seed(args.seed)
    run.plan = plan
    return args


def _resume_point(plan: AnyPlan, args: IndicTrainingArguments, run: Run) -> ResumePoint:
    """The checkpoint to resume from. Leftovers of a killed run are removed, and damaged checkpoints set aside.

    A run that is finished on some disks only resumes from its last checkpoint, and finishes on all.
    """
    output_dir, trusts, asked = plan.output_dir, plan.model.trust_checkpoint, plan.training.resume_from_checkpoint
    args.save_on_each_node = args.world_size > 1 and not collectives.disk_is_shared(output_dir, args)
    if args.save_on_each_node and args.local_process_index == 0 and run.rank != 0:
        run.lock_folder()  # on the disk of a node without rank 0
    if args.should_save:
        store.remove_leftovers(output_dir)
    if args.world_size > 1:
        collectives.barrier()
    if asked == AUTO and all(collectives.gather_from_all(is_finished(output_dir))):
        raise Finished(f"{output_dir}: {NOTHING_TO_DO}")
    disks_group = collectives.group_of_disks(args) if args.save_on_each_node else None
    if args.snapshot_steps:
        snapshots.bring_to_disk(args, asked == AUTO, disks_group)
    if asked is None:
        return ResumePoint()
    point = choose_resume_point(output_dir, asked, AllRanksReader(args, trusts, disks_group))
    run.warn(point.warnings)
    for each in filter(None, (point.checkpoint, point.best)):
        resume.check_trusted(each, output_dir, trusts)
    if point.checkpoint is not None:
        now = resolved(plan.model, plan.data, args)
        compatibility.check_fits(point.checkpoint, plan.launch, now, plan.model_values)
        run.warn(compatibility.resume_warnings(point.checkpoint, plan.launch, now | flag_contents(plan)))
        digests = compatibility.train_file_digests(now) if args.should_save else {}  # once on a disk: it reads them
        if changed := compatibility.changed_files(point.checkpoint, digests):
            run.warn([f"{point.checkpoint.name}:{changed}"])
    for each in filter(Path.exists, point.damaged if args.should_save else ()):
        store.set_aside(each)
    return point


def flag_contents(plan: AnyPlan) -> compatibility.Content:
    """The values in files that flags name, as far as they change the steps; a `UserError` if one cannot be read."""
    found: compatibility.Content = {}
    if (weights := labels.given_weights(plan.configuration.get("class_weights"))) is not None:
        found["class_weights"] = weights
    if plan.launch.deepspeed is not None:
        found["deepspeed"] = zero.settings_of_steps(plan.launch.deepspeed)
    return found


def write_recipe(plan: AnyPlan, args: IndicTrainingArguments, run: Run, point: ResumePoint) -> None:
    """Write `recipe.yaml` on every disk, once nothing can refuse the run any more. What the user chose comes first.

    A finished run that is resumed by name is no longer finished: `metrics.json`, its mark, is removed.
    """
    if not args.should_save:
        return
    whole = plan.recipe.to_record((plan.model, plan.data, args), {*plan.derived, *run.console_values})
    name, revision = map(plan.configuration.get, ("dataset_name", "dataset_revision"))
    if name and name not in BUILTIN and (commit := commit_read(name, revision)):
        whole[DECIDED] = whole.get(DECIDED, {}) | {"dataset_commit": commit}
    (plan.output_dir / METRICS).unlink(missing_ok=True)
    if point.checkpoint is not None:
        whole |= compatibility.kept_settings(point.checkpoint)
    write_yaml(plan.output_dir / RECIPE, whole, chosen=plan.recipe.values)
    rows = {compatibility.TRAIN_ROWS: compatibility.train_file_digests(plan.recipe.values)}
    write_json(plan.output_dir / compatibility.FLAG_FILES, flag_contents(plan) | rows)


def begin_training(trainer: ExactTrainer, plan: AnyPlan, run: Run, point: ResumePoint, tokens: Tokens) -> None:
    """Add all callbacks, compare the ranks, and write the recipe. All ranks must call it."""
    watch(trainer, plan, run, point)
    if trainer.args.world_size > 1:
        from indictune.training.rank_consistency import check_ranks_agree

        check_ranks_agree(trainer, tokens.test, plan.recipe.values, flag_contents(plan))
    if point.checkpoint is not None:
        from indictune.training.callbacks.restore_progress import check_rows

        check_rows(trainer, point.checkpoint, plan.recipe.values)
    if trainer.args.metrics and (rows := tokens.validation or tokens.test) is not None:
        from indictune.training.evaluation import scores_by_metrics

        scores_by_metrics(trainer, trainer.objective.compared(rows, None), rows["language"][:])
    if tokens.folder is not None:
        keep_rejected(tokens.folder, plan.output_dir, run.rank)
    write_recipe(plan, trainer.args, run, point)
    if tokens.health is not None and run.rank == 0:
        write_json(plan.output_dir / HEALTH, tokens.health.as_json())
    run.trainer = trainer


def train_model(trainer: ExactTrainer, point: ResumePoint) -> TrainOutput:
    """Train, from the resume point if it has a checkpoint. All ranks must call it."""
    try:
        return trainer.train(resume_from_checkpoint=None if point.checkpoint is None else str(point.checkpoint))
    except NothingLeft:
        return end_training(trainer)

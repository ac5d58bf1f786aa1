"""Train a model from a resume point, or from its first step."""

from __future__ import annotations

import time
from typing import cast

from transformers.trainer_utils import TrainOutput

from indictune.checkpoint.resume import ResumePoint
from indictune.config.plan import AnyPlan
from indictune.data.bad_rows import keep_rejected
from indictune.files import HEALTH, write_json
from indictune.run import Run
from indictune.tasks.protocol import Tokens
from indictune.training.callbacks.register import watch
from indictune.training.callbacks.restore_progress import NothingLeft, check_rows
from indictune.training.exact_trainer import ExactTrainer
from indictune.training.rank_consistency import check_alike
from indictune.training.start import flag_contents, write_recipe


def train(trainer: ExactTrainer, plan: AnyPlan, run: Run, point: ResumePoint, tokens: Tokens) -> TrainOutput:
    """Train with all callbacks, from the resume point if it has a checkpoint. All ranks must call it.

    `recipe.yaml` records the plan once nothing can refuse the run any more, and `health.json` the rows.

    Raises:
        UserError: the checkpoint, or another rank, has other rows.
    """
    trainer.validation_origins, trainer.samples = tokens.origins.get("validation"), tokens.samples
    watch(trainer, plan, run, point, tokens.row_location)
    check_alike(trainer, tokens.test, plan.recipe.values, flag_contents(plan))
    if point.checkpoint is not None:
        check_rows(trainer, point.checkpoint)
    if tokens.folder is not None:
        keep_rejected(tokens.folder, plan.output_dir, run.rank)
    write_recipe(plan, trainer.args, point)
    if tokens.health is not None and run.rank == 0:
        write_json(plan.output_dir / HEALTH, tokens.health.as_json())
    run.trainer = trainer
    try:
        return trainer.train(resume_from_checkpoint=None if point.checkpoint is None else str(point.checkpoint))
    except NothingLeft:
        return cast(TrainOutput, trainer._finalize_training(None, 0, time.time()))  # type: ignore[no-untyped-call]

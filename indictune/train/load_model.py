"""The model of a run, ready for its trainer."""

from __future__ import annotations

from typing import Any, TypeVar

from indictune.checkpoint.resume_point import ResumePoint
from indictune.config.arguments import IndicTrainingArguments, SentimentTrainingArguments
from indictune.config.plan import RowArguments, RunPlan
from indictune.distributed.read_weights import reading_weights
from indictune.distributed.vocabulary_choice import use_active_vocabulary
from indictune.models.load import Model
from indictune.tasks.protocol import Task, Tokens

Data = TypeVar("Data", bound=RowArguments)
Training = TypeVar("Training", bound=IndicTrainingArguments)


def load_model(
    plan: RunPlan[Data, Training],
    task: Task[Any, Data, Training],
    args: Training,
    rows: Any,
    tokens: Tokens,
    point: ResumePoint,
) -> Model:
    """Load the weights, and leave unused embedding rows out of training where the task asks for it. All ranks call it.

    Args:
        plan: of the run.
        task: makes the model.
        args: as transformers has completed them.
        rows: of the run, with the tokenizer.
        tokens: of the rows.
        point: to resume from.
    """
    with reading_weights(args) as reads_weights:
        model = task.load_model(plan, args, rows, reads_weights)
    if isinstance(args, SentimentTrainingArguments):
        use_active_vocabulary(model, args, tokens.datasets, rows.tokenizer, point.checkpoint)
    return model

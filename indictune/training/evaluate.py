"""Evaluate a finished run's model on a file: the numbers that the run itself would have written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig

from indictune.arguments import EvaluateArguments, IndicTrainingArguments, ModelArguments
from indictune.config import Recipe, read_recipe
from indictune.data.loading import load_test_rows
from indictune.data.preparation import tokenise
from indictune.errors import UserError
from indictune.models.loading import class_names, load_tokenizer, load_trained
from indictune.models.sources import explained
from indictune.strategy import sharding
from indictune.training.loss import ExactLoss
from indictune.training.results import evaluate, run_metrics, write_metrics
from indictune.training.session import Session, run
from indictune.training.trainer import IndicTrainer

# What must be as it was in training, unless the command says otherwise, for the numbers to be the same.
FROM_TRAINING = (
    *("text_column", "label_column", "language_column", "max_length"),
    *("per_device_eval_batch_size", "bf16", "fp16", "trust_remote_code"),
)


def evaluate_command(argv: Sequence[str]) -> int:
    """`indictune evaluate --model DIR --test_file F [--output_dir D]`; returns the exit code."""
    recipe = read_recipe(argv, (EvaluateArguments,))
    model, test_file = (recipe.planned(EvaluateArguments, name) for name in ("model", "test_file"))
    for flag, value in (("--model", model), ("--test_file", test_file)):
        if not value:
            recipe.problems.append(f"{flag} is missing.")
    if model:
        with recipe.problems.collecting():
            _as_in_training(recipe, Path(model))
    if (Path(model) / "config.json").is_file():
        recipe.values.setdefault("output_dir", str(Path(model) / "evaluation" / Path(test_file).stem))
    return run(_main, recipe, replaceable=("metrics.json",))


def _as_in_training(recipe: Recipe, model: Path) -> None:
    """Take what the command leaves open from the run that made the model.

    Raises:
        UserError: the folder holds no model.
    """
    if not (model / "config.json").is_file():
        raise UserError(f"--model {model}: holds no model (no config.json). Name the --output_dir of a finished run.")
    trained = model / "recipe.yaml"
    configuration: dict[str, Any] = yaml.safe_load(trained.read_text(encoding="utf-8")) if trained.exists() else {}
    for name in FROM_TRAINING:
        if configuration.get(name) is not None:
            recipe.values.setdefault(name, configuration[name])


def _labels(model: str) -> list[str] | None:
    """The model's labels; None where there is no model, which `_as_in_training` has told.

    Raises:
        UserError: the model's config.json cannot be read.
    """
    if not (Path(model) / "config.json").is_file():
        return None
    with explained(ModelArguments(model_name_or_path=model), OSError, ValueError, KeyError, flag="--model"):
        return class_names(AutoConfig.from_pretrained(model))


def _main(session: Session) -> None:
    labels: list[str] | None = None
    with session.checks():
        asked = session.build(EvaluateArguments)
        with session.checks():
            labels = _labels(asked.model)
        if asked.test_file:  # else that has been told too
            rows, notes = load_test_rows(asked.test_file, asked, labels)
    args = session.start_evaluation(IndicTrainingArguments)
    session.warn(notes)
    tokenizer = load_tokenizer(
        ModelArguments(model_name_or_path=asked.model, trust_remote_code=asked.trust_remote_code)
    )
    assert labels is not None  # every problem has been raised
    dataset = tokenise(rows, tokenizer, labels, asked.max_length)
    model = load_trained(asked.model, asked.trust_remote_code)
    trainer = IndicTrainer(model, args, None, None, tokenizer, ExactLoss())
    sharding.prepare_for_evaluation(trainer)
    block = evaluate(trainer, session, dataset, "test")
    write_metrics(session, run_metrics(trainer, session.launch.strategy) | {"test": block})

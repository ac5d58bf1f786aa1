"""Evaluate a finished run's model on a file: the numbers that the run itself would have written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from transformers import AutoConfig, PreTrainedConfig

from indictune.config.arguments import ModelArguments, SentimentTrainingArguments
from indictune.config.command_arguments import EvaluateArguments
from indictune.config.plan import unresolved
from indictune.config.recipe import Recipe, read_recipe, whole_of
from indictune.credentials import NOT_YAML, without_its_text
from indictune.data.bad_rows import keep_rejected
from indictune.data.load_rows import load_test_rows
from indictune.data.tokenisation import tokenise
from indictune.distributed import sharding
from indictune.errors import Problems, UserError, problem, problems_of
from indictune.models.adapter_base import config_file, continues_texts
from indictune.models.classifier import class_names
from indictune.models.load import check_vocabulary, load_tokenizer
from indictune.models.load_errors import explained
from indictune.models.position_limits import check_max_length, positions_of
from indictune.models.trained import load_trained
from indictune.models.unpadded import padding_notes
from indictune.preflight.checks import preflight_of_evaluation
from indictune.preflight.derive import make_evaluation_plan
from indictune.run import Run
from indictune.tasks.text_objectives import objective_of
from indictune.train.classifier_trainer import IndicTrainer
from indictune.train.finish import evaluate_file
from indictune.train.start import bring_up

ANSWER_LENGTH = 2048  # a chat is longer than a tweet; the default of training

# What must be as it was in training, unless the command says otherwise, for the numbers to be the same. Whether the
# model's code is trusted is not among them: the folder would vouch for itself.
FROM_TRAINING = (
    *("text_column", "label_column", "language_column", "max_length", "chat_template", "train_on_prompts"),
    *("per_device_eval_batch_size", "bf16", "fp16"),
)


def evaluation_of(argv: Sequence[str]) -> tuple[Callable[[Run], None], Recipe]:
    """The script and the recipe of `indictune evaluate --model DIR --test_file F [--output_dir D]`."""
    recipe = read_recipe(argv, (EvaluateArguments,))
    asked = unresolved(EvaluateArguments, recipe.values)
    model, test_file = asked.model, asked.test_file
    for flag, value in (("--model", model), ("--test_file", test_file)):
        if not value:
            recipe.problems.append(problem("evaluate-needs", flag))
    if model:
        with recipe.problems.collecting():
            _as_in_training(recipe, Path(model))
    if config_file(model).is_file() and "output_dir" not in recipe.values:
        with recipe.problems.collecting():
            recipe.values["output_dir"] = str(_folder_within(Path(model), Path(test_file).stem))
    if recipe.values.get("output_dir"):
        with recipe.problems.collecting():
            _check_of_this_file(Path(recipe.values["output_dir"]) / "metrics.json", test_file)
    main = _evaluate_classes
    with suppress(ValueError, TypeError, AttributeError):  # no configuration: the classifier's own reading tells so
        if _continues_texts(Path(model)):
            main = _evaluate_answers
    if main is _evaluate_answers and "max_length" not in recipe.values:  # as after `indictune merge`
        with suppress(Exception):  # a configuration that makes no model: the reading of the model tells so
            recipe.values["max_length"] = _answer_length(recipe, Path(model))
    return main, recipe


def _as_in_training(recipe: Recipe, model: Path) -> None:
    """Take what the command leaves open from the run that made the model.

    Raises:
        UserError: the folder holds no model.
    """
    if not config_file(model).is_file():
        raise UserError("no-model", "--model", model)
    trained = model / "recipe.yaml"
    configuration: dict[str, Any] = {}
    try:
        if trained.exists():
            configuration = whole_of(yaml.safe_load(trained.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("unreadable", "--model", f"{model}: its recipe.yaml", reason=error) from error
    except NOT_YAML as error:
        reason = without_its_text(error)
        raise UserError("unreadable", "--model", f"{model}: its recipe.yaml", reason=reason) from None
    types = get_type_hints(EvaluateArguments)
    for name in FROM_TRAINING:
        value = configuration.get(name)
        if name == "chat_template" and isinstance(value, str) and value.endswith(".jinja"):
            value = _saved_template(model)
        if value is not None and isinstance(value, types[name]):
            recipe.values.setdefault(name, value)


def _saved_template(model: Path) -> str | None:
    """The file that was a run's `--chat_template`, as the run has saved it: that file may since have changed, and be
    another's who made the folder. None where it is not saved; the tokenizer may have it."""
    saved = model / "chat_template.jinja"  # as transformers calls it
    return str(saved) if saved.is_file() else None


def _folder_within(model: Path, name: str) -> Path:
    """Where a model's evaluation goes.

    Raises:
        UserError: the name is none of a folder, or a link is there, by which a model that was unpacked would have
            files written anywhere.
    """
    if name in (".", ".."):
        raise UserError("evaluation-folder-name", "--test_file", repr(name))
    folder = model / "evaluation" / name
    for each in (folder.parent, folder):
        if each.is_symlink():
            raise UserError("evaluation-folder-is-link", "--model", model, link=each.relative_to(model))
    return folder


def _check_of_this_file(metrics: Path, test_file: str) -> None:
    """Refuse to write over the metrics of another file.

    Args:
        metrics: that will be written.
        test_file: which they will be of.

    Raises:
        UserError: they are there, and of another.
    """
    of_file: Any = None
    if metrics.is_file() and not metrics.is_symlink():
        with suppress(OSError, ValueError, AttributeError):  # not of this command
            of_file = json.loads(metrics.read_text(encoding="utf-8")).get("test_file")
    if of_file is not None and of_file != os.path.abspath(test_file):
        raise UserError("metrics-of-another-file", "--test_file", test_file, metrics=metrics, other=of_file)


def _continues_texts(model: Path) -> bool:
    """Whether the folder holds a causal language model; else it is a classifier, or nothing."""
    config = config_file(model)
    return config.is_file() and continues_texts(json.loads(config.read_text(encoding="utf-8")).get("architectures"))


def _answer_length(recipe: Recipe, model: Path) -> int:
    """Where no run tells it: the default of training, or as many positions as the model has."""
    trusts = unresolved(EvaluateArguments, recipe.values).trust_remote_code
    positions = positions_of(AutoConfig.from_pretrained(config_file(model), trust_remote_code=trusts))
    return min(ANSWER_LENGTH, positions or ANSWER_LENGTH)


def _evaluate_answers(run: Run) -> None:
    from indictune.train.evaluate_chat import evaluate_answers  # TRL is slow to import

    evaluate_answers(run)


def _evaluate_classes(run: Run) -> None:
    plan, found = make_evaluation_plan(run.recipe, os.environ, SentimentTrainingArguments, _read_config)
    problems, asked, config = Problems(found + preflight_of_evaluation(plan)), plan.data, plan.model_config
    labels, tokenizer, test, mode = None, None, None, None if config is None else config.problem_type
    if config is not None:
        labels = problems.attempt(class_names, config)
        problems.extend(problems_of(check_max_length, config, asked.max_length, begins=False))
        tokenizer = problems.attempt(load_tokenizer, plan.model, flag="--model")
    if asked.test_file:  # else its absence is a problem already
        test = problems.attempt(load_test_rows, asked.test_file, asked, labels, problems, mode)
    problems.raise_any()
    assert config is not None
    assert labels is not None
    assert tokenizer is not None
    assert test is not None
    rows, stored, notes = test
    run.warn([*check_max_length(config, asked.max_length, begins=False), *padding_notes(config, trains=False)])
    plan, args = bring_up(plan, run)
    run.warn(notes)
    keep_rejected(stored, run.output_dir, run.rank)
    dataset = tokenise(stored, {"test": rows}, tokenizer, labels, asked.max_length, mode)["test"]
    model = load_trained(asked.model, asked.trust_remote_code, asked.trust_checkpoint)
    check_vocabulary(plan.model, model, tokenizer, flag="--model")
    trainer = IndicTrainer(model, args, None, None, tokenizer, objective_of(model.config, tokenizer))
    trainer.strategy = plan.launch.strategy
    sharding.prepare_for_evaluation(trainer)
    evaluate_file(trainer, run, dataset, asked.test_file)


def _read_config(args: ModelArguments) -> PreTrainedConfig:
    """The configuration of a trained classifier.

    Raises:
        UserError: it cannot be read.
    """
    with explained(args, Exception, flag="--model"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            args.model_name_or_path, trust_remote_code=args.trust_remote_code
        )
    return config

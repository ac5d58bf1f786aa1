"""Evaluate a finished run's model on a file: the numbers that the run itself would have written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from indictune.config.plan import unresolved
from indictune.config.recipe import Recipe, configuration_of
from indictune.config.shared_arguments import EvaluationArguments
from indictune.data.chat.messages import parse_columns
from indictune.distributed import sharding
from indictune.errors import Problems, UserError, problem
from indictune.files import METRICS, TEST_FILE, json_or_nothing
from indictune.models.adapters import config_file
from indictune.models.load import Model, check_max_length, check_vocabulary, load_tokenizer, positions_of
from indictune.models.task_models import READING_KEY, recorded_reading
from indictune.preflight.checks import preflight_of_evaluation
from indictune.preflight.derive import make_evaluation_plan
from indictune.preflight.values import check_long_texts, check_samples, own_scores_of_plan
from indictune.run import Run
from indictune.tasks.all_tasks import task_of
from indictune.tasks.protocol import Task
from indictune.training.finish import evaluate_file
from indictune.training.start import bring_up, make_trainer
from indictune.training.task_trainer import RunContext

_USAGE = "indictune evaluate FOLDER --test_file F"

# Taken from the run that made the model, unless the command has the flag. Trust flags are not: a folder must not grant
# its own.
FROM_TRAINING = (
    *("text_column", "text_pair_column", "label_column", "language_column", "max_length", "long_text", "columns"),
    *("word_column", "tag_column", "sentence_column"),
    *("delimiter", "column_names", "quoting", "label_map", "keep_label_spellings", "txt_documents", "mlm_probability"),
    *("chat_template", "train_on_prompts", "train_on_thinking", "regression_loss"),
    *("per_device_eval_batch_size", "bf16", "fp16"),
)


def evaluation_of(recipe: Recipe, in_memory: Model | None = None) -> Callable[[Run], None]:
    """The script of `indictune evaluate FOLDER --test_file F [--output_dir D]`.

    Weights that are `in_memory` take the place of those in the folder. The recipe gets the values that the flags leave
    open, and the problems.
    """
    asked = unresolved(EvaluationArguments, recipe.values)
    model, test_file = Path(asked.model), asked.test_file
    missing = [name for name in ("model", "test_file") if not getattr(asked, name)]
    recipe.problems.extend(problem("argument-missing", f"--{name}", usage=_USAGE) for name in missing)
    if asked.model:
        with recipe.problems.collecting():
            _take_from_training(recipe, model)
            if "output_dir" not in recipe.values:
                name = re.sub(r"[*?\[\]]", "_", Path(test_file).stem)  # a shell would expand that of a pattern
                within = Path("evaluation", name)
                if (model / within).resolve() != model.resolve() / within:
                    raise UserError("evaluation-folder-elsewhere", "--model", model, folder=within)
                recipe.values["output_dir"] = str(model / within)
    if recipe.values.get("output_dir"):
        with recipe.problems.collecting():
            _check_of_this_file(Path(recipe.values["output_dir"]), test_file)
    config = json_or_nothing(config_file(model))  # transformers reports an unreadable file
    named = (config.get(READING_KEY) or {}).get("task") or configuration_of(model).get("task")
    return partial(_evaluate, task_of(config, named), in_memory)


def _take_from_training(recipe: Recipe, model: Path) -> None:
    """Fill in what the command leaves open from the `recipe.yaml` of the run that made the model."""
    if not config_file(model).is_file():
        raise UserError("no-model", "--model", model)
    configuration = configuration_of(model)
    template = configuration.get("chat_template")
    if isinstance(template, str) and template.endswith(".jinja"):
        # The named file may have changed, or belong to somebody else. transformers saves a copy with the model.
        saved = model / "chat_template.jinja"
        configuration["chat_template"] = str(saved) if saved.is_file() else None
    is_reward_model = configuration.get("task") == "reward"
    if not is_reward_model and {"chosen", "rejected"} & parse_columns(configuration.get("columns")).keys():
        del configuration["columns"]  # of pairs; conversations are evaluated
    types = get_type_hints(EvaluationArguments) | {"regression_loss": str, "long_text": str, "txt_documents": str}
    types |= {"delimiter": str, "column_names": list, "quoting": str, "label_column": (str, list), "label_map": list}
    for name in FROM_TRAINING:
        value = configuration.get(name)
        if value is not None and isinstance(value, types[name]):
            recipe.values.setdefault(name, value)


def _check_of_this_file(folder: Path, test_file: str) -> None:
    """Refuse to overwrite the metrics of another file in the folder of an evaluation."""
    path, name = os.path.abspath(test_file), json_or_nothing(folder / METRICS).get("test_file")
    if name is None:  # no metrics of this command
        return
    other = json_or_nothing(folder / TEST_FILE).get("test_file", name)  # a downloaded folder has the name alone
    if other not in (path, os.path.basename(path)):
        raise UserError("metrics-of-another-file", "--test_file", test_file, metrics=folder / METRICS, other=other)


def _evaluate(task: Task[Any, Any, Any], in_memory: Model | None, run: Run) -> None:
    """Score the model on `--test_file`, and write `metrics.json`. Ranks share the rows."""
    plan, found = make_evaluation_plan(run.recipe, os.environ, task)
    problems, asked, config = Problems(found + preflight_of_evaluation(plan, task)), plan.data, plan.model_config
    problems.extend([*check_long_texts(asked, task), *check_samples(asked, task)])
    tokenizer = None
    if config is not None:
        asked.problem_type = config.problem_type
        problems.attempt(own_scores_of_plan, plan, task, asked.metrics)
        noted = recorded_reading(config)
        if "max_length" not in run.recipe.values:  # as after `indictune merge`, which keeps no recipe
            _, of_rows, _ = task.arguments
            default = unresolved(of_rows, {}).max_length
            asked.max_length = noted.get("max_length") or min(default, positions_of(config) or default)
            asked.long_text = noted.get("long_text", asked.long_text)
        if "text_pair_column" not in noted and asked.text_pair_column is not None:
            problems.append(problem("pair-not-expected", "--text_pair_column"))
        # A model that has no recipe any more reads pairs too, from the columns of its training.
        for name in {"text_column", "text_pair_column"} & noted.keys() - run.recipe.values.keys():
            setattr(asked, name, noted[name])
        problems.attempt(check_max_length, config, asked.max_length)
        tokenizer = problems.attempt(load_tokenizer, plan.model, flag="--model")
    if not asked.test_file:
        problems.raise_any()
    test = task.tokenise_test(plan, tokenizer, problems)
    assert config is not None
    assert tokenizer is not None
    run.warn(test.notes)
    args = bring_up(plan, run)
    objective = task.objective(args, config, tokenizer, padded=True, rows=None)
    model = in_memory or objective.load(Path(asked.model), asked.trust_remote_code)
    check_vocabulary(plan.model, model, tokenizer, flag="--model")
    context = RunContext(plan.launch, samples=test.samples)
    rows = test.rows if objective.loss is None else None
    trainer = make_trainer(model, args, rows, None, tokenizer, objective, padded=True, context=context)
    trainer.parallelism.prepare(trainer)
    sharding.prepare_for_evaluation(trainer)
    evaluate_file(trainer, run, test, asked.test_file)

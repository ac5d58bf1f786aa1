"""`indictune evaluate`: score a finished run's model on a file or on public tasks, or compare two runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from indictune.commands import until_stopped
from indictune.config.command_line import with_flag
from indictune.config.shared_arguments import EvaluationArguments, flag
from indictune.console_text import printable, table
from indictune.errors import Problems, UserError, missing_extra, problem
from indictune.files import write_json

if TYPE_CHECKING:
    from indictune.config.recipe import Recipe

LM_EVAL = "lm_eval.json"
_FLAG = "--lm_eval_tasks"
_TAKEN = ("model", "output_dir", "per_device_eval_batch_size", "trust_remote_code")
_KEPT = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better", "lm_eval_version")


@dataclass
class EvaluateFlags(EvaluationArguments):
    """What is scored or compared. Values that are not given are those of the model's training."""

    lm_eval_tasks: list[str] = flag(
        [], "Score a language model on these tasks of lm-evaluation-harness instead, such as hellaswag."
    )
    lm_eval_include_path: str | None = flag(None, "Folder with tasks of your own, as YAML files.")
    lm_eval_limit: int | None = flag(None, "Score this many rows of each task. Default: all.")
    lm_eval_num_fewshot: int | None = flag(None, "Solved examples before each row. Default: as the task says.")
    compare: list[str] = flag([], "Compare the predictions in the folders of two runs instead of scoring a model.")
    json: bool = flag(False, "Print all numbers of --compare as JSON.")


def run_evaluate(flags: Mapping[str, list[str]]) -> int:
    """Score a model, or compare two runs."""
    import indictune.before_imports  # noqa: F401, before everything slow
    from indictune.config.recipe import read_recipe

    if len(bare := flags.get("", [])) > 1:
        raise UserError("bare-word", value=bare[1], way_out=f"Use --test_file {bare[1]}.")
    recipe = read_recipe(with_flag(flags, "model"), (EvaluateFlags,))
    if "compare" in flags:
        from indictune.evaluation.comparison import print_comparison

        _refuse_others(recipe, "--compare", ("compare", "json"))
        return until_stopped(lambda: print_comparison(recipe.values["compare"], recipe.values.get("json", False)))
    if "lm_eval_tasks" in flags:
        return until_stopped(lambda: score_public_tasks(recipe))
    from indictune.commands.evaluate_file import evaluation_of
    from indictune.supervise.execute import execute

    return execute(evaluation_of(recipe), recipe, replaceable=("metrics.json",))


def score_public_tasks(recipe: Recipe) -> int:
    """Write `lm_eval.json` and print its table; returns the exit code."""
    Problems(missing_extra(_FLAG, " ".join(recipe.values.get("lm_eval_tasks", ())), "lm-eval", "lm_eval")).raise_any()
    _refuse_others(recipe, _FLAG, (*_TAKEN, *(name for name in recipe.values if name.startswith("lm_eval_"))))
    args = recipe.build(EvaluateFlags)
    folder = Path(args.output_dir or Path(args.model, "evaluation", "lm_eval"))
    found = _scores_of_tasks(args)
    from lm_eval.utils import handle_non_serializable

    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: found[name] for name in _KEPT if name in found}
    write_json(folder / LM_EVAL, json.loads(json.dumps(kept, default=handle_non_serializable)))
    print(printable(f"{_scores_shown(found)}\n\nWritten to {folder / LM_EVAL}"))
    return 0


def _refuse_others(recipe: Recipe, kind: str, taken: Collection[str]) -> None:
    """Refuse the flags that an evaluation of this kind does not take, with the other problems of the flags."""
    others = [name for name in recipe.values if name not in taken]
    recipe.problems.extend(problem("no-effect", f"--{name}", recipe.values[name], other=kind) for name in others)
    recipe.problems.raise_any()


def _scores_shown(found: Mapping[str, Any]) -> str:
    """A line for each score of each task and group, with its standard error."""
    lines = []
    for task, scores in (found["results"] | found.get("groups", {})).items():
        for name, value in scores.items():
            metric, _, settings = name.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = scores.get(f"{metric}_stderr,{settings}")
                shown = f"{error:.4f}" if isinstance(error, float) else ""
                lines.append([task, metric, settings, f"{value:.4f}", shown])
    return table(["task", "metric", "filter", "score", "standard error"], lines)


def _scores_of_tasks(args: EvaluateFlags) -> dict[str, Any]:
    from indictune.config.arguments import ModelArguments
    from indictune.evaluation.breakdown import near_names
    from indictune.models.load import load_tokenizer, trained_config
    from indictune.prediction.chat_model import check_language_model, load_language_model

    check_language_model(args.model)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of a model that is read already
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tasks = [task for given in args.lm_eval_tasks for task in given.split(",") if task]
    manager = TaskManager(include_path=args.lm_eval_include_path)
    near = {task: near_names(task, manager.all_tasks) for task in tasks if not manager.match_tasks([task])}
    Problems(problem("lm-eval-unknown-task", _FLAG, task, near=names) for task, names in near.items()).raise_any()
    named = ModelArguments(args.model, trust_remote_code=args.trust_remote_code)
    config, tokenizer = trained_config(named), load_tokenizer(named, flag="--model")
    model = load_language_model(named, config, tokenizer)
    scored = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=args.per_device_eval_batch_size)
    settings = {"limit": args.lm_eval_limit, "num_fewshot": args.lm_eval_num_fewshot, "log_samples": False}
    try:
        found = simple_evaluate(scored, tasks=tasks, task_manager=manager, **settings)
    except OSError as error:  # the Hub does not answer, or a task's file is missing
        raise UserError("lm-eval-rows", _FLAG, " ".join(tasks), reason=error) from error
    assert found is not None
    return dict(found)

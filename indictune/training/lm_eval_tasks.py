"""Score a trained language model on public tasks by lm-evaluation-harness: `indictune evaluate --lm_eval_tasks T`."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from indictune.config.arguments import ModelArguments
from indictune.config.command_arguments import EvaluateArguments
from indictune.config.recipe import read_recipe
from indictune.console_text import printable, table
from indictune.errors import Problems, UserError, problem
from indictune.evaluation.score_names import near_names
from indictune.files import write_json
from indictune.models.load import load_tokenizer
from indictune.models.trained import trained_config
from indictune.training.talker import check_folder, load_language_model

LM_EVAL = "lm_eval.json"
_FLAG = "--lm_eval_tasks"
_TAKEN = ("model", "output_dir", "per_device_eval_batch_size", "trust_remote_code", "trust_checkpoint")
_KEPT = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better", "lm_eval_version")


def lm_eval_command(argv: Sequence[str]) -> int:
    """Write `lm_eval.json` and print its table; returns the exit code.

    Raises:
        UserError: the package is missing, another flag is given, there is no such task, or its rows cannot be read.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("extra-missing", _FLAG, extra="lm-eval", packages="lm-eval")
    recipe = read_recipe(argv, (EvaluateArguments,))
    others = [name for name in recipe.values if name not in _TAKEN and not name.startswith("lm_eval_")]
    recipe.problems.extend(problem("no-effect", f"--{name}", recipe.values[name], other=_FLAG) for name in others)
    recipe.problems.raise_any()
    args = recipe.build(EvaluateArguments)
    folder = Path(args.output_dir or Path(args.model, "evaluation", "lm_eval"))
    found = scores_of_tasks(args)
    from lm_eval.utils import handle_non_serializable

    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: found[name] for name in _KEPT if name in found}
    write_json(folder / LM_EVAL, json.loads(json.dumps(kept, default=handle_non_serializable)))
    print(printable(f"{scores_shown(found)}\n\nWritten to {folder / LM_EVAL}"))
    return 0


def scores_shown(found: Mapping[str, Any]) -> str:
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


def scores_of_tasks(args: EvaluateArguments) -> dict[str, Any]:
    """What lm-evaluation-harness finds."""
    check_folder(args.model)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of a model that is read already
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tasks = [task for given in args.lm_eval_tasks for task in given.split(",") if task]
    manager = TaskManager(include_path=args.lm_eval_include_path)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    Problems(
        problem("lm-eval-unknown-task", _FLAG, task, near=near_names(task, manager.all_tasks)) for task in unknown
    ).raise_any()
    named = ModelArguments(args.model, trust_remote_code=args.trust_remote_code)
    config, tokenizer = trained_config(named), load_tokenizer(named, flag="--model")
    model = load_language_model(named, config, tokenizer, args.trust_checkpoint)
    scored = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=args.per_device_eval_batch_size)
    settings = {"limit": args.lm_eval_limit, "num_fewshot": args.lm_eval_num_fewshot, "log_samples": False}
    try:
        found = simple_evaluate(scored, tasks=tasks, task_manager=manager, **settings)
    except OSError as error:  # the Hub does not answer, or a task's file is missing
        raise UserError("lm-eval-rows", _FLAG, " ".join(tasks), reason=error) from error
    assert found is not None
    return dict(found)

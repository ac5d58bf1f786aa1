"""Train, evaluate, predict and the other verbs from Python. Nothing heavy is imported before a function needs it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from indictune.errors import UserError
from indictune.run_result import Result

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Trainer

    from indictune.models.load import Model
    from indictune.own_process import Server


class Loaded(NamedTuple):
    """A model in memory and its tokenizer."""

    model: Model
    tokenizer: PreTrainedTokenizerBase


Given = str | Path | Result | tuple[Any, Any]  # of a finished model: its folder or run, or model and tokenizer
Metrics = Mapping[str, Any] | Sequence[str]


def train(
    recipe: str | Path | Mapping[str, Any],
    *,
    strategy: str | None = None,
    num_processes: int | None = None,
    metrics: Metrics = (),
    callbacks: Sequence[Any] = (),
    **overrides: Any,
) -> Result:
    """Train by a recipe, in processes of its own: the same run as `indictune train`.

    Args:
        recipe: path of a recipe, name of an installed one (`sentiment/demo.yaml`), a task (`sentiment`, `llama` or
            `ner`), or a dictionary of flags, with `task` among them.
        strategy: name of a file of `accelerate_configs/`, or the path of another one. Default: one for the GPUs.
        num_processes: on this machine. Default: as the strategy file says, or one for each GPU.
        metrics: functions of right answers and predictions by name, such as those of scikit-learn; or names of
            metrics of the package `evaluate`.
        callbacks: of transformers, classes or objects. Each process of the run gets copies.
        overrides: flags, such as `train_file="tweets.csv"` or `learning_rate=1e-4`. They win over the recipe. Files of
            rows may be tables of pandas, polars or arrow, a `Dataset`, or lists of dictionaries. A `DatasetDict` as
            `train_file` gives its validation and test rows too.

    Raises:
        UserError: a flag, the recipe or the rows are refused. `problems` has all of them.
        RuntimeError: the run failed.
        KeyboardInterrupt: it was interrupted, and can be resumed by `resume_from_checkpoint="auto"`.
    """
    from indictune.config.command_line import to_flags
    from indictune.own_process import run_verb

    named, functions = _metrics(metrics)
    asked = _asked(recipe, {**overrides, **named})
    launch: dict[str, Any] = {"strategy": strategy or asked.launch.strategy}
    launch["num_processes"] = num_processes or asked.launch.num_processes
    run_verb(["train", asked.task, *asked.words(), *to_flags(launch)], functions, callbacks)
    return Result.of(asked.output_dir)


def trainer(recipe: str | Path | Mapping[str, Any], *, callbacks: Sequence[Any] = (), **overrides: Any) -> Trainer:
    """The prepared `Trainer` of a run, in this process, for those who want the loop. `.train()` trains.

    The whole vocabulary is trained, unless `active_vocabulary` is given: the trainer's model is a whole one.

    Args:
        recipe: as of `train`.
        callbacks: of transformers.
        overrides: as of `train`, without functions as `metrics` and `resume_from_checkpoint`.

    Raises:
        UserError: as `train`.
    """
    import indictune.before_imports  # noqa: F401, before everything slow
    from indictune.config.command_line import flags_of
    from indictune.config.recipe import read_recipe
    from indictune.run import Run
    from indictune.supervise.run_folder import log_to_console
    from indictune.tasks.all_tasks import TASKS
    from indictune.training.run_task import run_task

    log_to_console()
    named, functions = _metrics(overrides.get("metrics", ()))
    if functions:
        raise UserError("only-as-command", "metrics", ", ".join(functions), command="indictune.train(...)")
    asked = _asked(recipe, {**overrides, **named})
    task = next(each for each in TASKS if each.name == asked.task)
    whole = ["--active_vocabulary", "off"] if "active_vocabulary" in flags_of(asked.task) else []
    read = read_recipe([*whole, *asked.words()], task.arguments)  # so that `.model` is whole at any time
    if resumed := read.values.get("resume_from_checkpoint"):
        raise UserError("only-as-command", "resume_from_checkpoint", resumed, command="indictune.train(...)")
    run = Run(read, 0)
    run.output_dir.mkdir(parents=True, exist_ok=True)
    run_task(task, run, trains=False)
    assert run.trainer is not None
    for each in callbacks:
        run.trainer.add_callback(each)
    return run.trainer


def evaluate(model: Given, test_file: Any, *, metrics: Metrics = (), **flags: Any) -> dict[str, Any]:
    """Score a finished model on rows: the same as `indictune evaluate`.

    Args:
        model: folder or result of the run, which a process of its own scores; or a model and its tokenizer in memory,
            which this process scores.
        test_file: rows in the form of the training rows, with answers: a file or a table, as of `train`.
        metrics: as of `train`.
        flags: other flags of `indictune evaluate`, such as `output_dir`.

    Returns:
        The content of `metrics.json`; `test` has the scores.

    Raises:
        UserError: the model, the flags or the rows are refused.
        RuntimeError: the evaluation failed.
    """
    from indictune.config.command_line import to_flags
    from indictune.own_process import run_verb
    from indictune.python_objects import tables_as_files

    named, functions = _metrics(metrics)
    given = {**tables_as_files({"test_file": test_file}), **flags, **named}
    if isinstance(model, tuple):
        return _evaluated_here(Loaded(*model), given, functions)
    folder = _folder(model)
    output_dir = Path(given.setdefault("output_dir", folder / "evaluation" / Path(given["test_file"]).stem))
    run_verb(["evaluate", *to_flags({"model": folder, **given})], functions)
    return _json(output_dir / "metrics.json")


def _evaluated_here(given: Loaded, flags: Mapping[str, Any], functions: Mapping[str, Any]) -> dict[str, Any]:
    """Score a model in memory, where it is. A folder has its configuration and tokenizer meanwhile."""
    import indictune.before_imports  # noqa: F401, before everything slow
    from indictune.commands.evaluate import EvaluateFlags
    from indictune.commands.evaluate_file import evaluation_of
    from indictune.config.command_line import to_flags
    from indictune.config.recipe import read_recipe
    from indictune.models.load import without_adapter
    from indictune.python_objects import functions_file
    from indictune.run import Run

    config, was_training = deepcopy(given.model.config), given.model.training
    config.architectures = [type(without_adapter(given.model)).__name__]
    recipe_file = Path(config.name_or_path or os.devnull, "recipe.yaml")
    with TemporaryDirectory(prefix="indictune-") as folder, functions_file(functions, ()) as variable:
        config.save_pretrained(folder)
        given.tokenizer.save_pretrained(folder)
        if recipe_file.is_file():  # of the run that the model is of
            shutil.copy(recipe_file, folder)
        os.environ.update(variable)
        try:
            recipe = read_recipe(to_flags({"model": folder, **flags}), (EvaluateFlags,))
            score = evaluation_of(recipe, given.model)
            recipe.problems.raise_any()
            with redirect_stdout(StringIO()):  # the numbers are returned
                run = Run(recipe, 0)
                run.output_dir.mkdir(parents=True, exist_ok=True)
                score(run)
            return _json(run.output_dir / "metrics.json")
        finally:
            given.model.train(was_training)
            for name in variable:
                del os.environ[name]


def predict(texts: Any, model: Given, **flags: Any) -> Any:
    """Label texts with a classifier, in this process.

    Args:
        texts: one or several, as they are written; or pairs, for a model that was trained on pairs. They are cleaned
            and cut as in training. Or a table of pandas, polars or arrow, a `Dataset`, a list of dictionaries, or an
            iterator of texts.
        model: folder or result of the run; or a model and its tokenizer in memory, which stays where it is, in
            evaluation mode.
        flags: other flags of `indictune predict`, such as `bf16`; for a table also `text_column`.

    Returns:
        For each text `text`, of pairs `text_pair`, `label`, `scores` (label -> probability) and `language`: a list, or
        an iterator for an iterator. For a table, a table of its kind with these columns too, and `score_<label>` for
        each label; its own columns of these names become `input_<name>`.

    Raises:
        UserError: the folder holds no finished classifier, or it needs pairs of texts, or single ones.
    """
    from indictune.prediction import labelled_rows
    from indictune.python_objects import check_columns, has_columns, with_columns, write_rows

    named = model if isinstance(model, tuple) else _folder(model)
    if isinstance(texts, Iterator):
        return labelled_rows.label_stream(named, texts, **flags)
    if has_columns(texts):
        check_columns(texts, "texts", labelled_rows.name_beside_labels)
        with TemporaryDirectory(prefix="indictune-") as folder:
            found = labelled_rows.label_table(named, str(write_rows(texts, "texts", Path(folder))), **flags)
        return with_columns(texts, found, labelled_rows.name_beside_labels)
    several: Any = [texts] if isinstance(texts, str) else texts if isinstance(texts, Mapping) else list(texts)
    return labelled_rows.label_texts(named, several, **flags)


def chat(message: str, model: Given, **flags: Any) -> str:
    """The answer of a language model to one message, in this process.

    Args:
        message: of the user.
        model: as of `predict`. `load` keeps a model in memory for several messages.
        flags: other flags of `indictune chat`, such as `max_new_tokens` and `temperature`.

    Raises:
        UserError: the folder holds no finished language model.
        ValueError: the message leaves no room for an answer.
    """
    from indictune.prediction.chat_model import TooLongError, chat_with, open_chat_model

    partner = chat_with(*model, **flags) if isinstance(model, tuple) else open_chat_model(str(_folder(model)), **flags)
    try:
        return partner.answer(message, lambda _: None)
    except TooLongError as error:
        raise ValueError(str(error)) from error


def load(model: str | Path | Result, *, trust_remote_code: bool = False) -> Loaded:
    """A finished run's model and tokenizer, for use with transformers, in evaluation mode, an adapter on its base.

    Args:
        model: folder or result of the run.

    Raises:
        UserError: the folder holds no finished model.
    """
    from indictune.config.arguments import ModelArguments
    from indictune.models.adapters import config_file
    from indictune.models.config_shapes import KINDS
    from indictune.models.load import load_tokenizer, load_trained
    from indictune.tasks.all_tasks import task_of

    folder = str(_folder(model))
    if not config_file(folder).is_file():
        raise UserError("no-model", "model", folder)
    kind, _ = KINDS[task_of(_json(config_file(Path(folder)))).head]
    args = ModelArguments(folder, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(args, flag="model")
    return Loaded(load_trained(folder, trust_remote_code, kind=kind).eval(), tokenizer)


def inspect(rows: Any, **flags: Any) -> dict[str, Any]:
    """The health of rows, as `indictune inspect` finds it: the content of `health.json`.

    Args:
        rows: a file or a table, as of `train`.
        flags: those of the run, such as `task`, `text_column` and `model_name_or_path`.

    Raises:
        UserError: the rows or the flags are refused.
    """
    return _answer("inspect", {"train_file": rows, **flags, "json": True})


def plan(recipe: str | Path | None = None, **flags: Any) -> dict[str, Any]:
    """The strategy files for a run, ranked by memory and time, as `indictune plan` prints them.

    Args:
        recipe: path or name of a recipe. Without one, `model` and other flags describe the run.
        flags: those of `indictune plan`, such as `gpus` and `gpu`.

    Raises:
        UserError: the recipe or the flags are refused.
    """
    from indictune.commands.train import recipe_path

    return _answer("plan", {**flags, "json": True}, *(() if recipe is None else [str(recipe_path(str(recipe)))]))


def compare(first: str | Path | Result, second: str | Path | Result) -> dict[str, Any]:
    """Whether two runs or evaluations differ on the same rows by more than chance, as `indictune evaluate --compare`.

    Raises:
        UserError: one has no predictions, or they scored other rows.
    """
    return _answer("evaluate", {"compare": [_folder(first), _folder(second)], "json": True})


def merge(adapter: str | Path | Result, output_dir: str | Path, **flags: Any) -> Path:
    """Make an adapter and its base one model, as `indictune merge`; returns its folder.

    Raises:
        UserError: the folder holds no adapter, its base is not to be had, or the flags are refused.
    """
    from indictune.config.command_line import to_flags
    from indictune.own_process import run_verb

    run_verb(["merge", str(_folder(adapter)), *to_flags({"output_dir": output_dir, **flags})])
    return Path(output_dir)


def push(model: str | Path | Result, repo_id: str, **flags: Any) -> None:
    """Upload a finished model with its card to the Hub, as `indictune push`.

    Raises:
        UserError: the folder holds no finished model, or the flags are refused.
        RuntimeError: the Hub refused it, or was not reached.
    """
    from indictune.config.command_line import to_flags
    from indictune.own_process import run_verb

    run_verb(["push", str(_folder(model)), repo_id, *to_flags(flags)])


def serve(model: str | Path | Result, **flags: Any) -> Server:
    """Label texts over HTTP in a process of its own, as `indictune serve`, until `.stop()` or the end of a `with`.

    Args:
        model: folder or result of the run.
        flags: those of `indictune serve`. Without a `port`, a free one is taken; `.url` has it.

    Raises:
        UserError: the folder holds no finished classifier, or the flags are refused.
    """
    from indictune.config.command_line import to_flags
    from indictune.own_process import serving

    return serving(["serve", str(_folder(model)), *to_flags({"port": 0, **flags})])


def _asked(recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """What `indictune train` reads from its command line."""
    from indictune.commands.train import read_asked, with_defaults, with_enough_steps
    from indictune.config.command_line import to_flags
    from indictune.python_objects import tables_as_files

    given = tables_as_files({**(recipe if isinstance(recipe, Mapping) else {}), **overrides})
    task = given.pop("task", None)
    words = [str(word) for word in (task, None if isinstance(recipe, Mapping) else recipe) if word is not None]
    asked = read_asked([*words, *to_flags(given)])
    if asked.launch.dry_run:
        raise UserError("only-as-command", "--dry_run", "true", command="indictune train ... --dry_run")
    return with_defaults(with_enough_steps(asked))


def _metrics(given: Metrics) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The flag `--metrics`, and the functions that it names."""
    from indictune.python_objects import FUNCTION

    if isinstance(given, Mapping):
        return ({"metrics": [f"{FUNCTION}{name}" for name in given]} if given else {}), given
    names = [given] if isinstance(given, str) else list(given)
    return ({"metrics": names} if names else {}), {}


def _answer(verb: str, flags: Mapping[str, Any], *words: str) -> dict[str, Any]:
    """What a verb prints as JSON."""
    from indictune.config.command_line import WORDS, to_flags
    from indictune.own_process import answer_of
    from indictune.python_objects import tables_as_files

    named = {"task": WORDS.get(flags["task"], flags["task"])} if "task" in flags else {}
    found: dict[str, Any] = json.loads(answer_of([verb, *words, *to_flags(tables_as_files({**flags, **named}))]))
    return found


def _folder(model: str | Path | Result) -> Path:
    return model.folder if isinstance(model, Result) else Path(model)


def _json(path: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))

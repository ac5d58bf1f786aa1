"""Train, evaluate, predict and load from Python. Nothing heavy is imported before a function needs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from indictune.config.command_line import STATUS_FILE
from indictune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from indictune.models.load import Model

_STEP = re.compile(r"step (\d+) of (\d+): (.*)")
_REFUSED, _STOPPED = 2, 75  # exit codes of the command


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        folder: the model in the Hub's layout, its recipe and logs.
        metrics: the content of `metrics.json`: `strategy`, `world_size`, `train`, `eval`, `test`, ...
        curves: one dictionary for each logged step: `step`, `epoch`, `loss`, `grad_norm`, `learning_rate`, ...
    """

    folder: Path
    metrics: dict[str, Any]
    curves: list[dict[str, float]]

    @classmethod
    def of(cls, folder: str | Path) -> Result:
        """The result in the folder of a finished run."""
        folder = Path(folder)
        log = (folder / "train_log.jsonl").read_text(encoding="utf-8").splitlines()
        return cls(folder, _json(folder / "metrics.json"), [json.loads(line) for line in log])


class Loaded(NamedTuple):
    """A finished run's model in evaluation mode, with the adapter on its base, and its tokenizer."""

    model: Model
    tokenizer: PreTrainedTokenizerBase


class Reported(NamedTuple):
    """A problem that the process of a run reported; as `errors.Problem`."""

    code: str
    flag: str
    text: str

    def __str__(self) -> str:
        return self.text


def train(
    recipe: str | Path | Mapping[str, Any],
    *,
    strategy: str | None = None,
    num_processes: int | None = None,
    **overrides: Any,
) -> Result:
    """Train by a recipe, in processes of its own: the same run as `indictune train`.

    Args:
        recipe: path of a recipe, name of an installed one (`sentiment/demo.yaml`), a task (`sentiment`, `llama` or
            `ner`), or a dictionary of flags, with `task` among them.
        strategy: name of a file of `accelerate_configs/`, or the path of another one. Default: one for the GPUs.
        num_processes: on this machine. Default: as the strategy file says, or one for each GPU.
        overrides: flags, such as `train_file="tweets.csv"` or `learning_rate=1e-4`. They win over the recipe.

    Raises:
        UserError: a flag, the recipe or the rows are refused. `problems` has all of them.
        RuntimeError: the run failed.
        KeyboardInterrupt: it was interrupted, and can be resumed by `resume_from_checkpoint="auto"`.
    """
    from indictune.commands.train import read_asked, with_defaults, with_enough_steps
    from indictune.config.command_line import to_flags

    given = {**(recipe if isinstance(recipe, Mapping) else {}), **overrides}
    task = given.pop("task", None)
    words = [str(word) for word in (task, None if isinstance(recipe, Mapping) else recipe) if word is not None]
    asked = read_asked([*words, *to_flags(given)])
    if asked.launch.dry_run:
        raise UserError("only-as-command", "--dry_run", "true", command="indictune train ... --dry_run")
    asked = with_defaults(with_enough_steps(asked))
    launch: dict[str, Any] = {"strategy": strategy or asked.launch.strategy}
    launch["num_processes"] = num_processes or asked.launch.num_processes
    _run(["train", asked.task, *asked.words(), *to_flags(launch)])
    return Result.of(asked.output_dir)


def evaluate(model: str | Path | Result, test_file: str | Path, **flags: Any) -> dict[str, Any]:
    """Score a finished run's model on a file, in a process of its own: the same as `indictune evaluate`.

    Args:
        model: folder or result of the run.
        test_file: rows in the form of the training rows, with answers.
        flags: other flags of `indictune evaluate`, such as `output_dir`.

    Returns:
        The content of `metrics.json`; `test` has the scores.

    Raises:
        UserError: the model, the flags or the rows are refused.
        RuntimeError: the evaluation failed.
    """
    from indictune.config.command_line import to_flags

    folder, test_file = _folder(model), Path(test_file)
    output_dir = Path(flags.setdefault("output_dir", folder / "evaluation" / test_file.stem))
    _run(["evaluate", *to_flags({"model": folder, "test_file": test_file, **flags})])
    return _json(output_dir / "metrics.json")


def predict(
    texts: str | Sequence[str | tuple[str, str]], model: str | Path | Result, **flags: Any
) -> list[dict[str, Any]]:
    """Label texts with a finished run's classifier, in this process.

    Args:
        texts: one or several, as they are written; or a list of pairs, for a model that was trained on pairs. They are
            cleaned and cut as in training.
        model: folder or result of the run.
        flags: other flags of `indictune predict`, such as `bf16`.

    Returns:
        For each text `text`, of pairs `text_pair`, `label`, `scores` (label -> probability) and `language`.

    Raises:
        UserError: the folder holds no finished classifier, or it needs pairs of texts, or single ones.
    """
    from indictune.prediction import labelled_rows

    return labelled_rows.label_texts(_folder(model), [texts] if isinstance(texts, str) else texts, **flags)


def load(model: str | Path | Result, *, trust_remote_code: bool = False) -> Loaded:
    """A finished run's model and tokenizer, for use with transformers.

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


def _folder(model: str | Path | Result) -> Path:
    return model.folder if isinstance(model, Result) else Path(model)


def _json(path: Path) -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))


def _run(words: Sequence[str]) -> None:
    """Run a verb, show its output with a progress bar, and raise what it ends with."""
    from indictune.files import json_or_nothing

    command = [sys.executable, "-m", "indictune", *words]
    with TemporaryDirectory(prefix="indictune-") as folder:
        status = Path(folder, "status.json")
        code = _shown_until_end(command, {**os.environ, STATUS_FILE: str(status)})
        ended = json_or_nothing(status)
    message = ended.get("message", "")
    if code == _REFUSED:
        problems = [Reported(**each) for each in ended.get("problems", ())]
        raise UserError(problems=problems or [Reported("", "", message)])
    if code == _STOPPED:
        raise KeyboardInterrupt(message)
    if code != 0:
        raise RuntimeError(message or f"`indictune {words[0]}` ended with code {code}")


def _shown_until_end(command: Sequence[str], environ: Mapping[str, str]) -> int:
    pipe, errors = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, env=environ, encoding="utf-8", stdout=pipe, stderr=errors) as running:
        assert running.stdout is not None
        try:
            _show(running.stdout)
            return running.wait()
        except KeyboardInterrupt:
            running.send_signal(signal.SIGTERM)  # it saves a checkpoint
            running.wait()
            raise


def _show(lines: Iterable[str]) -> None:
    """Print the lines of a run; those of its steps move a bar."""
    from tqdm.auto import tqdm

    is_hidden = False if "ipykernel" in sys.modules else None  # None: hidden unless on a terminal
    with tqdm(unit="step", disable=is_hidden) as bar:
        for line in lines:
            if not bar.disable and (step := _STEP.search(line)):
                bar.total = int(step[2])
                bar.set_postfix_str(step[3].strip(), refresh=False)
                bar.update(int(step[1]) - bar.n)
            else:
                bar.write(line, end="")

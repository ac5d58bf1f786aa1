"""`indictune train`: read the task from the recipe, choose a launcher, and start the task's script."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from indictune.config import command_line
from indictune.config.command_line import SCRIPTS, WORDS, flags_of
from indictune.config.early_values import value_problems
from indictune.config.foreign_recipes import tool_of, translate
from indictune.config.shared_arguments import ENOUGH_STEPS, EngineArguments, flag
from indictune.console_text import printable
from indictune.credentials import without_tokens
from indictune.distributed.choose_launcher import Launcher, choose_launcher
from indictune.errors import Problem, Problems, UserError, problem
from indictune.files import AUTO, json_or_nothing
from indictune.models import fetched
from indictune.ray_cluster import RankCommand, cluster, processors, run_ranks
from indictune.stop_signals import killed_processes
from indictune.supervise import run_folder
from indictune.versions import FOLDER, as_seen_from_here, recipes, script

logger = logging.getLogger(__name__)

_OF_ROWS = {".csv", ".tsv", ".jsonl", ".parquet", ".xlsx", ".ods", ".txt", ".gz", ".zst"}

# For a task without a recipe and a model.
_SMALL = {
    "classification": "recipes/sentiment/small_from_scratch.yaml",
    "tokens": "recipes/tokens/small_from_scratch.yaml",
    "chat": "recipes/llama/demo.yaml",
    "mlm": "recipes/text/mlm_demo.yaml",
    "clm": "recipes/text/clm_demo.yaml",
}
_FINE_TUNED = "recipes/sentiment/small_data.yaml"
_ROWS = {"classification": "builtin:tweets", "tokens": "builtin:names", "chat": "builtin:chats"}
_ROWS |= dict.fromkeys(("mlm", "clm"), "builtin:tweets")
_SOURCES = {"dataset_name", "train_file", "train_files", "validation_file", "test_file"}
# What a run that pretrains on a run's texts takes of it.
_OF_TEXTS = {
    *("train_file", "train_files", "dataset_name", "dataset_config_name", "dataset_revision", "dataset_splits"),
    *("text_column", "language_column", "delimiter", "column_names", "quoting", "bad_rows", "max_bad_fraction"),
    *("model_name_or_path", "model_revision", "trust_remote_code", "seed", "allow_cpu", "resume_from_checkpoint"),
}
_INDICBERT = "ai4bharat/IndicBERTv2-MLM-only"
_SECONDS_FOR_THE_HUB = 3
_SHARING_KEYS = ("mlm", "clm", "dpo", "kto", "reward")
_NUMBERS = ("num_processes", "num_workers")
_LAUNCH = ("engine", "ray_address", "strategy", *_NUMBERS)


@dataclass
class TrainFlags(EngineArguments):
    """How the run is started. The other flags are those of its task."""

    strategy: str | None = flag(
        None, "A file of accelerate_configs/. `auto`: the fastest by `indictune plan`. Default: one for the GPUs."
    )
    num_processes: int | None = flag(
        None, "Processes on this machine. Default: as the strategy file says, or one for each GPU."
    )
    num_workers: int | None = flag(None, "Ranks on the Ray cluster. Default: one for each of its GPUs, or one.")
    dry_run: bool = flag(False, "Print the plan, the tokens and the memory of the run, and stop.")
    convert: str | None = flag(
        None, "Write a recipe of axolotl, LLaMA-Factory, ms-swift or TRL as one of ours to this file, and stop."
    )

    def check(self) -> Iterator[Problem]:
        """Refuse the number of processes of the other engine."""
        yield from super().check()
        other = "num_processes" if self.engine == "ray" else "num_workers"
        if (value := getattr(self, other)) is not None:
            yield problem("no-effect", f"--{other}", value, other=f"--engine {self.engine}")

    def given(self) -> dict[str, list[str]]:
        """Those that say where the run takes place."""
        return {name: [str(value)] for name in _LAUNCH if (value := getattr(self, name)) not in (None, "local")}


@dataclass(frozen=True)
class Asked:
    """What the user typed: a recipe and its content, flags for the script as name and words, and how it is started."""

    task: str
    recipe: Path | None
    content: Mapping[str, Any]
    flags: Mapping[str, Sequence[str]]
    launch: TrainFlags

    def value(self, name: str) -> str:
        """The value of a flag or a key of the recipe; empty if none is given."""
        given = self.flags.get(name)
        return " ".join(given) if given else str(self.content.get(name) or "")

    @property
    def output_dir(self) -> str:
        """The folder of the run; empty if none is given."""
        return self.value("output_dir")

    def words(self) -> list[str]:
        """The flags as words of a command line."""
        words = [] if self.recipe is None else ["--config", str(self.recipe)]
        return words + [word for name, values in self.flags.items() for word in command_line.flag_words(name, values)]


def run_train(flags: Mapping[str, list[str]]) -> int:
    """Start the run that the flags describe."""
    if "convert" in flags:
        return _convert(flags)
    asked = chosen(with_defaults(with_enough_steps(read_asked(flags))))
    if (recipe := asked.value("pretrain")) and not asked.launch.dry_run:
        code, asked = _pretrain(asked, recipe)
        if code:
            return code
    if asked.launch.engine == "ray":
        with cluster(asked.launch.ray_address, shows_output=False):
            kind, counts = processors("--num_workers", asked.launch.num_workers or 1)
            return _start(asked, asked.launch.num_workers or (sum(counts) if kind == "GPU" else 1), kind)
    return _start(asked, asked.launch.num_processes)


def _start(asked: Asked, processes: int | None, kind: str = "") -> int:
    """Start so many processes, on processors of a kind of a Ray cluster. None: as many as the strategy says, here."""
    launcher = choose_launcher(asked.launch.strategy, processes)
    path = as_seen_from_here(script(SCRIPTS[asked.task]))
    if launcher.machines > 1:  # num_processes of the file counts those of all; accelerate starts each one's
        options = [*launcher.options_of_machines(), "--machine_rank", "0"]
        line = shlex.join(["accelerate", "launch", *options, str(path), *asked.words()])
        raise UserError("several-machines", "--strategy", launcher.config_file, last=launcher.machines - 1, line=line)
    asked = fit_data_ranks(asked, launcher)
    if asked.launch.dry_run:
        from indictune.commands.dry_run import dry_run
        from indictune.supervise.run_folder import log_to_console

        log_to_console()
        return dry_run(asked.task, asked.words(), launcher.environment())
    if kind:
        found, ours = launcher.environment().items(), "INDICTUNE_"
        variables = {name: value for name, value in found if os.environ.get(name) != value or name.startswith(ours)}
        places = asked.output_dir, asked.value("resume_from_checkpoint"), os.getcwd()
        return run_ranks(RankCommand(SCRIPTS[asked.task], asked.words(), variables, *places), launcher.processes, kind)
    typed = ["accelerate", "launch", *launcher.options(), str(path), *asked.words()]
    print(without_tokens(f"indictune: the same as\n  {shlex.join(typed)}"), file=sys.stderr, flush=True)
    command = launcher.command(path, asked.words())
    if launcher.is_one_process:
        return _run_alone(command, asked, launcher)
    return run_folder.run_launcher(command, Path(asked.output_dir))


def read_asked(given: Sequence[str] | Mapping[str, list[str]]) -> Asked:
    """Read the flags, as words or split already, and the recipe, without the libraries of a run."""
    flags = command_line.read_flags(given)
    bare = flags.pop("", [])
    tasks = [word for word in bare if word in WORDS or word in SCRIPTS] + flags.pop("task", [])
    named = [word for word in bare if word not in tasks] + flags.pop("config", [])
    if len(tasks) > 1 or len(named) > 1:
        raise UserError("bare-word", value=(tasks[1:] or named[1:])[0])
    if not tasks and not named and not flags:
        raise UserError("train-what")
    path = recipe_path(named[0]) if named else None
    content = {} if path is None else command_line.load_recipe(path)
    if tool := tool_of(content):
        raise UserError("recipe-of-other-tool", value=path, tool=tool)
    problems = Problems()
    launch = _launch(flags, problems)
    task = _task(WORDS.get(tasks[0], tasks[0]) if tasks else None, path, {**content, **flags})
    known = [*flags_of(task), "config", *vars(launch)]
    others = [name for name in flags if name not in known]
    problems.extend(command_line.unknown_name(name, "--", known, command_line.scripts_with(name)) for name in others)
    problems.extend([] if path is None else command_line.unknown_keys(path, content, task))
    problems.extend(value_problems(command_line.CommandLine(flags, path, content), [task]))
    problems.raise_any()
    return Asked(task, path, content, flags, launch)


def _convert(flags: Mapping[str, list[str]]) -> int:
    """Write the recipe of another tool as one of ours, and print what has no counterpart."""
    named, out = [*flags.get("", []), *flags.get("config", [])], " ".join(flags["convert"])
    if len(named) != 1 or not out:
        raise UserError("argument-missing", "--convert", usage="indictune train THEIRS.yaml --convert RECIPE.yaml")
    if others := flags.keys() - {"", "config", "convert"}:
        raise UserError("no-effect", f"--{min(others)}", " ".join(flags[min(others)]), other="--convert")
    source = recipe_path(named[0])
    content = command_line.load_recipe(source)
    if (tool := tool_of(content)) is None:
        raise UserError("recipe-of-no-tool", "--convert", source)
    try:
        made = translate(content, tool)
    except ValueError as error:  # of a text where a number is needed
        raise UserError("unreadable", "--config", source, "Correct it.", reason=error) from error
    try:
        with open(out, "x", encoding="utf-8") as file:
            file.write(made.text(source))
    except FileExistsError:
        raise UserError("file-exists", "--convert", out, "Name another file, or remove it.", held="it") from None
    lines = [f"Left out: {key}. {reason}" for key, reason in made.left.items()]
    print(printable("\n".join([*lines, f"{source} is written to {out} as a recipe of ours. Type:"])))
    print(f"  {shlex.join(['indictune', 'train', out])}")
    return 0


def with_enough_steps(asked: Asked) -> Asked:
    """The same with at least 600 steps for a classifier without a recipe, however few rows there are."""
    typed = {"min_steps", "max_steps", "num_train_epochs"} & asked.flags.keys()
    if asked.recipe is not None or asked.task != "classification" or typed:
        return asked
    note = "fewer where validation rows show no gain. --num_train_epochs or --max_steps takes yours."
    print(f"indictune: no recipe given: at least {ENOUGH_STEPS} optimizer steps, {note}", file=sys.stderr)
    return replace(asked, flags={**asked.flags, "min_steps": [str(ENOUGH_STEPS)]})


def with_defaults(asked: Asked) -> Asked:
    """The same with a folder for the run and, without a recipe, a small model and built-in rows if none are named."""
    recipe, content, notes = asked.recipe, asked.content, []
    if recipe is None and asked.task in _ROWS and not asked.flags.keys() & _SOURCES:
        rows = _ROWS[asked.task]
        asked = replace(asked, flags={**asked.flags, "dataset_name": [rows]})
        notes.append(f"no training rows given: those of this package ({rows}). --train_file FILE takes yours.")
    if recipe is None and asked.task in _SMALL and "model_name_or_path" not in asked.flags:
        name, flags, note = _default_model(asked.task)
        recipe = as_seen_from_here(FOLDER / name)
        content = {**command_line.load_recipe(recipe), "output_dir": None}
        asked = replace(asked, flags={**asked.flags, **flags})
        notes.append(f"no model given: {note}")
    asked = replace(asked, recipe=recipe, content=content)
    if not asked.output_dir:
        stem = asked.task if recipe is None else recipe.stem
        folder = _free_folder(Path("outputs", stem), may_exist="resume_from_checkpoint" in asked.flags)
        asked = replace(asked, flags={**asked.flags, "output_dir": [str(folder)]})
        notes.append(f"no --output_dir given: {folder}")
    for note in notes:
        print(f"indictune: {note}", file=sys.stderr)
    return asked


def _default_model(task: str) -> tuple[str, dict[str, list[str]], str]:
    """The recipe of a run that names no model, flags that it gets too, and a sentence about the model."""
    if task == "classification":
        if _has_on_hub(_INDICBERT):
            return _FINE_TUNED, {"model_name_or_path": [_INDICBERT]}, f"{_INDICBERT}, by {_FINE_TUNED}."
        if fetched.is_fetched():
            return _FINE_TUNED, {}, f"{fetched.NAME}, by {_FINE_TUNED}, because the Hub was not reached."
    hints = {
        "classification": f" A pretrained one scores higher: `{fetched.COMMAND}` fetches one.",
        "tokens": f" --model_name_or_path {_INDICBERT} starts from a pretrained model.",
    }
    return _SMALL[task], {}, f"a small one from random weights, by {_SMALL[task]}.{hints.get(task, '')}"


def _has_on_hub(name: str) -> bool:
    """Whether a model is in the cache of the Hub's package, or the Hub answers within seconds that it has it."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache  # slow to import

    weights = (try_to_load_from_cache(name, file) for file in ("model.safetensors", "pytorch_model.bin"))
    if any(isinstance(path, str) for path in weights):
        return True
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_SECONDS_FOR_THE_HUB)
    except Exception as error:  # of the network, the Hub, or a proxy
        logger.debug("%s: %s", name, error)
        return False
    return True


def _pretrain(asked: Asked, recipe: str) -> tuple[int, Asked]:
    """Check the run as far as its weights, then pretrain on its texts; the exit code, and the run that follows."""
    folder = f"{asked.output_dir}-pretrained"
    second = replace(asked, flags={**asked.flags, "model_name_or_path": [folder]})
    checked = second if json_or_nothing(Path(folder, "metrics.json")) else asked
    launch = command_line.to_flags(asked.launch.given())
    command = [sys.executable, "-m", "indictune", "train", asked.task, *checked.words(), *launch, "--dry_run"]
    return run_folder.wait_for(command) or run_train(before_labels(asked, recipe, folder)), second


def before_labels(asked: Asked, recipe: str, folder: str) -> dict[str, list[str]]:
    """The flags of the run that guesses masked words of the same texts, with the same model, into a folder."""
    words = {name: command_line.to_words(value) for name, value in asked.content.items() if value is not None}
    words |= {name: list(values) for name, values in asked.flags.items()}
    given = {name: values for name, values in words.items() if name in _OF_TEXTS and values}
    given |= asked.launch.given()
    if "resume_from_checkpoint" in given:  # one that is named is of the second step
        given["resume_from_checkpoint"] = [AUTO]
    return {"": ["mlm"], "config": [recipe], **given, "output_dir": [folder]}


def chosen(asked: Asked) -> Asked:
    """The same with a strategy and a micro-batch in place of `--strategy auto`."""
    if asked.launch.strategy != "auto":
        return asked
    from indictune.commands.plan import choose_strategy  # takes seconds

    choice = choose_strategy(asked.task, asked.words(), asked.launch.num_processes)
    flags = {name: [value] for name, value in choice.flags.items()}
    words = " ".join(f"--{name} {value}" for name, value in choice.flags.items())
    taken = f"--strategy {choice.strategy} --num_processes {choice.processes} {words}".rstrip()
    print(f"indictune: --strategy auto takes {taken}: {choice.reason}", file=sys.stderr)
    launch = replace(asked.launch, strategy=choice.strategy, num_processes=choice.processes)
    return replace(asked, launch=launch, flags={**asked.flags, **flags})


def fit_data_ranks(asked: Asked, launcher: Launcher) -> Asked:
    """The same with a smaller micro-batch, where the recipe's is too large for a share of the global batch."""
    rows, at_once = (_rows(asked, name) for name in ("global_batch_size", "per_device_train_batch_size"))
    if rows is None or at_once is None or "per_device_train_batch_size" in asked.flags:
        return asked
    if rows >= launcher.processes * at_once:
        return asked
    ranks = launcher.data_ranks() or launcher.processes  # where the sizes of the file are wrong, the run says so
    share, rest = divmod(rows, ranks)
    if rest or share >= at_once:
        return asked
    note = f"{ranks} data-parallel ranks share {rows} rows: --per_device_train_batch_size {share} instead of {at_once}"
    print(f"indictune: {note}", file=sys.stderr)
    return replace(asked, flags={**asked.flags, "per_device_train_batch_size": [str(share)]})


def _rows(asked: Asked, name: str) -> int | None:
    given = asked.flags.get(name, [str(asked.content.get(name, flags_of(asked.task)[name].default))])
    return int(given[0]) if given and given[0].isdecimal() else None


def recipe_path(named: str) -> Path:
    """The recipe of that path, or the installed one of that name."""
    path = Path(named)
    if path.suffix in _OF_ROWS:
        raise UserError("recipe-is-rows", value=named)
    if path.is_file():
        return path
    matches = [file for name, file in recipes().items() if named in (name, name.removeprefix("recipes/"))]
    if not matches:
        raise UserError("no-such-recipe", value=named)
    return matches[0]


def _launch(flags: dict[str, list[str]], problems: Problems) -> TrainFlags:
    """Take the flags of the command itself out of `flags`."""
    given: dict[str, Any] = {name: text for name in _LAUNCH if (text := " ".join(flags.pop(name, [])))}
    dry_run = " ".join(flags.pop("dry_run", ["false"])).lower() or "true"
    for name in given.keys() & _NUMBERS:
        number = given.pop(name)
        if number.isdecimal() and int(number) > 0:
            given[name] = int(number)
        else:
            problems.append(problem("expected-at-least", f"--{name}", number, smallest=1))
    if (engine := given.get("engine", "local")) not in ("local", "ray"):
        problems.append(problem("no-such-name", "--engine", engine, kind="engine", known="local, ray"))
    if "deepspeed" in flags:
        problems.append(problem("deepspeed-of-launcher", "--deepspeed", " ".join(flags.pop("deepspeed"))))
    if dry_run not in ("true", "false"):
        problems.append(problem("wrong-type", "--dry_run", dry_run, reason="expected true or false"))
    return problems.attempt(TrainFlags, **given, dry_run=dry_run == "true") or TrainFlags()


def _task(named: str | None, path: Path | None, content: Mapping[str, Any]) -> str:
    """The task that was typed, or that the recipe says or shows by keys that only one task has."""
    in_recipe = command_line.task_in(content)
    if in_recipe is not None and in_recipe not in SCRIPTS:
        raise UserError("no-such-name", "task", in_recipe, kind="task", known=", ".join(SCRIPTS))
    if named is not None and in_recipe is not None and named != in_recipe:
        raise UserError("recipe-of-other-task", "task", in_recipe, task=named, script=SCRIPTS[in_recipe])
    if task := named or in_recipe:
        return task
    keys = [key for key in content if key not in flags_of("indictune train")]
    unknown = {task: sum(key not in flags_of(task) for key in keys) for task in SCRIPTS}
    best = [task for task in SCRIPTS if unknown[task] == min(unknown.values())]
    best = [task for task in best if task not in _SHARING_KEYS] or best  # whose keys others have too
    if len(best) > 1:
        raise UserError("task-missing", f"--config {path}" if path else "The flags", known=" or ".join(SCRIPTS))
    return best[0]


def _free_folder(folder: Path, may_exist: bool) -> Path:
    """The folder, or the first of `folder-2`, `folder-3`, ... that holds no run."""
    number, free = 1, folder
    while not may_exist and run_folder.holds_files(free):
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _run_alone(command: Sequence[str], asked: Asked, launcher: Launcher) -> int:
    """Run one process. If the kernel kills it for lack of memory, this process says so."""
    kills = killed_processes()
    code = run_folder.wait_for(command)
    if code == -signal.SIGKILL and killed_processes() > kills:
        from indictune.commands.dry_run import answer_to_kill

        answer = answer_to_kill(asked.task, asked.words(), launcher.environment())
        run_folder.write_status(Path(asked.output_dir), "failed", answer)
        print(f"indictune: {answer}", file=sys.stderr)
    return 128 - code if code < 0 else code

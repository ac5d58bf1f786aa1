"""Command lines and recipes as their author wrote them, and the flags of all programs, without slow imports."""

from __future__ import annotations

import difflib
import json
import shutil
import textwrap
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml.constructor import BaseConstructor, ConstructorError

from indictune.credentials import NOT_YAML, holds_token, without_its_text
from indictune.errors import Problem, UserError, problem

# Task -> file in scripts/.
SCRIPTS = {"classification": "train_sentiment.py", "tokens": "train_tokens.py", "chat": "train_llama.py"}
SCRIPTS |= {"mlm": "train_mlm.py", "clm": "train_clm.py"}
SCRIPTS |= {"dpo": "train_preferences.py", "kto": "train_kto.py", "reward": "train_reward.py"}

# What `indictune train` takes for a task, besides its own name.
WORDS = {"sentiment": "classification", "ner": "tokens", "llama": "chat"}

# Variables by which a script knows the process of `indictune train` that has started it, by its number; by which
# `indictune.train` in Python names the files for the status of a command and of the functions that it is given, and
# `indictune parity` that for a trace.
LAUNCHED_BY = "INDICTUNE_LAUNCHED_BY"
STATUS_FILE = "INDICTUNE_STATUS_FILE"
OBJECTS_FILE = "INDICTUNE_PYTHON_OBJECTS"
PARITY_TRACE = "INDICTUNE_PARITY_TRACE"

# The flags that most runs need, by subject.
_GROUPS = {
    "data": ("train_file", "validation_file", "text_column", "label_column", "chat_template"),
    "model": ("model_name_or_path", "method", "max_length"),
    "training": ("num_train_epochs", "learning_rate", "global_batch_size", "per_device_train_batch_size", "bf16"),
    "run": ("config", "output_dir", "resume_from_checkpoint"),
}
_WIDEST = 100
# Of flags that transformers declares.
_CLEARER = {
    "output_dir": "Folder for the model, checkpoints, metrics and logs.",
    "resume_from_checkpoint": "auto: continue from the newest whole checkpoint. Or the folder of a checkpoint.",
    "num_train_epochs": "How often each training row is seen.",
    "per_device_train_batch_size": "Rows of one micro-batch on each process.",
}
_MORE = """\
--help all lists all {number} flags.
--help WORD lists those whose name or text has the word.
"""


class Flag(NamedTuple):
    """A flag as a user reads it, without dashes. If it is not our own, transformers or TRL declares it."""

    name: str
    values: str
    default: str
    help: str
    own: bool


_CONFIG = Flag("config", "file", "", "Recipe: a YAML file whose keys are named like the flags. A flag wins.", True)


@cache
def flags_of(program: str) -> Mapping[str, Flag]:
    """The flags of a task (`classification`) or a verb (`evaluate`), by name."""
    found = [Flag(*(each[key] for key in Flag._fields)) for each in _entries() if program in each["of"]]
    return {flag.name: flag for flag in found}


def scripts_with(name: str) -> list[str]:
    """The scripts that have a flag, or the one that it stands for."""
    names = (name, aliases().get(name, ("",))[0])
    programs = {program for each in _entries() if each["name"] in names for program in each["of"]}
    return [f"scripts/{SCRIPTS[task]}" for task in sorted(programs) if task in SCRIPTS]


@cache
def _entries() -> list[dict[str, Any]]:
    text = resources.files("indictune.config").joinpath("flags.json").read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = json.loads(text)
    return entries


def help_of(program: str, usage: str, asked: Sequence[str] = (), more: Iterable[Flag] = ()) -> str:
    """The help of a task's script or of a verb, below the lines of its usage.

    Args:
        asked: the words after `--help`: none, `all`, or words to look for.
        more: flags of the verb itself, in front.
    """
    flags = {each.name: each for each in (*more, _CONFIG)} | dict(flags_of(program))
    clearer = [name for name in _CLEARER if name in flags and not flags[name].own]
    flags |= {name: flags[name]._replace(help=_CLEARER[name]) for name in clearer}
    if asked and asked != ["all"]:
        words = [word.lower().lstrip("-").replace("-", "_") for word in asked]
        found = [flag for flag in flags.values() if any(word in f"{flag.name} {flag.help}".lower() for word in words)]
        if not found:
            return f"No flag has {' or '.join(asked)} in its name or text. --help all lists them.\n"
        return "".join(map(_entry, found))
    if not asked:
        return f"{usage}\n{_first(flags, [each.name for each in more])}"
    ours, others = ([_entry(flag) for flag in flags.values() if flag.own is own] for own in (True, False))
    return "".join([f"{usage}\n", *ours, *(["\nof transformers and TRL:\n", *others] if others else [])])


def _first(flags: Mapping[str, Flag], own: Sequence[str]) -> str:
    """The flags of `_GROUPS`, or all if there are few."""
    if len(flags) <= 30:
        return "".join(map(_entry, (each for each in flags.values() if each is not _CONFIG)))
    parts = []
    for title, names in ({"command": own} | _GROUPS).items():
        shown = [flags[name] for name in names if name in flags]
        parts += [f"{title}:\n", *map(_entry, shown), "\n"] if shown else []
    return "".join([*parts, _MORE.format(number=len(flags))])


def _entry(flag: Flag) -> str:
    default = f" (default {flag.default})" if flag.default else ""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    text = textwrap.fill(flag.help, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  --{flag.name} {flag.values}{default}\n{text}\n"


# YAML 1.1 reads 010 as 8, `no` as false, and keeps the last of two equal keys.
_TAG = "tag:yaml.org,2002:"
_NOTHING = {f"{_TAG}null", f"{_TAG}merge"}
_NUMBERS = {f"{_TAG}bool", f"{_TAG}int", f"{_TAG}float"}


class _UniqueKeys(BaseConstructor):
    """Raises a `ConstructorError` with the place of a key that a mapping has twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ConstructorError(None, None, f"the key {key.value} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class TextLoader(_UniqueKeys, yaml.BaseLoader):
    """Reads everything as text."""


class RecipeLoader(_UniqueKeys, yaml.SafeLoader):
    """Reads keys and values as text, which the type of the field converts; `null` and `~` stay None.

    In a mapping that is a value, such as `{num_cycles: 2}`, numbers and booleans are read as such: it has no fields.
    """

    depth = 0

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        self.depth += 1
        node = super().compose_mapping_node(anchor)
        self.depth -= 1
        return node

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        known = _NOTHING if self.depth == 1 else _NOTHING | _NUMBERS
        return f"{_TAG}str" if kind is yaml.ScalarNode and tag not in known else tag


def load_recipe(
    path: Path, flag: str = "--config", loader: Any = RecipeLoader, hint: str | None = None
) -> Mapping[str, Any]:
    """The content of a recipe, or of the file of another flag; a `UserError` if it cannot be read, or is no mapping.

    The hint says what a mapping is; None for that of a recipe.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), loader)
    except FileNotFoundError:
        raise UserError("no-such-file", flag, path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("unreadable", flag, path, reason=error) from error
    except NOT_YAML as error:
        raise UserError("not-yaml", flag, path, reason=without_its_text(error)) from None
    if not isinstance(content, Mapping):
        raise UserError("recipe-not-a-mapping", flag, path, hint, found=type(content).__name__)
    return content


# A run's rows come from one source: one of these on the command line drops them all from the recipe.
FILES_OF_ROWS = ("train_file", "train_files", "validation_file", "test_file")
DATASET_FIELDS = ("dataset_name", "dataset_config_name", "dataset_revision", "dataset_splits")
DATA_SOURCE_FIELDS = (*DATASET_FIELDS, *FILES_OF_ROWS)

# Key of recipe.yaml for values that followed from launch, machine and rows. They are not read back.
DECIDED = "decided"

# Names below this similarity are no typing errors of one another (difflib's ratio).
_STRICT = 0.8


def with_flag(given: Sequence[str] | Mapping[str, list[str]], name: str) -> dict[str, list[str]]:
    """The words of each flag; bare words are the value of flag `name`, unless it is given too."""
    flags = read_flags(given)
    bare = flags.pop("", [])
    return {name: bare, **flags} if bare else flags


def read_flags(given: Sequence[str] | Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The words of each flag, of `--name value value` or `--name=value`; flags that are split already are copied.

    Words before the first flag are those of "". Of a flag that is given twice, the last words count; only `--text` and
    `--text_pair` keep all.
    """
    if isinstance(given, Mapping):
        return dict(given)
    flags, name, words = dict[str, list[str]](), "", list[str]()
    for token in (*given, "--"):  # which ends the last flag
        if token != "-h" and not token.startswith("--"):
            words.append(token)
            continue
        if name or words:
            flags[name] = [*flags.get(name, ()), *words] if name in ("text", "text_pair") else words
        name, equals, value = ("help" if token == "-h" else token[2:]).partition("=")
        name, words = name.replace("-", "_"), [value] if equals else []
    return flags


@dataclass(frozen=True)
class CommandLine:
    """The words of each flag, and path and content of the recipe that `--config` names, or why it cannot be read."""

    flags: dict[str, list[str]]
    path: Path | None = None
    content: Mapping[str, Any] = field(default_factory=dict)
    problem: UserError | None = None


_KEPT: dict[tuple[str, ...], CommandLine] = {}


def read_command_line(argv: Sequence[str] | Mapping[str, list[str]]) -> CommandLine:
    """Split a command line and read its recipe, or take what `keep_command_line` has read. That is taken once."""
    kept = None if isinstance(argv, Mapping) else _KEPT.pop(tuple(argv), None)
    if kept is not None:
        return kept
    flags = read_flags(argv)
    if "config" not in flags:
        return CommandLine(flags)
    path = Path(" ".join(flags["config"]) or "(no file named)")
    try:
        return CommandLine(flags, path, load_recipe(path))
    except UserError as error:
        return CommandLine(flags, path, problem=error)


def keep_command_line(argv: Sequence[str]) -> CommandLine:
    """Read a command line before the slow imports. The next `read_command_line` of these words gets the same."""
    read = _KEPT[tuple(argv)] = read_command_line(argv)
    return read


def to_words(value: Any) -> list[str]:
    """The value of a recipe's key as words of a command line, so that both are converted alike."""
    if isinstance(value, list | tuple):
        return [word for item in value for word in to_words(item)]
    return [json.dumps(value) if isinstance(value, Mapping) else str(value)]


def flag_words(name: str, values: Sequence[str]) -> list[str]:
    """A flag as words of a command line. `--name=value` keeps a value that begins with a dash."""
    is_signed = len(values) == 1 and values[0].startswith("-")
    return [f"--{name}={values[0]}"] if is_signed else [f"--{name}", *values]


def to_flags(values: Mapping[str, Any]) -> list[str]:
    """Values by flag as a command line, without those that are None."""
    given = {name: to_words(value) for name, value in values.items() if value is not None}
    return [word for name, words in given.items() for word in flag_words(name, words)]


def unknown_name(name: str, prefix: str, known: Collection[str], elsewhere: Sequence[str] = ()) -> Problem:
    """The problem of a flag or recipe key that does not exist, with the flag it may stand for.

    `prefix` is `--`, or the recipe and a colon. Programs `elsewhere` do have the flag.
    """
    is_flag = prefix == "--"
    dashes = "--" if is_flag else ""
    alias, note = aliases().get(name, ("", ""))
    begun = [each for each in known if each.startswith(name)]
    nearest = begun if len(begun) == 1 else difflib.get_close_matches(name, known, n=1, cutoff=_STRICT)
    hint = None
    if alias in known:
        hint = f"Here it is `{dashes}{alias}`. {note}".rstrip()
    elif note and not alias:
        hint = f"Leave it out. {note}"
    elif nearest:
        hint = f"Did you mean `{dashes}{nearest[0]}`?"
    elif elsewhere:
        hint = f"It is `{dashes}{alias or name}` of {' and '.join(elsewhere)}."
    return problem("unknown-name", f"{prefix}{name}", way_out=hint, kind="flag" if is_flag else "recipe key")


def unknown_keys(path: Path, content: Mapping[str, Any], task: str) -> list[Problem]:
    """The problems of a recipe's keys that its task does not have. Of keys that hold a token, the run says more."""
    keys = [str(name) for name, value in content.items() if value is not None and name != DECIDED]
    unknown = [name for name in keys if name not in flags_of(task) and not holds_token(name)]
    return [unknown_name(name, f"{path}: ", flags_of(task), scripts_with(name)) for name in unknown]


def early_problems(read: CommandLine, tasks: Sequence[str]) -> list[Problem]:
    """The problems of a recipe's keys for a program of these tasks, before a run imports its libraries.

    A file that cannot be read, or is of another task, is left to the run, which has more to say.
    """
    if read.path is None:
        return []
    named = task_in(read.content)
    if named in SCRIPTS:
        tasks = [task for task in tasks if task == named]
    found = [unknown_keys(read.path, read.content, task) for task in tasks]
    return min(found, key=len, default=[])


def task_in(content: Mapping[str, Any]) -> Any:
    """The task that a recipe names, or that a run has written into it; None if there is none."""
    decided = content.get(DECIDED)
    return content.get("task") or (decided.get("task") if isinstance(decided, dict) else None)


@cache
def aliases() -> dict[str, tuple[str, str]]:
    """Name elsewhere -> name here, and what differs."""
    text = resources.files("indictune.config").joinpath("aliases.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text).items()
    return {name: (here, "") if isinstance(here, str) else (here[0], here[1]) for name, here in entries}

"""All flags of all programs and the tasks by name, from a generated file: reading it imports no other library."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

# Task -> file in scripts/.
SCRIPTS = {"classification": "train_sentiment.py", "tokens": "train_tokens.py", "chat": "train_llama.py"}

# What `indictune train` takes for a task, besides its own name.
WORDS = {"sentiment": "classification", "ner": "tokens", "llama": "chat"}

# A variable by which a script knows that `indictune train` has started it: the number of that process.
LAUNCHED_BY = "INDICTUNE_LAUNCHED_BY"

# A variable by which `indictune.train` in Python asks a command how it ended: the file that gets its status.
STATUS_FILE = "INDICTUNE_STATUS_FILE"

# A variable by which `indictune parity` asks a run for a trace: the file that gets it.
PARITY_TRACE = "INDICTUNE_PARITY_TRACE"

_FILE = "flags.json"

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
    """A flag as a user reads it.

    Attributes:
        name: without dashes.
        values: that it takes.
        default: as typed; may be empty.
        help: what it does.
        own: whether indictune declares it; else transformers or TRL does.
    """

    name: str
    values: str
    default: str
    help: str
    own: bool


_CONFIG = Flag("config", "file", "", "Recipe: a YAML file whose keys are named like the flags. A flag wins.", True)


@cache
def flags_of(program: str) -> Mapping[str, Flag]:
    """The flags of a task (`classification`) or a verb (`evaluate`), by name."""
    return {
        each["name"]: Flag(**{key: each[key] for key in Flag._fields}) for each in _entries() if program in each["of"]
    }


def scripts_with(name: str) -> list[str]:
    """The scripts that have a flag."""
    programs = {program for each in _entries() if each["name"] == name for program in each["of"]}
    return [f"scripts/{SCRIPTS[task]}" for task in sorted(programs) if task in SCRIPTS]


@cache
def _entries() -> list[dict[str, Any]]:
    text = resources.files("indictune.config").joinpath(_FILE).read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = json.loads(text)
    return entries


def help_of(program: str, usage: str, asked: Sequence[str] = (), more: Iterable[Flag] = ()) -> str:
    """The help of a task's script or of a verb.

    Args:
        program: a task, or a verb.
        usage: the lines at the top.
        asked: the words after `--help`: none, `all`, or words to look for.
        more: flags of the verb itself, in front.
    """
    flags = {each.name: each for each in (*more, _CONFIG)} | dict(flags_of(program))
    flags |= {
        name: flags[name]._replace(help=help)
        for name, help in _CLEARER.items()
        if name in flags and not flags[name].own
    }
    if asked and asked != ["all"]:
        words = [word.lower().lstrip("-").replace("-", "_") for word in asked]
        found = [flag for flag in flags.values() if any(word in f"{flag.name} {flag.help}".lower() for word in words)]
        if not found:
            return f"No flag has {' or '.join(asked)} in its name or text. --help all lists them.\n"
        return "".join(map(_entry, found))
    return f"{usage}\n{_everything(flags) if asked else _first(flags, [each.name for each in more])}"


def _everything(flags: Mapping[str, Flag]) -> str:
    ours = [flag for flag in flags.values() if flag.own]
    others = [flag for flag in flags.values() if not flag.own]
    inherited = ["\nof transformers and TRL:\n", *map(_entry, others)] if others else []
    return "".join([*map(_entry, ours), *inherited])


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

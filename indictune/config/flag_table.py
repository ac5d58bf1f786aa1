"""All flags of all programs, from a generated file: reading it imports no other library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from indictune.config.task_names import SCRIPTS

FILE = "flags.json"


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


# Of `indictune train` itself. The scripts leave them to their launchers.
LAUNCH_FLAGS = (
    Flag(
        "strategy",
        "name or file",
        "",
        "A file of accelerate_configs/, by its name. `auto`: the fastest that fits, as `indictune plan` ranks them. "
        "Default: one for the GPUs.",
        True,
    ),
    Flag(
        "num_processes",
        "whole number",
        "",
        "Processes on this machine. Default: as the strategy file says, or one for each GPU.",
        True,
    ),
    Flag("dry_run", "true, false", "false", "Print the plan, the tokens and the memory of the run, and stop.", True),
)


@cache
def flags_of(program: str) -> Mapping[str, Flag]:
    """The flags of a task (`classification`) or a verb (`evaluate`), by name."""
    return {
        each["name"]: Flag(**{key: each[key] for key in Flag._fields}) for each in _entries() if program in each["of"]
    }


def programs_with(name: str) -> list[str]:
    """The programs that have a flag."""
    return sorted({program for each in _entries() if each["name"] == name for program in each["of"]})


def scripts_with(name: str) -> list[str]:
    """The scripts that have a flag."""
    return [f"scripts/{SCRIPTS[task]}" for task in programs_with(name) if task in SCRIPTS]


@cache
def _entries() -> list[dict[str, Any]]:
    text = resources.files("indictune.config").joinpath(FILE).read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = json.loads(text)
    return entries

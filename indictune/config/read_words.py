"""Read a recipe file and a command line as their author wrote them, and say what an unknown name means."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import BaseConstructor, ConstructorError

from indictune.config.flag_table import SCRIPTS, flags_of, scripts_with
from indictune.credentials import NOT_YAML, holds_token, without_its_text
from indictune.errors import Problem, UserError, problem

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


def load_recipe(path: Path) -> Mapping[str, Any]:
    """The content of a recipe file.

    Raises:
        UserError: it cannot be read, or is no mapping.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), RecipeLoader)
    except FileNotFoundError:
        raise UserError("no-such-file", "--config", path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("unreadable", "--config", path, reason=error) from error
    except NOT_YAML as error:
        raise UserError("not-yaml", "--config", path, reason=without_its_text(error)) from None
    if not isinstance(content, Mapping):
        raise UserError("recipe-not-a-mapping", "--config", path, found=type(content).__name__)
    return content


# Key of recipe.yaml for values that followed from launch, machine and rows. They are not read back.
DECIDED = "decided"

# Names below this similarity are no typing errors of one another (difflib's ratio).
_STRICT = 0.8


def with_flag(given: Sequence[str] | Mapping[str, list[str]], name: str) -> dict[str, list[str]]:
    """The words of each flag; bare words are the value of flag `name`, unless it is given too."""
    flags = read_flags(given)
    bare = flags.pop("", [])
    return {name: bare, **flags} if bare else flags


def split_flags(argv: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    """Split `--name value value` and `--name=value` into name and words. Words before the first flag have no name."""
    name, words = "", list[str]()
    for token in argv:
        if token in ("-h", "--help"):
            token = "--help"
        if token.startswith("--"):
            if name or words:
                yield name, words
            name, equals, value = token[2:].partition("=")
            name, words = name.replace("-", "_"), [value] if equals else []
        else:
            words.append(token)
    if name or words:
        yield name, words


def read_flags(given: Sequence[str] | Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The words of each flag; flags that are split already are copied.

    Of a flag that is given twice, the last words count; only `--text` keeps all.
    """
    if isinstance(given, Mapping):
        return dict(given)
    flags: dict[str, list[str]] = {}
    for name, words in split_flags(given):
        flags[name] = [*flags.get(name, ()), *words] if name == "text" else words
    return flags


@dataclass(frozen=True)
class CommandLine:
    """A command line, split, and the recipe that its `--config` names.

    Attributes:
        flags: the words of each flag.
        path: of the recipe; None without one.
        content: of the recipe; empty where it cannot be read.
        problem: why it cannot.
    """

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


def to_flags(values: Mapping[str, Any]) -> list[str]:
    """Values by flag as a command line, without those that are None. A single word may begin with a dash."""
    flags = []
    for name, value in values.items():
        words = [] if value is None else to_words(value)
        flags += [f"--{name}={words[0]}"] if len(words) == 1 else [f"--{name}", *words] if value is not None else []
    return flags


def unknown_name(name: str, prefix: str, known: Collection[str], elsewhere: Sequence[str] = ()) -> Problem:
    """The problem of a flag or recipe key that does not exist, with the flag it may stand for.

    Args:
        name: of the flag or key.
        prefix: `--`, or the recipe and a colon.
        known: names of this program.
        elsewhere: programs that do have the flag.
    """
    is_flag = prefix == "--"
    dashes = "--" if is_flag else ""
    alias, note = _aliases().get(name, ("", ""))
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
        hint = f"It is a flag of {' and '.join(elsewhere)}."
    return problem("unknown-name", f"{prefix}{name}", way_out=hint, kind="flag" if is_flag else "recipe key")


def unknown_keys(path: Path, content: Mapping[str, Any], task: str) -> list[Problem]:
    """The problems of a recipe's keys that its task does not have. Of keys that hold a token, the run says more."""
    keys = [str(name) for name, value in content.items() if value is not None and name != DECIDED]
    unknown = [name for name in keys if name not in flags_of(task) and not holds_token(name)]
    return [unknown_name(name, f"{path}: ", flags_of(task), scripts_with(name)) for name in unknown]


def early_problems(read: CommandLine, tasks: Sequence[str]) -> list[Problem]:
    """The problems of a recipe's keys, before a run imports its libraries.

    A file that cannot be read, or is of another task, is left to the run, which has more to say.

    Args:
        read: the command line.
        tasks: that the program may run.
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
def _aliases() -> dict[str, tuple[str, str]]:
    """Name elsewhere -> name here, and what differs."""
    text = resources.files("indictune.config").joinpath("aliases.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text).items()
    return {name: (here, "") if isinstance(here, str) else (here[0], here[1]) for name, here in entries}

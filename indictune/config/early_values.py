"""Find values that no run can use before the slow imports: no numbers, and files and models that are not there."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from indictune.config.command_line import (
    DATA_SOURCE_FIELDS,
    DECIDED,
    FILES_OF_ROWS,
    CommandLine,
    flags_of,
    scripts_with,
    to_words,
    unknown_name,
)
from indictune.config.shared_arguments import AUTO, check_ranges
from indictune.credentials import holds_token
from indictune.errors import Problem, Problems, UserError, problem, problems_of

_OF_SEVERAL = re.compile(r"://|[*?\[{]")  # in URLs, patterns and entries with a weight, of which the run says more


class RaisingParser(argparse.ArgumentParser):
    """Raises `ValueError` for a value of the wrong type, instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def number_or_auto(word: str) -> int | str:
    """A whole number, or `auto`, as argparse takes the type of a flag."""
    if word != AUTO and not word.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number or {AUTO}")
    return word if word == AUTO else int(word)


_TYPES: Mapping[str, Callable[[str], Any]] = {
    "whole number": int,
    "number": float,
    "whole number or text": number_or_auto,
    "text": str,
}


def is_launched() -> bool:
    """Whether a launcher has started this process: the run reports its problems then, from one rank."""
    return "LOCAL_RANK" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ


def value_problems(read: CommandLine, programs: Collection[str]) -> list[Problem]:
    """The problems of values that no program needs its libraries to see; none where a word is a token.

    A flag overrides the recipe. A flag that two programs read differently is left to the run.
    """
    flags, prefixes = dict(read.flags), dict.fromkeys(read.flags, "--")
    drops = DATA_SOURCE_FIELDS if {"dataset_name", *FILES_OF_ROWS} & flags.keys() else ()
    for name, value in read.content.items():
        if value is not None and name != DECIDED and name not in (*flags, *drops):
            flags[name], prefixes[name] = to_words(value), f"{read.path}: "
    if any(holds_token(word) for words in flags.values() for word in words):
        return []
    problems = Problems(read.problem.problems if read.problem is not None else ())
    parser, values = RaisingParser(allow_abbrev=False, add_help=False), dict[str, Any]()
    for name, words in flags.items():
        kinds = {flags_of(program)[name].values for program in programs if name in flags_of(program)}
        if len(kinds) == 1 and (kind := _TYPES.get(*kinds)) is not None:
            parser.add_argument(f"--{name}", type=kind)
            with problems.collecting():
                values[name] = to_type(parser, prefixes[name], name, words)
    refused = {each.flag.rpartition("--")[2] for each in problems}
    present = {name: words for name, words in flags.items() if name not in refused}
    return [*problems, *check_ranges(values), *missing_files(present)]


def missing_files(flags: Mapping[str, Sequence[str]]) -> list[Problem]:
    """The problems of files, models and repositories that cannot be there."""
    found = []
    for name in (*FILES_OF_ROWS, "input_file"):
        for path in flags.get(name, ()):
            if not _OF_SEVERAL.search(path):
                found += problems_of(check_exists, path, f"--{name}")
    for model in flags.get("model_name_or_path", ()):
        unusable = unusable_model(model, "--model_name_or_path")
        if unusable is not None and not Path(model, "adapter_config.json").exists():  # of which the run says more
            found.append(unusable)
    for folder in flags.get("resume_from_checkpoint", ()):
        if folder != AUTO and not os.path.exists(folder):
            found.append(problem("resume-damaged", "--resume_from_checkpoint", folder, reason="it is not there"))
    if flags.get("push_to_hub") == ["true"]:
        for repository in flags.get("hub_model_id", ()):
            found += name_problems(repository, "--hub_model_id", repository)
    return found


def check_exists(path: str, flag: str = "") -> None:
    """Refuse a data file that is not there, and name a similar one."""
    file = Path(path)
    if not os.path.exists(file):
        names = list[str]()
        with suppress(OSError):
            names = os.listdir(file.parent)
        near = difflib.get_close_matches(file.name, names, n=1)
        way_out = f"Did you mean {file.parent / near[0]}?" if near else None
        raise UserError("no-such-file", flag, path, way_out)


def unusable_model(name: str, flag: str) -> Problem | None:
    """The problem of a model's name that is no model here, nor can be one of the Hub; None if it may be a model."""
    folder = Path(name)
    if os.path.isdir(folder) and not (folder / "config.json").exists():
        inside = sorted(path.name for path in folder.iterdir() if (path / "config.json").exists())
        hint = f" There is one in {folder / inside[-1]}." if inside else ""
        return problem("folder-without-model", flag, name, hint=hint)
    if os.path.exists(folder) or ":" in name:  # a folder, a config.json, or `builtin:NAME`
        return None
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/"):
        return problem("no-such-model-folder", flag, name)  # no name on the Hub is like that
    refused = name_problems(name, flag, name)
    return problem("model-not-found-offline", flag, name, reason=refused[0].details["reason"]) if refused else None


def name_problems(name: str, flag: str, value: object, way_out: str | None = None) -> list[Problem]:
    """The problem of a repository's name that the Hub does not allow, as one of a flag's value."""
    from huggingface_hub.errors import HFValidationError  # takes a tenth of a second
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return [problem("repository-name", flag, value, way_out, reason=str(error).strip().rstrip(".:"))]
    return []


def to_type(parser: argparse.ArgumentParser, prefix: str, name: str, words: list[str]) -> Any:
    """The words, converted to the type that the parser has for flag `name`.

    `prefix` is `--`, or the recipe and a colon.
    """
    known = {action.dest: action for action in parser._actions if action.dest != "help"}
    if name not in known:
        names = [*known, *(["config"] if prefix == "--" else [])]
        raise UserError(problems=[unknown_name(name, prefix, names, scripts_with(name))])
    if not words and prefix != "--" and known[name].nargs == "+":
        return []
    if known[name].nargs == "+" and len(words) > 1:
        found = [to_type(parser, prefix, name, [word]) for word in words]
        return [value for each in found for value in (each if isinstance(each, list) else [each])]
    # `--name=value` is one word, so that a value may begin with a dash: argparse takes -1e-4 for a flag.
    typed = [f"--{name}={words[0]}"] if len(words) == 1 else [f"--{name}", *words]
    given = " ".join(words)
    try:
        value = getattr(parser.parse_args(typed), name)
    except ValueError as error:
        reason = str(error).removesuffix(".")
        if reason.startswith("unrecognized arguments"):
            reason = f"expected one value, got {len(words)}; quote a value that holds spaces"
        elif reason.startswith("argument --"):
            reason = reason.partition(": ")[2]
        raise UserError("wrong-type", f"{prefix}{name}", given, reason=reason) from error
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError("not-finite", f"{prefix}{name}", given)
    return value

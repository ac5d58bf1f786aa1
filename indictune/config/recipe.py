"""Read a recipe file and the command line into the dataclasses that describe a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from transformers import HfArgumentParser

from indictune.config.command_line import (
    DATA_SOURCE_FIELDS,
    DECIDED,
    FILES_OF_ROWS,
    read_command_line,
    to_words,
    with_flag,
)
from indictune.config.early_values import RaisingParser, number_or_auto, to_type
from indictune.config.shared_arguments import AUTO
from indictune.credentials import FIELD, NOT_YAML, holds_token, without_its_text
from indictune.errors import Problems, UserError, problem

Arguments = TypeVar("Arguments")

# Each one lets foreign code run. Only the command line can grant it, not a file.
TRUST_FIELDS = ("trust_remote_code", "trust_checkpoint")

# Secrets, trust, and values of one machine and launch: wrong in another run of the same recipe.
UNRECORDED_FIELDS = (
    *("hub_token", *TRUST_FIELDS, "local_rank", "use_cpu", "allow_cpu", "accelerator_config", "deepspeed"),
    *("gradient_accumulation_steps", "resume_from_checkpoint"),
)


class _FlagParser(RaisingParser, HfArgumentParser):
    """Parses the flags of dataclasses."""

    def __init__(self, types: Sequence[type[Any]]) -> None:
        super().__init__(list(types), allow_abbrev=False)  # type: ignore[arg-type]
        for name, hint in (each for kind in types for each in get_type_hints(kind).items()):
            if hint == int | str:  # which HfArgumentParser reads as a number alone
                self._option_string_actions[f"--{name}"].type = number_or_auto


@dataclasses.dataclass
class Recipe:
    """What the recipe file and the command line give, converted to the types of the fields, and the problems."""

    values: dict[str, Any]
    problems: Problems

    @property
    def is_read(self) -> bool:
        """Whether the recipe file, if there is one, could be read."""
        return all(each.flag != "--config" for each in self.problems)

    def build(self, arguments: type[Arguments], **decided: Any) -> Arguments:
        """Make `arguments` from the given values, unless it refuses them; `decided` values win over them."""
        names = {field.name for field in dataclasses.fields(arguments) if field.init}  # type: ignore[arg-type]
        given = {name: value for name, value in self.values.items() if name in names}
        try:
            return arguments(**{**given, **decided})
        except ValueError as error:
            raise UserError("value-refused", reason=str(error).rstrip(".")) from error

    def to_record(self, built: Sequence[Any], decided: Collection[str]) -> dict[str, Any]:
        """The complete configuration for `recipe.yaml`. Values that the run derived are apart, under `decided`.

        Beside the given names, they are fields of the built dataclasses that were not given and differ from their
        default, and numbers that were found in place of `auto`.
        """
        whole = resolved(*built)
        left_open = [field for each in built for field in dataclasses.fields(each) if field.name not in self.values]
        follows = {each.name for each in left_open if each.name in whole and whole[each.name] != default_of(each)}
        found = {name for name, value in self.values.items() if value == AUTO != whole.get(name)}
        apart = {name: whole.pop(name) for name in sorted(whole.keys() & {*decided, *follows, *found})}
        given = {name: self.values[name] for name in apart.keys() & self.values.keys()}
        return whole | given | ({DECIDED: apart} if apart else {})


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass's field; a new object if it is mutable."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def read_recipe(argv: Sequence[str] | Mapping[str, list[str]], argument_types: Sequence[type[Any]]) -> Recipe:
    """Read `--config FILE` and the other flags of `argv`, as words or split already. A flag overrides the file.

    Unknown names, values of the wrong type and an unreadable file are not raised, but collected in `problems`.
    """
    problems = Problems()
    parser = _FlagParser(argument_types)
    read = read_command_line(argv)
    flags, path, in_file = dict(read.flags), read.path, dict[str, list[str]]()
    if bare := flags.pop("", []):
        shown = "(a token)" if any(map(holds_token, bare)) else " ".join(bare)
        problems.append(problem("bare-word", value=shown))
    _drop_tokens("--", flags, problems)
    if flags.pop("config", None) is not None:
        problems.extend(read.problem.problems if read.problem is not None else ())
        given = {str(name): value for name, value in read.content.items() if value is not None and name != DECIDED}
        in_file = {name: to_words(value) for name, value in given.items()}
        _drop_tokens(f"{path}: ", in_file, problems)
        _drop_trust(f"{path}: ", in_file, problems)
    if any(name in flags for name in ("dataset_name", *FILES_OF_ROWS)):
        in_file = {name: words for name, words in in_file.items() if name not in DATA_SOURCE_FIELDS}

    values: dict[str, Any] = {}
    for prefix, entries in ((f"{path}: ", in_file), ("--", flags)):
        for name, words in entries.items():
            with problems.collecting():
                values[name] = to_type(parser, prefix, name, words)
    return Recipe(values, problems)


def read_arguments(given: Mapping[str, list[str]], arguments: type[Arguments], bare_flag: str) -> Arguments:
    """The arguments of a command, or all problems at once. A bare first word is the value of flag `bare_flag`."""
    if len(bare := given.get("", [])) > 1:
        files = [each.name for each in dataclasses.fields(arguments) if each.name in ("input_file", "test_file")]  # type: ignore[arg-type]
        raise UserError("bare-word", value=bare[1], way_out=f"Use --{files[0]} {bare[1]}." if files else None)
    recipe = read_recipe(with_flag(given, bare_flag), (arguments,))
    with recipe.problems.collecting():
        built = recipe.build(arguments)
    recipe.problems.raise_any()
    return built


def resolved(*arguments: Any) -> dict[str, Any]:
    """Every field of the given dataclass instances as plain YAML values, without secrets. `--config` can read it."""
    merged: dict[str, Any] = {}
    for instance in arguments:
        to_dict = getattr(instance, "to_dict", None)
        flags = {each.name for each in dataclasses.fields(instance) if each.init}  # others are fixed by the task
        values = to_dict() if to_dict else dataclasses.asdict(instance)
        merged.update({name: value for name, value in values.items() if to_dict or name in flags})
    return {name: value for name, value in sorted(merged.items()) if name not in UNRECORDED_FIELDS}


def recorded_values(written: Any) -> dict[str, Any]:
    """The complete configuration in the content of a `recipe.yaml`, derived values included."""
    if not isinstance(written, dict):
        return {}
    apart = written.get(DECIDED)
    chosen = {name: value for name, value in written.items() if name != DECIDED}
    return chosen | (apart if isinstance(apart, dict) else {})


def _drop_tokens(prefix: str, entries: dict[str, list[str]], problems: Problems) -> None:
    """Remove every entry that holds a token, so that no message and no file repeats it."""
    for name, words in list(entries.items()):
        if any(map(holds_token, (name, *words))) or (name == FIELD and words):
            del entries[name]
            shown = "(a token)" if holds_token(name) else name
            problems.append(problem("token-in-the-open", f"{prefix}{shown}"))


def _drop_trust(prefix: str, in_file: dict[str, list[str]], problems: Problems) -> None:
    """Refuse trust that a file grants; `false` grants none."""
    for name in TRUST_FIELDS:
        words = in_file.pop(name, ["false"])
        if [word.lower() for word in words] != ["false"]:
            problems.append(problem("trust-in-file", f"{prefix}{name}", name=name))


def configuration_of(model: Path) -> dict[str, Any]:
    """The complete configuration in a model folder's `recipe.yaml`, without empty values; empty if it has none."""
    trained = model / "recipe.yaml"
    try:
        if not trained.exists():
            return {}
        configuration = recorded_values(yaml.safe_load(trained.read_text(encoding="utf-8")))
    except (OSError, *NOT_YAML) as error:
        reason = error if isinstance(error, OSError) else without_its_text(error)
        raise UserError("unreadable", "--model", f"{model}: its recipe.yaml", reason=reason) from None
    return {name: value for name, value in configuration.items() if value is not None}

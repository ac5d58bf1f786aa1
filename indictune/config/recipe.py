"""From a recipe file and the command line to the dataclasses that describe a run."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from transformers import HfArgumentParser

from indictune.config.strict_yaml import RecipeLoader
from indictune.credentials import FIELD, NOT_YAML, WAY_OUT, holds_token, without_its_text
from indictune.errors import Problems, UserError, problem

Arguments = TypeVar("Arguments")

# A flag among these drops all of them from the recipe: the rows of a run come from one source.
DATA_SOURCE_FIELDS = ("dataset_name", "dataset_config_name", "train_file", "validation_file", "test_file")

# Fields that name a file or folder, or may do so.
PATH_FIELDS = (
    *("output_dir", "train_file", "validation_file", "test_file", "dataset_name", "model_name_or_path", "model"),
    *("resume_from_checkpoint", "deepspeed", "class_weights", "chat_template", "adapter", "base_model", "folder"),
    "convert_to",
)
_SHOWN_LETTERS = 40

# Each lets code of others run. Only the command line may grant it: a file would vouch for itself.
TRUST_FIELDS = ("trust_remote_code", "trust_checkpoint")

# Never recorded: secrets, trust, and what machine and launch decide, which would be wrong in another run.
UNRECORDED_FIELDS = (
    *("hub_token", *TRUST_FIELDS, "local_rank", "use_cpu", "accelerator_config", "deepspeed"),
    *("gradient_accumulation_steps", "resume_from_checkpoint"),
)


# Key of `recipe.yaml` for values that were derived from launch, machine and rows. `--config` does not read it back.
DERIVED = "derived"


class _FlagParser(HfArgumentParser):
    """The flags of some dataclasses. A value that does not fit raises, instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@dataclasses.dataclass
class Recipe:
    """What the user gave by recipe file and command line, converted to the types of the fields.

    Attributes:
        values: field name -> value, of the given fields.
        problems: of the file and the flags.
        path: the recipe file, or None.
        is_read: False where the recipe file could not be read; then a value that is missing may be in it.
    """

    values: dict[str, Any]
    problems: Problems
    path: Path | None = None
    is_read: bool = True

    def build(self, arguments: type[Arguments], **derived: Any) -> Arguments:
        """Make `arguments` from the given values and from `derived` ones, which win.

        Raises:
            UserError: the dataclass refuses a value or a combination of values.
        """
        names = {field.name for field in dataclasses.fields(arguments) if field.init}  # type: ignore[arg-type]
        given = {name: value for name, value in self.values.items() if name in names}
        try:
            return arguments(**{**given, **derived})
        except ValueError as error:
            raise UserError("value-refused", reason=str(error)) from error

    def to_record(self, built: Sequence[Any], derived: Collection[str]) -> dict[str, Any]:
        """The whole configuration, as `recipe.yaml` records it. Another run that reads it derives its own values.

        Args:
            built: the dataclasses of the run.
            derived: names of the fields that the run derived, even where they were given. A field that was not given
                and differs from its default was derived too.
        """
        whole = resolved(*built)
        follows = {
            field.name
            for each in built
            for field in dataclasses.fields(each)
            if field.name in whole.keys() - self.values.keys() and whole[field.name] != default_of(field)
        }
        apart = {name: whole.pop(name) for name in sorted(whole.keys() & {*derived, *follows})}
        given = {name: self.values[name] for name in apart.keys() & self.values.keys()}
        return whole | given | ({DERIVED: apart} if apart else {})


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass's field, made anew."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def read_recipe(argv: Sequence[str], argument_types: Sequence[type[Any]]) -> Recipe:
    """Read `--config FILE` and the other flags of `argv`. A flag overrides the recipe.

    Unknown keys, values of the wrong type and an unreadable recipe file become the recipe's `problems`, so that they
    are reported together with what later checks find.
    """
    problems = Problems()
    parser = _FlagParser(list(argument_types), allow_abbrev=False)  # type: ignore[arg-type]
    flags = dict(_split_flags(argv, problems))
    _drop_tokens("--", flags, problems)
    if "help" in flags:
        parser.print_help()
        raise SystemExit(0)

    path = None
    in_file: dict[str, list[str]] = {}
    is_read = True
    if "config" in flags:
        named = " ".join(flags.pop("config")) or "(no file named)"
        path, is_read = Path(named), False
        with problems.collecting():
            _check_path("--config", named)
            in_file = _read_file(path)
            is_read = True
        _drop_tokens(f"{path}: ", in_file, problems)
        _drop_trust(f"{path}: ", in_file, problems)
    if any(name in flags for name in DATA_SOURCE_FIELDS if name != "dataset_config_name"):
        in_file = {name: words for name, words in in_file.items() if name not in DATA_SOURCE_FIELDS}

    values: dict[str, Any] = {}
    sources = ((f"{path}: ", in_file), ("--", flags))
    for prefix, entries in sources:
        for name, words in entries.items():
            with problems.collecting():
                values[name] = _convert(parser, prefix, name, words)
    return Recipe(values, problems, path, is_read)


def resolved(*arguments: Any) -> dict[str, Any]:
    """Every field of the dataclass instances as plain YAML values, without secrets. `--config` reads it back."""
    merged: dict[str, Any] = {}
    for instance in arguments:
        to_dict = getattr(instance, "to_dict", None)
        merged.update(to_dict() if to_dict else dataclasses.asdict(instance))
    return {name: value for name, value in sorted(merged.items()) if name not in UNRECORDED_FIELDS}


def whole_of(written: Any) -> dict[str, Any]:
    """The whole configuration in a `recipe.yaml`, derived values included; empty where there is none.

    Args:
        written: content of the file.
    """
    if not isinstance(written, dict):
        return {}
    apart = written.get(DERIVED)
    return written | (apart if isinstance(apart, dict) else {})


def _check_path(flag: str, value: str) -> None:
    """Refuse a name that no file, folder or model can have.

    Raises:
        UserError: the name holds a NUL, or is longer than the file system allows.
    """
    shown = value.replace("\0", "\\0")
    if len(shown) > _SHOWN_LETTERS:
        shown = f"{shown[:_SHOWN_LETTERS]}... ({len(value):,} letters)"
    try:
        os.stat(value)
    except ValueError:
        raise UserError("name-holds-nul", flag, shown) from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UserError("name-too-long", flag, shown) from None


def _split_flags(argv: Sequence[str], problems: Problems) -> Iterable[tuple[str, list[str]]]:
    """Split `--name value value` and `--name=value` into name and words."""
    name: str | None = None
    words: list[str] = []
    for token in argv:
        if token in ("-h", "--help"):
            yield "help", []
        elif token.startswith("--"):
            if name is not None:
                yield name, words
            name, equals, value = token[2:].partition("=")
            name, words = name.replace("-", "_"), [value] if equals else []
        elif name is None:
            shown = "(a token)" if holds_token(token) else token
            problems.append(problem("bare-word", value=shown))
        else:
            words.append(token)
    if name is not None:
        yield name, words


def _drop_tokens(prefix: str, entries: dict[str, list[str]], problems: Problems) -> None:
    """Remove every entry that holds a token, so that no message and no file repeats it."""
    for name, words in list(entries.items()):
        if any(map(holds_token, (name, *words))) or (name == FIELD and words):
            del entries[name]
            shown = "(a token)" if holds_token(name) else name
            problems.append(problem("token-in-the-open", f"{prefix}{shown}", reason=WAY_OUT))


def _drop_trust(prefix: str, in_file: dict[str, list[str]], problems: Problems) -> None:
    """Remove trust that a file grants. A `false` grants nothing, and recipes of earlier runs hold one."""
    for name in TRUST_FIELDS:
        words = in_file.pop(name, ["false"])
        if [word.lower() for word in words] != ["false"]:
            problems.append(problem("trust-in-file", f"{prefix}{name}", name=name))


def _read_file(path: Path) -> dict[str, list[str]]:
    """The recipe's keys, with values as words, as the command line gives them: both are then read alike."""
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
    return {str(name): _to_words(value) for name, value in content.items() if value is not None and name != DERIVED}


def _to_words(value: Any) -> list[str]:
    if isinstance(value, list):
        return [word for item in value for word in _to_words(item)]
    return [json.dumps(value) if isinstance(value, Mapping) else str(value)]


def _convert(parser: HfArgumentParser, prefix: str, name: str, words: list[str]) -> Any:
    """The words as a value of the type of field `name`.

    Raises:
        UserError: there is no such field, the words do not fit its type, or the number is not finite.
    """
    known = {action.dest: action for action in parser._actions if action.dest != "help"}
    if name not in known:
        nearest = difflib.get_close_matches(name, [*known, *(["config"] if prefix == "--" else [])], n=1, cutoff=0.6)
        dashes = "--" if prefix == "--" else ""
        hint = f" Did you mean `{dashes}{nearest[0]}`?" if nearest else " `--help` lists all."
        kind = "flag" if prefix == "--" else "recipe key"
        raise UserError("unknown-name", f"{prefix}{name}", kind=kind, hint=hint)
    if not words and prefix != "--" and known[name].nargs == "+":
        return []
    # As one word: argparse reads -1e-4 as a flag.
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
    if name in PATH_FIELDS and isinstance(value, str):
        _check_path(f"{prefix}{name}", value)
    return value

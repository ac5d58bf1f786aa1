"""Write docs/errors.md, flags.md, map.md and the flags of `--help` from the code: `python -m docs.generate`.

README.md and docs/strategies.md get the tables of strategy files. docs/strategies.md also gets the method matrix and
the plans of typical runs. The headers of recipes get the memory that they need, and docs/published.md is made of some.
docs/models.md and docs/datasets.md are made of what tests found, and docs/quickstart.md has the measured installs.
docs/scale.md and docs/preferences.md have tables of result files.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from docs import (
    dataset_layouts,
    house_map,
    install_sizes,
    method_matrix,
    models_table,
    plan_tables,
    preference_tables,
    published,
    recipe_memory,
    scale_tables,
    strategy_files,
)
from indictune.commands import VERBS
from indictune.config.command_line import SCRIPTS
from indictune.errors import catalogue, in_capitals
from indictune.tasks.all_tasks import TASKS

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FLAGS_FILE = ROOT / "indictune/config/flags.json"
TRAINING = {f"scripts/{SCRIPTS[task.name]}": task.arguments for task in TASKS}
COMMANDS: dict[str, type[Any]] = {
    verb: arguments
    for verb in VERBS
    if (arguments := getattr(import_module(f"indictune.commands.{verb}"), f"{verb.capitalize()}Flags", None))
}
TRAINING_ARGUMENTS = "https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments"

ERRORS_INTRODUCTION = """\
# Errors

A problem in what you gave ends a run with exit code 2, before any model is loaded. Typing errors, numbers, files and
folders are checked first, within a second, and their problems come in one message. So do all others, seconds later.
Each message names the flag and the value, and ends with a code in brackets. Find the code below.

`FLAG` stands for the flag, file or recipe key at fault. `VALUE` stands for what it holds. Other words in capitals are
details that the message fills in.
"""
FLAGS_INTRODUCTION = """\
# Flags

A recipe is a YAML file whose keys are named like the flags. A flag overrides the recipe. `--flag value`,
`--flag=value` and `--flag-with-dashes value` are the same.
"""


class Flag(NamedTuple):
    """One row of a table: `default` and `kind` as a reader sees them."""

    name: str
    kind: str
    default: str
    help: str


def errors_page() -> str:
    """The page of all error codes, grouped as in `errors.toml`, sorted within a group."""
    text = (ROOT / "indictune/errors.toml").read_text(encoding="utf-8")
    parts = [ERRORS_INTRODUCTION]
    for title, codes in groups_of_codes(text):
        rows = [[f'<a id="{code}"></a>`{code}`', *described(catalogue()[code])] for code in codes]
        parts.append(f"## {title[:1].upper()}{title[1:]}\n\n{table(['code', 'message', 'what to do'], rows)}")
    return "\n".join(parts)


def groups_of_codes(text: str) -> list[tuple[str, list[str]]]:
    """Title of each banner of `errors.toml`, and the codes below it in alphabetical order; a banner may come twice."""
    groups: dict[str, list[str]] = {}
    title = "General"
    for line in text.splitlines():
        if banner := re.fullmatch(r"# -+ (.+)", line):
            title = banner[1].strip()
        elif code := re.fullmatch(r"\[([\w-]+)\]", line):
            groups.setdefault(title, []).append(code[1])
    return [(title, sorted(codes)) for title, codes in groups.items()]


def described(entry: Mapping[str, str]) -> list[str]:
    """Message and way out of a code, with placeholders in capitals."""
    return [escaped(in_capitals(entry[name])) for name in ("problem", "way_out")]


def escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    return text.replace("<", "&lt;").replace("*", "\\*")


def flags_page() -> str:
    """The page of all flags: of all scripts, of each one, of the commands, and the inherited ones by name."""
    scripts = {script: own_flags(classes) for script, classes in TRAINING.items()}
    first = next(iter(scripts.values()))
    shared = [flag for flag in first.values() if all(each.get(flag.name) == flag for each in scripts.values())]
    parts = [
        FLAGS_INTRODUCTION,
        section("All scripts", shared),
        *(section(f"`{script}`", without(flags, shared)) for script, flags in scripts.items()),
        *(section(f"`indictune {verb}`", own_flags([each]).values()) for verb, each in COMMANDS.items()),
        "`indictune prepare` also takes the recipe and the flags of the run that it prepares.\n",
        inherited_section(),
    ]
    return "\n".join(parts)


def own_flags(classes: Iterable[type[Any]]) -> dict[str, Flag]:
    """Name -> flag, of the fields that indictune declares in dataclasses or in their bases."""
    found = {}
    for each in classes:
        declared = {
            name
            for base in each.__mro__
            if base.__module__.startswith("indictune.")
            for name in inspect.get_annotations(base)
        }
        kinds = get_type_hints(each)
        for field in dataclasses.fields(each):
            if field.init and field.name in declared:
                text = escaped(str(field.metadata.get("help", "")))
                found[field.name] = Flag(field.name, kind_of(kinds[field.name]), default_of(field), text)
    return found


def kind_of(hint: Any) -> str:
    """A type as a reader types its values."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(kind_of(part) for part in parts if part is not type(None))
    if origin is list:
        return "words"
    names = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def default_of(field: dataclasses.Field[Any]) -> str:
    """The default value of a field as it would be typed; empty where there is none."""
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is None or value == "" or value == []:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{' '.join(map(str, value)) if isinstance(value, list) else value}`"


def without(flags: Mapping[str, Flag], shared: Sequence[Flag]) -> list[Flag]:
    """The flags that are not shared."""
    return [flag for flag in flags.values() if flag not in shared]


def section(title: str, flags: Iterable[Flag]) -> str:
    """A heading and the table of some flags, in the order of their names, each with a link to itself."""
    program = "" if title == "All scripts" else f"{re.sub(r'[^a-z]+', '-', title).strip('-')}-"
    rows = [
        [linked_flag(f"{program}{flag.name}", flag.name), flag.kind, flag.default, flag.help] for flag in sorted(flags)
    ]
    return f"## {title}\n\n{table(['flag', 'values', 'default', 'what it does'], rows)}"


def linked_flag(anchor: str, name: str) -> str:
    """The name of a flag, which is a link to where it stands. `#learning_rate` is that of all scripts."""
    return f'<a id="{anchor}"></a>[`--{name}`](#{anchor})'


def inherited_section() -> str:
    """The flags that transformers declares: their names, and a link to its documentation."""
    names = {script: inherited_names(classes[-1]) for script, classes in TRAINING.items()}
    own = {name for classes in TRAINING.values() for name in own_flags(classes)}
    everywhere = set.intersection(*names.values())
    parts = [
        f"## Inherited from transformers\n\nAll scripts also take these [arguments]({TRAINING_ARGUMENTS}).",
        "A run refuses a value that would break exact batches, loss or resume, and says why.\n",
        f"{listed(everywhere)}.\n",
    ]
    for script, more in names.items():
        if only := more - everywhere - own:
            parts.append(f"`{script}` also takes {listed(only)}.\n")
    return "\n".join(parts)


def inherited_names(arguments: type[Any]) -> set[str]:
    """Names of the flags that another library declares in training arguments."""
    ours = own_flags([arguments])
    return {field.name for field in dataclasses.fields(arguments) if field.init and field.name not in ours}


def listed(names: Iterable[str]) -> str:
    """Flags in alphabetical order."""
    return ", ".join(f"`--{name}`" for name in sorted(names))


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [titles, ["---"] * len(titles), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def flags_file() -> str:
    """The flags of all programs for `--help`, which imports no library: one a line, with the programs that take it."""
    programs: dict[str, tuple[type[Any], ...]] = {each.name: each.arguments for each in TASKS}
    programs |= {f"indictune {verb}": (arguments,) for verb, arguments in COMMANDS.items()}
    entries: dict[tuple[str, ...], list[str]] = {}
    for program, classes in programs.items():
        own = own_flags(classes)
        inherited = [flag for each in classes for flag in inherited_flags(each) if flag.name not in own]
        for flag in sorted([*own.values(), *inherited]):
            values, help = flag.kind.replace("`", ""), flag.help.replace("&lt;", "<").replace("\\*", "*")
            entry = (flag.name, values, flag.default.strip("`"), help, "own" if flag.name in own else "")
            entries.setdefault(entry, []).append(program)
    names = ("name", "values", "default", "help", "own")
    rows = [dict(zip(names, entry, strict=True)) | {"own": bool(entry[-1]), "of": of} for entry, of in entries.items()]
    rows.sort(key=lambda row: (row["name"], row["of"]))
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n"


def inherited_flags(arguments: type[Any]) -> Iterable[Flag]:
    """The flags that another library declares, each with the first sentence of its help."""
    kinds = get_type_hints(arguments)
    for field in dataclasses.fields(arguments):
        if field.init:
            text = re.split(r"(?<=\.)\s", " ".join(str(field.metadata.get("help", "")).split()))[0]
            yield Flag(field.name, kind_of(kinds[field.name]), default_of(field), text)


PAGES = {"errors.md": errors_page, "flags.md": flags_page, "map.md": house_map.map_page}
PAGES |= {"published.md": published.published_page, "models.md": models_table.models_page}
PAGES["datasets.md"] = dataset_layouts.datasets_page


def main() -> None:
    """Write the generated pages."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
    FLAGS_FILE.write_text(flags_file(), encoding="utf-8")
    house_map.DESIGN.write_text(house_map.with_files(), encoding="utf-8")
    for document in (strategy_files.README, strategy_files.PAGE):
        document.write_text(strategy_files.with_table(document), encoding="utf-8")
    method_matrix.PAGE.write_text(method_matrix.page_with_tables(), encoding="utf-8")
    text = plan_tables.PAGE.read_text(encoding="utf-8")
    plan_tables.PAGE.write_text(plan_tables.with_plans(text), encoding="utf-8")
    install_sizes.PAGE.write_text(install_sizes.page_with_sizes(), encoding="utf-8")
    scale_tables.PAGE.write_text(scale_tables.page_with_tables(), encoding="utf-8")
    preference_tables.PAGE.write_text(preference_tables.page_with_tables(), encoding="utf-8")
    recipe_memory.write_headers()


if __name__ == "__main__":
    main()

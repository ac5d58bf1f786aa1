"""docs/published.md: scores that others have published and that we have measured, by the headers of recipes."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

RECIPES = sorted((Path(__file__).resolve().parents[1] / "recipes/published").glob("*.yaml"))
FIELDS = ("Published", "Source", "Split", "Settings", "Measured")
INTRODUCTION = """\
# Published scores

Each recipe of `recipes/published` trains the model of a paper on its data and its split. Facts that we could not read
are said to be "not stated". The recipes install with the package: `indictune recipes` lists and copies them.

To add a measurement, run the command and write what it gave, and on what, behind `Measured:` in the recipe's header.
Then type `python -m docs.generate`.
"""


def header_of(path: Path) -> tuple[str, list[str], dict[str, str]]:
    """What a recipe is, its commands as lines, and its `FIELDS`, by its header."""
    lines = path.read_text(encoding="utf-8").partition("\ntask: ")[0].splitlines()
    paragraphs = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines).split("\n\n")
    title, commands = " ".join(paragraphs[0].split()), [line.removeprefix("  ") for line in paragraphs[1].splitlines()]
    entries = re.split(r"\n(?=[A-Z][a-z]+: )", paragraphs[2])
    fields = dict(" ".join(entry.split()).split(": ", 1) for entry in entries)
    assert tuple(fields) == FIELDS, f"{path}: its header has {', '.join(fields)}"
    return title, commands, fields


def published_page() -> str:
    """The table of all recipes, and for each one its commands and where its facts come from."""
    rows, sections = [], []
    for path in RECIPES:
        title, commands, fields = header_of(path)
        model = yaml.safe_load(path.read_text(encoding="utf-8"))["model_name_or_path"]
        rows.append(f"| [`{path.name}`](#{path.stem}) | `{model}` | {fields['Published']} | {fields['Measured']} |\n")
        facts = "".join(f"| {name.lower()} | {fields[name]} |\n" for name in FIELDS)
        code = "".join(f"{line}\n" for line in commands)
        body = f"{title}\n\n<!-- gpu -->\n```bash\n{code}```\n\n| | |\n|---|---|\n{facts}"
        sections.append(f"## {path.stem}\n\n{body}")
    table = "| recipe | model | published | measured by us, on what |\n|---|---|---|---|\n" + "".join(rows)
    return "\n".join([INTRODUCTION, table, *sections])

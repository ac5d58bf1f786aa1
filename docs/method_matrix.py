"""The method matrix: `python -m docs.method_matrix REPORT` takes what the tests found, and `docs.generate` shows it.

REPORT is the JUnit file of `tests/ranks/test_method_matrix.py`. Cells that it does not have stay as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

DOCS = Path(__file__).resolve().parent
FILE = DOCS / "method_matrix.json"
PAGE = DOCS / "strategies.md"
LIBRARIES = ("accelerate", "bitsandbytes", "deepspeed", "peft", "torch", "transformers", "trl")
PASSES, FAILS = "passes", "fails"
METHODS = ("full", "LoRA", "QLoRA")
BEGIN, END = "<!-- generated: method matrix -->\n", "<!-- end -->\n"
# Short reasons for codes by which a cell is refused, where the words of the code do not say it.
REASONS = {
    "no-tensor-plan": "cannot split it",
    "not-under-context": "its rows are short",
    "not-under-tensor": "matrices are split",
    "pairs-over-context": "its loss is no sum over tokens",
    "quantised-weights-sharded": "4-bit weights stay whole",
}

Outcomes = Mapping[str, str]  # of each column
Cells = Mapping[str, Mapping[str, Outcomes]]  # of each kind of model, and each file


def read() -> Cells:
    """The outcomes that are written down: "passes", or the code of a refusal."""
    cells: Cells = json.loads(FILE.read_text(encoding="utf-8"))["cells"]
    return cells


def taken(report: Path) -> Iterator[tuple[str, str, str, str]]:
    """Kind, file, column and outcome of each cell that a report has."""
    for case in ElementTree.parse(report).iter("testcase"):
        has_failed = any(case.find(name) is not None for name in ("failure", "error", "skipped"))
        for each in case.iter("property"):
            kind, file, column = each.attrib["name"].split("/")
            yield kind, file, column, FAILS if has_failed else each.attrib["value"]


def write(found: Iterable[tuple[str, str, str, str]]) -> None:
    """Replace the outcomes of some cells, and note the versions and the date."""
    cells = {kind: {file: dict(outcomes) for file, outcomes in files.items()} for kind, files in read().items()}
    for kind, file, column, outcome in found:
        cells.setdefault(kind, {}).setdefault(file, {})[column] = outcome
    cells = {kind: dict(sorted(files.items())) for kind, files in cells.items()}
    versions = {name: version(name) for name in LIBRARIES}
    content = {"date": date.today().isoformat(), "versions": versions, "cells": cells}
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def page_with_tables() -> str:
    """The page with its tables made anew."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + tables(read()) + END + rest.partition(END)[2]


def tables(cells: Cells) -> str:
    """One table of the methods of all kinds of models, and one of the features of each kind."""
    kinds, files = list(cells), list(next(iter(cells.values())))
    titles = ["file", *(f"{kind}, {method}" for kind in kinds for method in METHODS)]
    rows = [[f"`{file}`", *(_shown(cells[kind][file][each]) for kind in kinds for each in METHODS)] for file in files]
    parts = [_table(titles, rows)]
    for kind in kinds:
        columns = [name for name in cells[kind][files[0]] if name not in METHODS]
        rows = [[f"`{file}`", *(_shown(cells[kind][file][name]) for name in columns)] for file in files]
        parts.append(f"### Features: {kind}, `--method full`\n\n{_table(['file', *columns], rows)}")
    return "\n" + "\n".join(parts) + "\n"


def _shown(outcome: str) -> str:
    if outcome in (PASSES, FAILS):
        return "yes" if outcome == PASSES else outcome
    return f"[{REASONS.get(outcome, outcome.replace('-', ' '))}](errors.md#{outcome})"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    write(taken(Path(sys.argv[1])))

"""The tables of strategy files in README.md and docs/strategies.md, from docs/strategy_files.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
README, PAGE = DOCS.parent / "README.md", DOCS / "strategies.md"
TITLE = "| `--config_file` |"  # with which the table of each document begins


def files() -> dict[str, dict[str, Any]]:
    """Name of each file -> `splits`, `when`, `processes` and `more`, in the order of the tables."""
    return tomllib.loads((DOCS / "strategy_files.toml").read_text(encoding="utf-8"))


def with_table(document: Path) -> str:
    """A document with its table made anew."""
    before, rest = document.read_text(encoding="utf-8").split(TITLE)
    return before + table(is_short=document == README) + "\n" + rest.partition("\n\n")[2]


def table(is_short: bool) -> str:
    """The table of README.md, or the longer one."""
    titles = ["splits over the GPUs", "when", "`--num_processes`", *(() if is_short else ("more",))]
    lines = [f"{TITLE} {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    for name, about in files().items():
        cells = [f"`accelerate_configs/{name}.yaml`", about["splits"], about["when"], str(about["processes"])]
        lines.append(f"| {' | '.join(cells if is_short else [*cells, about['more']])} |")
    return "".join(f"{line}\n" for line in lines)

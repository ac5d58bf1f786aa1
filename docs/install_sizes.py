"""The table of installs in docs/quickstart.md, from the newest result file of benchmarks/install_size.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("quickstart.md")
RESULTS = PAGE.parents[1] / "benchmarks/results"
BEGIN, END = "<!-- generated: install sizes -->\n", "<!-- end -->\n"
USES = {
    "indictune": "label, serve and evaluate; train classifiers, taggers and encoders by DDP and FSDP2",
    "indictune[train]": "train LLaMA too, with QLoRA, 8-bit optimizers and DeepSpeed",
    "indictune[all]": "use every verb: exports, sweeps, demo pages, files of other machines, public benchmarks",
}


def newest() -> Path:
    """The result file of the last measurement."""
    return max(RESULTS.glob("*-install-size.json"))


def sizes_table() -> str:
    """The table, and the line that names its source."""
    found: dict[str, Any] = json.loads(newest().read_text(encoding="utf-8"))
    about, (first, *_) = found["environment"], found["installs"]
    lines = ["| `pip install` | to | on disk | packages |\n", "|---|---|---|---|\n"]
    for each in found["installs"]:
        size = f"{each['bytes'] / 1e6:,.0f} MB"
        lines.append(f"| `'{each['install']}'` | {USES[each['install']]} | {size} | {each['packages']} |\n")
    measured = f"Measured on {about['date']} with Python {about['python']} and torch {first['torch']}"
    return "\n" + "".join(lines) + f"\n{measured}. Source:\n`benchmarks/results/{newest().name}`.\n\n"


def page_with_sizes() -> str:
    """The page with its table made anew."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + sizes_table() + END + rest.partition(END)[2]

"""docs/datasets.md: which layouts of published datasets work, by the results that tests/hub_layouts compares."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "tests/hub_layouts/datasets.json"
INTRODUCTION = """\
# Published datasets

Each dataset below is read in the layout in which it is published: names of files, columns, splits, oddities. **Tests
read the layouts with a few invented rows, from a Hub on the same machine. The real rows were not read.** Facts that
nobody could look up are guesses: that IndicSentiment has no converted files, and the column `interactions`.

| column | meaning |
|---|---|
| online | the command reads and tokenises the rows of these splits |
| offline | so it does without a network (`HF_HUB_OFFLINE=1`), after it ran once; not for files on GitHub |
| pinned | with `--dataset_revision COMMIT`, or the commit in the URL, when there are newer rows |

Each command also needs `--output_dir` and, for good scores, a pretrained model. [Files and
labels](data.md#datasets-of-the-hub) explains the flags.
"""


def datasets_page() -> str:
    """The table of all sets, and what to type for each one."""
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows, commands = [], []
    for name, found in results.items():
        works = ["no" if "refused" in found["rows"] else ", ".join(map(_with_languages, found["rows"].items()))]
        works += ["yes" if found[each] else "no" for each in ("offline", "pinned")]
        rows.append(f"| {name} | {found['quirk']} | {' | '.join(works)} |\n")
        task, *flags = found["command"]
        lines = [f"indictune train {task}"]
        for word in flags:
            if word.startswith("--"):
                lines.append(f"    {word}")
            else:
                lines[-1] += f" {shlex.quote(word)}"
        code = " \\\n".join(lines)
        commands.append(f"{name}: {found['quirk']}.\n\n<!-- gpu -->\n```bash\n{code}\n```\n")
    table = "| dataset | layout | online | offline | pinned |\n|---|---|---|---|---|\n" + "".join(rows)
    return "\n".join([INTRODUCTION, table, "## What to type\n", *commands])


def _with_languages(split: tuple[str, Any]) -> str:
    name, rows = split
    return f"{name} ({len(rows)} languages)" if isinstance(rows, dict) and len(rows) > 1 else name

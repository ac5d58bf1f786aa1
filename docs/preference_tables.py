"""The tables of docs/preferences.md, of the newest result file of benchmarks/preferences.py: by `docs.generate`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS

PAGE = Path(__file__).with_name("preferences.md")
SECTION = re.compile(r"(<!-- real weights -->\n).*?(?=\n<!-- end -->)", re.S)


def page_with_tables() -> str:
    """The page with its tables made anew."""
    path = max(RESULTS.glob("*-preferences.json"))
    made = section_of(json.loads(path.read_text(encoding="utf-8")), path.name)
    return SECTION.sub(lambda found: found[1] + made, PAGE.read_text(encoding="utf-8"))


def section_of(found: dict[str, Any], name: str) -> str:
    """Scores of the held-out pairs, good answers, tokens, one answer of each kind, and where it was measured."""
    runs = list(found["runs"])
    return "\n\n".join(
        [
            _scores(found["runs"]),
            _good(found["good_answers"], runs),
            _tokens(found["tokens_of_an_answer"], runs),
            _answers(found["answers"], runs),
            _where(found, found["environment"], name),
        ]
    )


def _table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _scores(runs: dict[str, Any]) -> str:
    rows = []
    for name, run in runs.items():
        for kind, scores in run["scores"].items():
            accuracy = scores["reward_accuracy"]
            shown = f"{accuracy['value']:.2f} ({accuracy['low']:.2f} to {accuracy['high']:.2f})"
            others = [f"{scores[each]['value']:.2f}" for each in ("reward_margin", "chosen_reward", "loss")]
            rows.append([name, kind, shown, *others])
    return _table(["run", "held-out pairs", "accuracy of rewards", "margin", "chosen reward", "loss"], rows)


def _good(counts: dict[str, dict[str, int]], runs: list[str]) -> str:
    rows = [[kind, *(f"{each[who]} of {each['of']}" for who in ("before", *runs))] for kind, each in counts.items()]
    return _table(["good answers", "before", *(f"after {run}" for run in runs)], rows)


def _tokens(tokens: dict[str, float], runs: list[str]) -> str:
    names = ["chosen", "rejected", "before", *runs]
    titles = ["chosen", "rejected", "written before", *(f"after {run}" for run in runs)]
    return _table(["tokens of an answer", *titles], [["mean", *(f"{tokens[each]:.1f}" for each in names)]])


def _answers(answers: list[dict[str, str]], runs: list[str]) -> str:
    names = ["question", "before", runs[0]]
    rows = [[_cell(each[name]) for name in names] for each in answers]
    return _table(["question", "before", f"after {runs[0]}"], rows)


def _cell(text: str) -> str:
    """A text as code in a cell, cut to 70 characters."""
    line = text.replace("\n", " ⏎ ").replace("|", "\\|").replace("`", "'")
    return f"`{line if len(line) <= 70 else f'{line[:70]}...'}`"


def _where(found: dict[str, Any], about: dict[str, Any], name: str) -> str:
    versions = ", ".join(f"{each} {about['versions'][each]}" for each in ("torch", "transformers", "peft"))
    first, rows = next(iter(found["runs"].values())), found["rows"]
    seconds = f"{first['seconds']:.0f} s, {first['train']['runtime_s']:.0f} of them in its {rows['train']} pairs"
    where = f"Measured on {found['threads']} cores of {about['cpu']}, {versions}, on {about['date']}."
    held_out = f"{rows['validation']} pairs were held out."
    return f"The first run took {seconds}. {held_out}\n{where}\nSource: `benchmarks/results/{name}`."

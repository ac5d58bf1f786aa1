"""The tables of docs/strategies.md that `indictune plan` makes for typical runs: `docs.generate` puts them there."""

from __future__ import annotations

import re
import shlex
import tempfile
from pathlib import Path

from transformers import PreTrainedConfig

from benchmarks.axes_jobs import ENCODER, LARGE, SMALL
from indictune.commands.plan import ranking_of_flags
from indictune.commands.plan_text import header, line, other_methods, why_not
from indictune.config.command_line import read_flags
from indictune.console_text import table

# Name of the section -> the configuration that stands for the model of its recipe, which is on the Hub.
CONFIGS: dict[str, PreTrainedConfig] = {
    "an encoder": ENCODER,
    "LLaMA 8B": SMALL,
    "LLaMA 8B on one GPU": SMALL,
    "LLaMA 70B": LARGE,
}
PAGE = Path(__file__).with_name("strategies.md")
ROWS = 4  # of each table
SECTION = re.compile(
    r"(<!-- plan of (?P<name>.*?) -->\n<!-- gpu -->\n```bash\nindictune plan (?P<words>.*?)\n```\n\n)```.*?```\n", re.S
)


def with_plans(page: str) -> str:
    """A page with the answer below each command made anew."""
    return SECTION.sub(lambda found: found[1] + answer(found["name"], found["words"]), page)


def answer(name: str, words: str) -> str:
    """The first rows that a command prints, those of other methods, and why DDP does not fit."""
    with tempfile.TemporaryDirectory() as folder:
        CONFIGS[name].save_pretrained(folder)
        typed = shlex.split(words.replace("\\\n", " "))
        *_, ranking = ranking_of_flags(read_flags(["--config", *typed, "--model_name_or_path", folder]))
    fitting = [each for each in ranking.own if each.fits]
    lines = table(header(ranking), [line(ranking, each) for each in fitting[:ROWS]]).splitlines()
    lines += other_methods(ranking)
    if plain := next((each for each in ranking.own if each.strategy == "ddp" and not each.fits), None):
        lines.append(f"\nddp does not fit: {why_not(ranking, plain)}")
    return "```\n" + "".join(f"{each.rstrip()}\n" for each in "\n".join(lines).splitlines()) + "```\n"

"""Make texts of data and flags fit for a public page: as data in Markdown, and without folders of this machine."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from indictune.console_text import in_one_line, printable
from indictune.credentials import without_tokens

# Punctuation that means something to Markdown. Brackets and what HTML knows become entities.
_MARKUP = re.compile(r"[\\`*_{}#|~$]")
_BRACKETS = {"[": "&#91;", "]": "&#93;"}
# An absolute path, or one from the home or the parent folder; its last part is kept.
_FOLDERS = re.compile(r"(?<![\w:/.~])(?:~|\.{1,2}|[A-Za-z]:)?[\\/](?:[^\s\\/:'\"()]+[\\/])+")


class Verbatim(str):
    """Markdown of our own, which `escaped` leaves as it is."""


def escaped(value: object) -> str:
    """A value as text in Markdown: one line that cannot be a link, HTML, a heading or a table's border."""
    if isinstance(value, Verbatim):
        return value
    text = html.escape(without_tokens(in_one_line(str(value))), quote=False)
    text = _MARKUP.sub(lambda found: f"\\{found[0]}", text)
    return re.sub(r"[\[\]]", lambda found: _BRACKETS[found[0]], text)


def harmless(value: object) -> str:
    """A value as text without tokens and control characters, which HTML still has to escape."""
    return without_tokens(printable(str(value)))


def fenced(text: str, language: str = "") -> Verbatim:
    """A text as a block of code. No backticks in it end the block."""
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Verbatim(f"{fence}{language}\n{without_tokens(printable(text))}\n{fence}")


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> Verbatim:
    """A table of Markdown with escaped cells: the first column to the left, the others to the right."""
    lines = [header, [":---", *["---:"] * (len(header) - 1)], *body]
    cells = [[escaped(cell) if line is not lines[1] else cell for cell in line] for line in lines]
    return Verbatim("\n".join(f"| {' | '.join(line)} |" for line in cells))


def templates_in(folder: Path, **settings: Any) -> Environment:
    """The templates of pages in a folder, with more settings of Jinja. A name that has no value is an error."""
    return Environment(
        loader=FileSystemLoader(folder), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, **settings
    )


def without_folders(text: str, paths: Iterable[str] = ()) -> str:
    """A text whose paths have no folder: `/home/me/tweets.csv` becomes `tweets.csv`.

    `paths` are files and folders of this machine that it may name, as the user gave them.
    """
    folders = {folder for path in paths for each in (path, os.path.abspath(path)) if (folder := os.path.dirname(each))}
    for folder in sorted(folders - {"/"}, key=len, reverse=True):
        text = text.replace(f"{folder}{os.sep}", "")
    return _FOLDERS.sub("", text)

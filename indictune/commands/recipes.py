"""`indictune recipes`: list and copy the recipes, strategy files and scripts that come with the package."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from indictune.config.command_line import with_flag
from indictune.config.shared_arguments import Checked, flag
from indictune.errors import UserError
from indictune.versions import everything

_ALL = "all"


@dataclass
class RecipesFlags(Checked):
    """Which files are copied, and where to."""

    names: list[str] = flag([], "Files to copy, or `all`. May be given as bare first words. Default: list all files.")
    to: str = flag(".", "Folder that gets them.")


def run_recipes(flags: Mapping[str, list[str]]) -> int:
    """List the files, or copy those named."""
    names, to = with_flag(flags, "names").get("names", []), Path(" ".join(flags.get("to", ["."])))
    files = everything()
    if not names:
        folder, width = "", shutil.get_terminal_size().columns
        for name, path in files.items():
            if not name.startswith(f"{folder}/"):
                folder = name.partition("/")[0]
                print(f"{folder}/")
            line = f"  {name.removeprefix(f'{folder}/'):40} {_first_line(path)}"
            print(textwrap.fill(line.rstrip(), width, subsequent_indent=" " * 43))
        print("Use a recipe by `indictune train NAME`, a strategy file by `--strategy NAME`.")
        return 0
    chosen = dict.fromkeys(file for name in names for file in (files if name == _ALL else _needed(name, files)))
    held = [str(to / name) for name in chosen if (to / name).exists()]
    if held:
        raise UserError("file-exists", "--to", to, held=", ".join(held))
    for name in chosen:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files[name], to / name)
        print(to / name)
    return 0


def _needed(name: str, files: dict[str, Path]) -> list[str]:
    """The file of that name, and the DeepSpeed file that it names."""
    matches = [each for each in files if f"/{each}".endswith(f"/{name}") or f"/{each}".endswith(f"/{name}.yaml")]
    if len(matches) != 1:
        known = ", ".join(matches or files)
        raise UserError("shipped-file-unknown", value=name, known=known)
    text = files[matches[0]].read_text(encoding="utf-8")
    return matches + re.findall(r"^\s*deepspeed_config_file: (\S+)$", text, re.MULTILINE)


def _first_line(path: Path) -> str:
    line = path.read_text(encoding="utf-8").removeprefix("#!/bin/bash\n").partition("\n")[0]
    return line.lstrip('#" ').partition(". ")[0].rstrip('.":') if line[:1] in '#"' else ""

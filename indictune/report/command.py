"""`indictune report`: write the report of a run again, or compare runs on one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from indictune.cache_folders import check_outside_checkpoints
from indictune.config.command_arguments import ReportArguments
from indictune.config.read_words import with_flag
from indictune.config.recipe import read_recipe
from indictune.console_text import printable
from indictune.report.report_page import write_report


def report_command(argv: Sequence[str]) -> int:
    """`indictune report RUN [RUN ...] [--output_file F] [--texts false]`; returns the exit code.

    Raises:
        UserError: all problems of the flags and the folders.
    """
    recipe = read_recipe(with_flag(argv, "--runs"), (ReportArguments,))
    with recipe.problems.collecting():
        args = recipe.build(ReportArguments)
    recipe.problems.raise_any()
    folders = list(dict.fromkeys(map(Path, args.runs)))
    for folder in folders:
        check_outside_checkpoints(folder, "indictune report")
    file = None if args.output_file is None else Path(args.output_file)
    print(printable(f"Written to {write_report(folders, file, args.texts)}"))
    return 0

"""`indictune report`: write the report of a run again, or compare runs on one page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from indictune.config.command_line import with_flag
from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import Checked, flag
from indictune.console_text import printable
from indictune.errors import Problem, problem
from indictune.files import check_outside_checkpoints
from indictune.report.report_page import write_report


@dataclass
class ReportFlags(Checked):
    """Which runs are reported on, and where."""

    needed = ("runs", "indictune report FOLDER [FOLDER ...]")

    runs: list[str] = flag(
        [], "Folders of runs or evaluations. Several are compared. May be given as bare first words."
    )
    output_file: str | None = flag(
        None, "HTML file to write. Default: report.html in the folder of one run, comparison.html for several."
    )
    texts: bool = flag(True, "Show texts of the rows, such as the worst mistakes. Use false for a report to share.")

    def check(self) -> Iterator[Problem]:
        """Refuse a file of another kind."""
        yield from super().check()
        if self.output_file is not None and Path(self.output_file).suffix.lower() not in (".html", ".htm"):
            yield problem("report-not-html", "--output_file", self.output_file)


def run_report(flags: Mapping[str, list[str]]) -> int:
    """Write the report of one run, or compare several."""
    args = read_arguments(with_flag(flags, "runs"), ReportFlags, "runs")
    folders = list(dict.fromkeys(map(Path, args.runs)))
    for folder in folders:
        check_outside_checkpoints(folder, "indictune report")
    file = None if args.output_file is None else Path(args.output_file)
    print(printable(f"Written to {write_report(folders, file, args.texts)}"))
    return 0

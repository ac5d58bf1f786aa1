"""Write the report of a run, or of several, and its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from indictune.evaluation.mistakes import MISTAKES
from indictune.files import HEALTH, SAMPLES, write_whole
from indictune.report.page import comparison_of, page_of
from indictune.report.run_facts import RunFacts, read_run

REPORT = "report.html"
FIGURES = "figures"
_TEXTS = (MISTAKES, HEALTH, SAMPLES)  # whose texts of rows a report shows


def write_report(folders: Sequence[Path], file: Path | None = None, texts: bool = True) -> Path:
    """Write a page and its pictures; returns the page's path.

    Args:
        folders: of runs or evaluations. Several are compared.
        file: to write. Default: `report.html` in the folder of a single run, `comparison.html` here for several.
        texts: show texts of the rows.

    Raises:
        UserError: a folder holds no run.
        OSError: the disk does not take it.
    """
    runs = _named(folders)
    page = page_of(runs[0], texts) if len(runs) == 1 else comparison_of(runs)
    if file is None:
        file = folders[0] / REPORT if len(runs) == 1 else Path("comparison.html")
    pictures = file.parent / (FIGURES if file.name == REPORT else f"{file.stem}_{FIGURES}")
    for each in page.pictures:
        write_whole(pictures / f"{each.name}.png", each.png)
    write_whole(file, page.html)
    return file


def write_without_texts(run: Path, folder: Path) -> bool:
    """Write the report of a run for others, without texts of its rows, which may be of people who never agreed.

    Args:
        run: folder of the run. Nothing is written if it has no report or no texts.
        folder: that is published, which may be the run's own.

    Returns:
        Whether a report was written.
    """
    if not ((run / REPORT).is_file() and any((run / name).is_file() for name in _TEXTS)):
        return False
    write_report([run], folder / REPORT, texts=False)
    return True


def _named(folders: Sequence[Path]) -> list[RunFacts]:
    """The runs, by the shortest ends of their paths that tell them apart."""
    paths = [folder.absolute() for folder in folders]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]

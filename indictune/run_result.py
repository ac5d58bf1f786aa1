"""A finished run in Python: its numbers, its pictures, and how a notebook shows it."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

PREDICTIONS = "predictions.jsonl"


@dataclass(frozen=True)
class Result:
    """A finished run. A notebook shows its verdicts, its curves and a table of its scores.

    Attributes:
        folder: the model in the Hub's layout, its recipe and logs.
        metrics: the content of `metrics.json`: `strategy`, `world_size`, `train`, `eval`, `test`, ...
        curves: one dictionary for each logged step: `step`, `epoch`, `loss`, `grad_norm`, `learning_rate`, ...
    """

    folder: Path
    metrics: dict[str, Any]
    curves: list[dict[str, float]]

    @classmethod
    def of(cls, folder: str | Path) -> Result:
        """The result in the folder of a finished run."""
        folder = Path(folder)
        log = (folder / "train_log.jsonl").read_text(encoding="utf-8").splitlines()
        metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        return cls(folder, metrics, [json.loads(line) for line in log])

    @property
    def predictions(self) -> pd.DataFrame:
        """The labelled rows that were held out: `split`, `label`, `predicted`, `scores`, `language`, ..."""
        import pandas as pd

        return pd.read_json(self.folder / PREDICTIONS, lines=True, dtype=False)

    def report(self) -> Path:
        """Write the report again; returns the path of the page."""
        from indictune.report.report_page import write_report

        return write_report([self.folder])

    def plot(self) -> Figure:
        """The training loss of each logged step, and the validation loss."""
        from matplotlib import pyplot

        from indictune.report.pictures import curve_figure, drawing
        from indictune.report.reported_run import read_run

        pyplot.switch_backend(pyplot.get_backend())  # else a notebook does not show the first figure
        with drawing():
            return curve_figure([read_run(self.folder)])[0]

    def _repr_html_(self) -> str:
        from markupsafe import Markup

        from indictune.report.pictures import draw_curves, drawing
        from indictune.report.report_page import rendered, verdicts_of
        from indictune.report.reported_run import read_run, score_tables

        run = read_run(self.folder)
        with drawing():
            pictures = [(each, Markup(b64encode(each.png).decode())) for each in draw_curves([run])]
        tables = score_tables(run)
        return rendered(
            "result.html.jinja", run=run, verdicts=list(verdicts_of(run)), pictures=pictures, tables=tables
        )

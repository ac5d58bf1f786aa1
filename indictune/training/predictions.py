"""Write `predictions.jsonl`: what the trained model makes of each test row (`--do_predict`)."""

from __future__ import annotations

import json
from collections.abc import Callable

from datasets import Dataset

from indictune.files import write_whole
from indictune.run import Run
from indictune.tasks.text_objectives import TextObjective
from indictune.training.evaluation import measured_rows
from indictune.training.exact_trainer import ExactTrainer

FILE = "predictions.jsonl"


def write_predictions(trainer: ExactTrainer, run: Run, dataset: Dataset, location: Callable[[int], str]) -> None:
    """One JSON object a row: `row` (`file:line`), `label`, `predicted` and `scores`. All ranks must call it.

    Args:
        trainer: of a classifier, with the model that was saved.
        run: its folder gets the file.
        dataset: the tokenised test rows.
        location: the `file:line` of a row, given by its number.

    Raises:
        Stopped: a rank was asked to stop.
    """
    objective = trainer.objective
    assert isinstance(objective, TextObjective)
    objective.keeps_scores = True
    results = measured_rows(trainer, dataset)
    objective.keeps_scores = False
    if run.rank == 0:
        rows = enumerate(objective.predictions(dataset, results))
        lines = (json.dumps({"row": location(number)} | row, ensure_ascii=False) for number, row in rows)
        write_whole(run.output_dir / FILE, "".join(f"{line}\n" for line in lines))

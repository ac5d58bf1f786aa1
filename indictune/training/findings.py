"""What a run finds in its rows: `predictions.jsonl`, `evaluation.json`, `mistakes.json`, facts for `metrics.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
from datasets import Dataset

from indictune.data.languages import scripts_of
from indictune.evaluation.breakdown import EVALUATION, Breakdown, as_json
from indictune.evaluation.intervals import RESAMPLES
from indictune.evaluation.mistakes import MISTAKES, Mistakes
from indictune.files import PREDICTIONS, LineFile, json_line, write_json
from indictune.hub.public_text import without_folders
from indictune.run import Run
from indictune.tasks.objective import Objective
from indictune.tasks.protocol import Origins, Tokens

_ROWS_AT_ONCE = 10_000


class Findings:
    """The files of a run's or a command's evaluations, which rank 0 writes.

    Args:
        run: its folder gets them.

    Attributes:
        breakdowns: of the evaluations so far, by split.
        results: of the latest evaluation.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.breakdowns: dict[str, Breakdown] = {}
        self.results: Sequence[np.ndarray] = ()
        self._lines: LineFile | None = None
        self._mistakes = Mistakes()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Collect the evaluations of the block, and put the files into place at its end."""
        if self.run.rank != 0:
            yield
            return
        with LineFile(self.run.output_dir / PREDICTIONS) as self._lines:
            yield
        write_json(self.run.output_dir / EVALUATION, as_json(self.breakdowns))
        write_json(self.run.output_dir / MISTAKES, self._mistakes.by_split())

    def add(
        self,
        objective: Objective,
        split: str,
        dataset: Dataset,
        results: Sequence[np.ndarray],
        origins: Origins | None,
        written: Breakdown | None = None,
    ) -> None:
        """Add an evaluation.

        Args:
            objective: that has scored the rows and kept the scores.
            split: `eval` or `test`.
            dataset: the tokenised rows.
            results: of them, in their order.
            origins: of the rows, if the task knows them.
            written: scores of answers that the model wrote to some of the rows.
        """
        if self._lines is None:
            return
        self.results = results
        scripts = None if origins is None else scripts_of(origins.texts, dataset["language"][:])
        self.breakdowns[split] = replace(objective.breakdown(dataset, results, scripts, RESAMPLES), written=written)
        for row, text in _rows(objective, split, dataset, results, origins, scripts):
            self._lines.append(json_line(row))
            self._mistakes.add(row, text)


def _rows(
    objective: Objective,
    split: str,
    dataset: Dataset,
    results: Sequence[np.ndarray],
    origins: Origins | None,
    scripts: Sequence[str] | None,
) -> Iterator[tuple[dict[str, Any], str]]:
    """Each row of `predictions.jsonl`, and its text, which is empty if the task does not know it.

    A row has `split`, `number`, `row`, `id`, `language`, `script`, `length`, and what the task gives.
    """
    texts = iter(() if origins is None else origins.texts)
    for start in range(0, len(dataset), _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, len(dataset))
        some = dataset.select(range(start, stop))
        languages, lengths = some["language"][:], some["length"][:]
        for at, predicted in enumerate(objective.predictions(some, [each[start:stop] for each in results])):
            about: dict[str, Any] = {"split": split, "number": start + at}
            text = next(texts, "")
            if origins is not None and scripts is not None:
                about |= {"row": origins.location(start + at), "id": digest(text), "script": scripts[start + at]}
            yield about | {"language": languages[at], "length": lengths[at]} | predicted, text


def digest(text: str) -> str:
    """The id of a text, 16 hexadecimal digits, equal in all runs."""
    return blake2b(text.encode(), digest_size=8).hexdigest()


def data_facts(tokens: Tokens, config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """What `metrics.json` says of the training rows: their number, languages and labels, and the notes on all rows.

    It names no folder.

    Args:
        tokens: of the run.
        config: of the model, with the label names of a classifier.
        given: what the user chose, which names files.
    """
    train = tokens.train
    values = [value for name, value in given.items() if name.endswith(("_file", "_files", "dataset_name"))]
    paths = [str(each) for value in values for each in (value if isinstance(value, list) else [value])]
    counts: dict[str, Any] = {"rows": _row_count(train)}
    if "language" in train.column_names:
        counts["languages"] = dict(sorted(Counter(train["language"][:]).items()))
    if str(getattr(train.features.get("labels"), "dtype", "")).startswith("int"):  # one label a row
        numbered = Counter(train["labels"][:])
        counts["labels"] = {config.id2label[number]: numbered[number] for number in sorted(numbered)}
    return counts | {"notes": [without_folders(note, paths) for note in tokens.notes]}


def _row_count(train: Dataset) -> int:
    """A packed row of chats holds several. A long text in several windows is one."""
    return sum(map(len, train["rows"][:])) if "rows" in train.column_names else len(train)

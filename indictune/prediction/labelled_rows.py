"""Turn logits into rows with a label, scores and the language, and write these as csv, tsv, jsonl or parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedConfig

from indictune.config.shared_arguments import ClassifierArguments
from indictune.data.columns import joined_list
from indictune.data.labels import MULTI_LABEL, REGRESSION
from indictune.data.text.cleaning import clean_batch
from indictune.errors import UserError
from indictune.prediction.served_classifier import Classifier, load_served_classifier

SCORE = "score_"  # begins the name of a column with the scores of a label
_DIGITS = 6  # of a score; float32 has seven
Write = Callable[[BinaryIO, Iterable[pa.RecordBatch]], None]


def label_texts(folder: str | Path, texts: Sequence[str], **flags: Any) -> list[dict[str, Any]]:
    """Label texts with a finished run's classifier.

    Args:
        folder: of the run.
        texts: as they are written; they are cleaned and cut as in training.
        flags: those of `indictune predict`, such as `max_length` or `bf16`.

    Returns:
        For each text `text`, `label`, `scores` (label -> probability) and `language`. The label is a list if the model
        gives several, a number without scores for a regression, and None for a text without words.

    Raises:
        UserError: the folder holds no finished classifier.
    """
    classifier = load_served_classifier(ClassifierArguments(model=str(folder), **flags))
    return list(as_records(label(classifier, text_batch(texts))))


def text_batch(texts: Sequence[str | None]) -> pa.RecordBatch:
    """Texts as the columns `text` and `language`, of nulls."""
    return pa.record_batch({"text": pa.array(texts, pa.string()), "language": pa.nulls(len(texts), pa.string())})


def label(classifier: Classifier, batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch of texts with their labels.

    Args:
        classifier: of the texts.
        batch: columns `text` and `language`, nullable strings, and any others.

    Returns:
        The columns of the batch, `label`, `score_<label>` (float32) for each label, and `language` without nulls. In a
        row without words, label and scores are null.
    """
    rows = batch.num_rows
    nothing = {"label": pa.nulls(rows, pa.string()), "line": pa.nulls(rows, pa.int64())}
    cleaned = clean_batch(pa.record_batch({"text": batch["text"], "language": batch["language"], **nothing}))
    logits = classifier.logits(cleaned["text"].to_pylist())
    columns = {name: batch[name] for name in batch.schema.names if name != "language"}
    columns |= labels_and_scores(classifier.served.config, classifier.served.labels, logits)
    return pa.record_batch({**columns, "language": cleaned["language"]})


def labels_and_scores(config: PreTrainedConfig, labels: Sequence[str], logits: np.ndarray) -> dict[str, pa.Array]:
    """The columns `label` and `score_<label>` of logits [rows, labels]; those of NaN are null."""
    absent = np.isnan(logits).all(1)
    if config.problem_type == REGRESSION:
        return {"label": pa.array(logits[:, 0], mask=absent)}
    if config.problem_type == MULTI_LABEL:
        scores = 1 / (1 + np.exp(-logits))
        given = scores >= getattr(config, "threshold", 0.5)
        chosen = [[name for name, is_given in zip(labels, row, strict=True) if is_given] for row in given]
        of_rows = pa.array([None if is_absent else row for row, is_absent in zip(chosen, absent, strict=True)])
        return {"label": of_rows.cast(pa.list_(pa.string())), **_scores(labels, scores, absent)}
    powers = np.exp(logits - logits.max(1, keepdims=True))
    names = np.array(labels, dtype=object)[logits.argmax(1)]
    return {
        "label": pa.array(names, pa.string(), mask=absent),
        **_scores(labels, powers / powers.sum(1, keepdims=True), absent),
    }


def _scores(labels: Sequence[str], scores: np.ndarray, absent: np.ndarray) -> dict[str, pa.Array]:
    return {f"{SCORE}{name}": pa.array(scores[:, index], mask=absent) for index, name in enumerate(labels)}


def as_records(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows of a labelled batch as objects, with all scores in one."""
    for row in batch.to_pylist():
        scores = {name.removeprefix(SCORE): row.pop(name) for name in list(row) if name.startswith(SCORE)}
        language = row.pop("language")
        if row["label"] is None:
            scores = dict.fromkeys(scores)
        yield row | ({"scores": scores} if scores else {}) | {"language": language}


def writer_of(path: str) -> Write:
    """The function that writes the kind of file that the extension says.

    Raises:
        UserError: `file-kind-unknown`.
    """
    extension = Path(path).suffix.lower()
    if extension not in _WRITERS:
        raise UserError("file-kind-unknown", "--output_file", path, expected=", ".join(_WRITERS))
    return _WRITERS[extension]


def as_json_lines(batch: pa.RecordBatch) -> str:
    """A line of JSON for each row, with the scores of its labels in one object."""
    return "".join(f"{json.dumps(rounded(row), ensure_ascii=False)}\n" for row in as_records(batch))


def rounded(value: Any) -> Any:
    """A row with as many digits of its scores as they have."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return round(value, _DIGITS) if isinstance(value, float) else value


def _write_json_lines(file: BinaryIO, batches: Iterable[pa.RecordBatch]) -> None:
    for batch in batches:
        file.write(as_json_lines(batch).encode())


def _write_parquet(file: BinaryIO, batches: Iterable[pa.RecordBatch]) -> None:
    writer = None
    for batch in batches:
        writer = writer or pq.ParquetWriter(file, batch.schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()


def _delimited(delimiter: str) -> Write:
    def write(file: BinaryIO, batches: Iterable[pa.RecordBatch]) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        lines = csv.writer(text, delimiter=delimiter, lineterminator="\n")
        for number, batch in enumerate(batches):
            if number == 0:
                lines.writerow(batch.schema.names)
            lines.writerows(zip(*(map(_cell, batch[name].to_pylist()) for name in batch.schema.names), strict=True))
        text.flush()
        text.detach()

    return write


def _cell(value: Any) -> Any:
    """A value as training reads it from a csv file: several labels as `a|b`, none of them as `|`."""
    return round(value, _DIGITS) if isinstance(value, float) else joined_list(value)


_WRITERS: dict[str, Write] = {
    ".csv": _delimited(","),
    ".tsv": _delimited("\t"),
    ".jsonl": _write_json_lines,
    ".parquet": _write_parquet,
}

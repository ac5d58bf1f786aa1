"""Read texts in windows, turn logits into rows with labels, and write these as csv, tsv, jsonl or parquet."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from itertools import compress, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from transformers import PreTrainedConfig

from indictune.config.shared_arguments import ClassifierArguments, TextFileArguments
from indictune.data.bad_rows import BadRows
from indictune.data.columns import KEPT, Wanted, layout_of
from indictune.data.labels import MULTI_LABEL, REGRESSION
from indictune.data.read.conll import holds_tweets
from indictune.data.read.open_files import decoded, lines_of_old_macs, opened
from indictune.data.read.read_files import checked_extension, read_batches
from indictune.data.text.cleaning import clean_batch
from indictune.errors import Problems, UserError, attributed_to
from indictune.files import kind_of_file
from indictune.prediction.served_classifier import (
    Classifier,
    Reading,
    ServedModel,
    check_pairs,
    served_in_memory,
    served_model,
)

SCORE = "score_"  # begins the name of a column with the scores of a label


Text = str | tuple[str | None, str | None] | None  # a text, or two for a model of pairs
Given = str | Path | tuple[Any, Any]  # the folder of a finished run, or a model and its tokenizer in memory
_STREAMED_ROWS = 256


def opened_model(model: Given, asked: ClassifierArguments) -> tuple[ServedModel, Any]:
    """A classifier before its weights are read, and the model if it is in memory; a `UserError` if it is none."""
    if isinstance(model, tuple):
        return served_in_memory(*model, asked), model[0]
    problems, asked.model = Problems(), str(model)
    served = served_model(asked, problems, may_tag=True)
    problems.raise_any()
    assert served is not None
    return served, None


def label_texts(model: Given, texts: Sequence[Text], **flags: Any) -> list[dict[str, Any]]:
    """Label texts, or pairs of two, with a classifier. `flags` are those of `indictune predict`.

    Returns:
        For each text `text`, of pairs `text_pair`, `label`, `scores` (label -> probability) and `language`. The label
        is a list if the model gives several or tags words, a number without scores for a regression, and None for a
        text without words.
    """
    return list(label_stream(model, iter(check_texts(texts)), max(1, len(texts)), **flags))


def label_stream(
    model: Given, texts: Iterator[Text], at_once: int = _STREAMED_ROWS, **flags: Any
) -> Iterator[dict[str, Any]]:
    """The same row by row, for texts that are not known beforehand. The model is checked at once."""
    asked = ClassifierArguments(**flags)
    served, loaded = opened_model(model, asked)
    first = list(islice(texts, at_once))
    if first:
        check_pairs(served.reading, _are_pairs(check_texts(first)), "texts")
    classifier = Classifier(served, asked.max_tokens_per_device, loaded) if first else None
    return _labelled(classifier, first, texts, at_once)


def _labelled(
    classifier: Classifier | None, chunk: list[Text], texts: Iterator[Text], at_once: int
) -> Iterator[dict[str, Any]]:
    while classifier is not None and chunk:
        yield from as_records(label(classifier, text_batch(check_texts(chunk))))
        chunk = list(islice(texts, at_once))


def label_table(model: Given, file: str, **flags: Any) -> pa.Table:
    """The labels of the rows of a file, in the same order: `label`, `language`, and `score_<label>` of each label."""
    asked = TextFileArguments(input_file=file, **flags)
    served, loaded = opened_model(model, asked)
    source, bad = text_file(asked, served.reading), BadRows(file)
    rows = sum(batch.num_rows for batch in source.windows(bad))
    bad.finish(rows)
    classifier = Classifier(served, asked.max_tokens_per_device, loaded)
    labelled = pa.Table.from_batches(label(classifier, batch) for batch in source.windows(BadRows(file)))
    return labelled.drop_columns([name for name in ("text", "text_pair") if name in labelled.schema.names])


def _are_pairs(texts: Sequence[Text]) -> bool:
    return any(isinstance(each, tuple | list) for each in texts)


def check_texts(texts: Sequence[Text]) -> Sequence[Text]:
    """The texts, or pairs of texts; a `UserError` for anything else."""
    parts = [each if isinstance(each, tuple | list) else (each,) for each in texts]
    are_texts = all(isinstance(part, str | None) for each in parts for part in each)
    if isinstance(texts, Mapping) or not are_texts or {*map(len, parts)} - {1 + _are_pairs(texts)}:
        reason = "expected a text, a list of texts, or a list of pairs of texts"
        raise UserError("wrong-type", "texts", type(texts).__name__, reason=reason)
    return texts


def text_batch(texts: Sequence[Text]) -> pa.RecordBatch:
    """Texts as the columns `text`, of pairs `text_pair`, and `language`, of nulls."""
    are_pairs = isinstance(next(iter(texts), None), tuple | list)
    columns: Sequence[Any] = list(zip(*texts, strict=True)) if are_pairs else [texts]
    named = {name: pa.array(each, pa.string()) for name, each in zip(("text", "text_pair"), columns, strict=False)}
    return pa.record_batch({**named, "language": pa.nulls(len(texts), pa.string())})


def label(classifier: Classifier, batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch of texts with their labels: besides its columns, `label`, and `score_<label>` (float32) for each label.

    Its columns are `text`, for a model of pairs `text_pair`, and `language`, nullable strings, and any others. The
    result's `language` has no nulls. In a row without words, label and scores are null. Of a tagger, the label is the
    list of the tags of the words as they are written, which spaces separate, without scores.
    """
    cleaned = cleaned_texts(batch)
    columns = {name: batch[name] for name in batch.schema.names if name != "language"}
    if classifier.served.tags_words:
        columns["label"] = pa.array(classifier.tags(batch["text"].to_pylist()), pa.list_(pa.string()))
    else:
        logits = classifier.logits(cleaned["text"].to_pylist())
        columns |= labels_and_scores(classifier.served.config, classifier.served.labels, logits)
    return pa.record_batch({**columns, "language": cleaned["language"]})


def cleaned_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The texts of a batch as `clean_batch` writes them, without labels and lines."""
    nothing = {"label": pa.nulls(batch.num_rows, pa.string()), "line": pa.nulls(batch.num_rows, pa.int64())}
    names = [name for name in ("text", "text_pair", "language") if name in batch.schema.names]
    return clean_batch(pa.record_batch({**{name: batch[name] for name in names}, **nothing}))


def labels_and_scores(config: PreTrainedConfig, labels: Sequence[str], logits: np.ndarray) -> dict[str, pa.Array]:
    """The columns `label` and `score_<label>` of logits [rows, labels]; those of NaN are null."""
    absent = np.isnan(logits).all(1)
    if config.problem_type == REGRESSION:
        return {"label": pa.array(logits[:, 0], mask=absent)}
    if config.problem_type == MULTI_LABEL:
        scores = 1 / (1 + np.exp(-logits))
        given = zip(scores >= getattr(config, "threshold", 0.5), absent, strict=True)
        chosen = [None if is_absent else list(compress(labels, row)) for row, is_absent in given]
        of_rows = pa.array(chosen, pa.list_(pa.string()))
    else:
        powers = np.exp(logits - logits.max(1, keepdims=True))
        scores = powers / powers.sum(1, keepdims=True)
        of_rows = pa.array(np.array(labels, dtype=object)[logits.argmax(1)], pa.string(), mask=absent)
    by_label = {f"{SCORE}{name}": pa.array(scores[:, at], mask=absent) for at, name in enumerate(labels)}
    return {"label": of_rows, **by_label}


def as_records(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The rows of a labelled batch as objects, with all scores in one."""
    for row in batch.to_pylist():
        scores = {name.removeprefix(SCORE): row.pop(name) for name in list(row) if name.startswith(SCORE)}
        language = row.pop("language")
        if row["label"] is None:
            scores = dict.fromkeys(scores)
        yield row | ({"scores": scores} if scores else {}) | {"language": language}


# Enough to sort by length, and few enough that a killed command repeats seconds of work.
WINDOW_ROWS = 4_096
LINES = ".txt"
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class TextFile:
    """A file of texts, its columns, and the flag that names it."""

    path: str
    wanted: Wanted
    flag: str = "--input_file"

    def windows(self, bad: BadRows) -> Iterator[pa.RecordBatch]:
        """All texts, as columns `text`, `text_pair`, `language` and the kept ones; `bad` gets the unreadable rows."""
        return map(named_window, self.numbered_windows(bad))

    def numbered_windows(self, bad: BadRows) -> Iterator[pa.RecordBatch]:
        """The same with a column `line`, as of `read_batches`."""
        with attributed_to(self.flag):
            if kind_of_file(self.path) == LINES and checked_extension(self.path) and not holds_tweets(self.path):
                line = 1
                with opened(self.path) as file:
                    lines = line_windows(cast(BufferedReader, file), self.path, "text_pair" in self.wanted.required)
                    for window in equal_windows(lines):
                        yield window.append_column("line", pa.array(range(line, line + window.num_rows)))
                        line += window.num_rows
            else:
                yield from equal_windows(read_batches(self.path, self.wanted, bad))


def text_file(asked: TextFileArguments, reading: Reading) -> TextFile:
    """The file of `--input_file`, with the columns that the flags and the training name."""
    if asked.text_pair_column is not None:
        check_pairs(reading, True, "--text_pair_column")
    columns = {"text": asked.text_column or reading.text_column}
    if reading.text_pair_column is not None:
        columns["text_pair"] = asked.text_pair_column or reading.text_pair_column
    columns |= {f"{KEPT}{name}": name for name in asked.keep_columns}
    # A column that only the training had may be missing here.
    language = {"language": asked.language_column or reading.language_column or "language"}
    is_asked = asked.language_column is not None
    wanted = Wanted(columns | (language if is_asked else {}), {} if is_asked else language, **layout_of(asked))
    return TextFile(str(asked.input_file), wanted)


def named_window(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns by the names that the output gives them, without the lines."""
    names = [name for name in batch.schema.names if name != "line"]
    return batch.select(names).rename_columns([_name_of(role) for role in names])


def _name_of(role: str) -> str:
    """The name of a column in the output, where a kept one may not hide a text, a label or a score."""
    name = role.removeprefix(KEPT)
    if role == name:
        return role
    return f"input_{name}" if name in ("text", "text_pair") else name_beside_labels(name)


def name_beside_labels(name: str) -> str:
    """The name that a column of the input gets, so that it hides no label and no score."""
    return f"input_{name}" if name in ("label", "language") or name.startswith(SCORE) else name


def equal_windows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, `WINDOW_ROWS` at a time, however the reader cuts them."""
    rest = None
    for batch in batches:
        whole = batch if rest is None else pa.concat_batches([rest, batch])
        starts = range(0, whole.num_rows - WINDOW_ROWS + 1, WINDOW_ROWS)
        yield from (whole.slice(start, WINDOW_ROWS) for start in starts)
        rest = whole.slice(len(starts) * WINDOW_ROWS)
    if rest is not None and rest.num_rows:
        yield rest


def line_windows(stream: BufferedReader, name: str, are_pairs: bool = False) -> Iterator[pa.RecordBatch]:
    """The lines of a stream as texts, or as pairs with a tab between the texts.

    A window has what could be read at once, so that a slow writer gets answers.
    """
    rest, number = list[bytes](), 1  # the pieces of a line that has not ended, which may be long
    while chunk := stream.read1(_CHUNK_BYTES):
        *lines, last = chunk.split(b"\n")
        if lines:
            lines[0], rest = b"".join([*rest, lines[0]]), []
        rest.append(last)
        for start in range(0, len(lines), WINDOW_ROWS):
            some = lines[start : start + WINDOW_ROWS]
            yield _texts(some, number, name, are_pairs)
            number += len(some)
    if any(rest):
        last_lines = lines_of_old_macs(b"".join(rest)) if number == 1 else [b"".join(rest)]
        yield _texts(last_lines, number, name, are_pairs)


def _texts(lines: list[bytes], first: int, name: str, are_pairs: bool) -> pa.RecordBatch:
    texts: list[Text] = []
    for number, line in enumerate(lines, first):
        text, byte = decoded(line.rstrip(b"\r\n"), number)
        if byte:
            raise UserError("not-utf8", value=f"{name}:{number}", byte=byte)
        parts = text.split("\t") if text.strip() else ["", ""]
        if are_pairs and len(parts) != 2:
            raise UserError("line-is-no-pair", value=f"{name}:{number}", tabs=len(parts) - 1)
        texts.append((parts[0], parts[1]) if are_pairs else text)
    return text_batch(texts)


def standard_input(are_pairs: bool) -> Iterator[pa.RecordBatch]:
    """The lines of standard input."""
    return line_windows(cast(BufferedReader, sys.stdin.buffer), "standard input", are_pairs)

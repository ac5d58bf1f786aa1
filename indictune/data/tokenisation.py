"""Turn cleaned texts into token ids."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from indictune.data.arrow_tables import map_table, smaller_batches, stored_batches, write_table
from indictune.data.cache import build_once, file_digest
from indictune.data.columns import shortened
from indictune.data.labels import label_counts
from indictune.data.load_rows import Splits
from indictune.data.progress_log import with_progress
from indictune.data.rows import MAX_LISTED_ROWS, StoredRows
from indictune.data.targets import REGRESSION, target_type, targets
from indictune.errors import Problems, problem

logger = logging.getLogger(__name__)

_BATCH_ROWS = 4_000  # while it is tokenised, a row takes some kilobytes
_SAMPLE_ROWS = 100
Encode = Callable[[list[str]], list[list[int]]]


def schema_of(labels: Sequence[str], problem_type: str | None) -> pa.Schema:
    """The columns of tokenised rows."""
    return pa.schema(
        [
            ("input_ids", pa.list_(pa.int32())),
            ("labels", target_type(labels, problem_type)),
            ("length", pa.int32()),
            ("language", pa.string()),
        ]
    )


def tokenise_splits(
    splits: Splits,
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str],
    max_length: int,
    problem_type: str | None = None,
) -> dict[str, Dataset]:
    """Tokenise rows, or take them from the cache. A warning says how many may be cut.

    Args:
        splits: each label of their rows is one of `labels`.
        tokenizer: of the model.
        labels: names, in the order of the class ids.
        max_length: texts are cut to this many tokens, special ones included.
        problem_type: says which targets the labels become, as in the model's configuration.

    Returns:
        By split: columns `input_ids`, `labels` (see `targets`), `length` (tokens) and `language`, in the rows' order.

    Raises:
        UserError: the tokenizer makes no token of a text.
    """

    given = splits.rows

    def make(folder: Path) -> None:
        for name, rows in given.items():
            stored = stored_batches(splits.folder / f"{name}.arrow")
            batches = tokenised(stored, tokenizer, labels, max_length, problem_type)
            shown = with_progress(batches, f"tokenising the {name} rows", len(rows))
            write_table(folder / f"{name}.arrow", schema_of(labels, problem_type), shown)

    listed = ", ".join(f"{len(rows):,} {name}" for name, rows in given.items())
    logger.info("rows: %s; labels: %s", listed, _counted(next(iter(given.values())), labels, problem_type))
    parts = [splits.folder.name, tokenizer_parts(tokenizer), list(labels), max_length, problem_type]
    folder = build_once("tokens", parts, "The token ids", make)
    _reset(tokenizer)
    datasets = {name: mapped_dataset(folder, name) for name in given}
    check_lengths(given, datasets, max_length)
    return datasets


def _counted(rows: StoredRows, labels: Sequence[str], problem_type: str | None) -> str:
    """Each label with its number of rows."""
    if problem_type == REGRESSION:
        return ", ".join(labels)
    counts = label_counts(rows, problem_type)
    more = [f"and {len(labels) - MAX_LISTED_ROWS:,} more"] if len(labels) > MAX_LISTED_ROWS else []
    return ", ".join([*(f"{shortened(each)} {counts.get(each, 0):,}" for each in labels[:MAX_LISTED_ROWS]), *more])


def check_lengths(given: Mapping[str, StoredRows], datasets: Mapping[str, Dataset], max_length: int) -> None:
    """Refuse rows without tokens. Warn of rows as long as the limit: those that are cut, and the few that just fit."""
    problems = Problems()
    for name, rows in given.items():
        lengths = datasets[name].data["length"]
        empty = pc.index(lengths, 0).as_py()
        if empty >= 0:
            problems.append(problem("text-without-tokens", rows.origin, rows.location(empty)))
        reach = pc.sum(pc.greater_equal(lengths, max_length)).as_py()
        if reach:
            logger.warning(
                f"{rows.origin} {rows.source}: {reach:,} of {len(rows):,} rows ({reach / len(rows):.1%}) reach "
                f"--max_length {max_length}; longer ones lose their ends."
            )
    problems.raise_any()


def mapped_dataset(folder: Path, name: str) -> Dataset:
    """The dataset in `<name>.arrow` of a folder from `build_once`."""
    # Without a fingerprint, Dataset would read the whole table to compute one.
    return Dataset(map_table(folder / f"{name}.arrow"), fingerprint=f"{folder.name}-{name}")


def tokenizer_parts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """All that the ids of a text depend on: the class of the tokenizer, settings, and a digest of its content."""
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    settings = f"{tokenizer.truncation_side} {tokenizer.split_special_tokens} {tokenizer.special_tokens_map}"
    if tokenizer.is_fast:
        _reset(tokenizer)
        return [kind, settings, hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()]
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return [kind, settings, *(file_digest(str(path)) for path in sorted(Path(folder).rglob("*")))]


def tokenised(
    batches: Iterable[pa.RecordBatch],
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str],
    max_length: int,
    problem_type: str | None = None,
) -> Iterator[pa.RecordBatch]:
    """The columns of `schema_of` for batches of rows, in their order; arguments as of `tokenise_splits`."""
    schema = schema_of(labels, problem_type)
    encode: Encode | None = None
    for batch in smaller_batches(batches, _BATCH_ROWS):
        texts = batch["text"].to_pylist()
        encode = encode or encoder(tokenizer, max_length, texts[:_SAMPLE_ROWS])
        input_ids = encode(texts)
        lengths = np.fromiter(map(len, input_ids), np.int32, len(input_ids))
        ends = np.cumsum(lengths, dtype=np.int32)
        # Several times as fast as pa.array(input_ids).
        tokens = np.fromiter(itertools.chain.from_iterable(input_ids), np.int32, int(lengths.sum()))
        columns = [
            pa.ListArray.from_arrays(np.concatenate([np.zeros(1, np.int32), ends]), tokens),
            targets(batch["label"].to_pylist(), labels, problem_type),
            pa.array(lengths),
            batch["language"],
        ]
        yield pa.record_batch(columns, schema=schema)


def encoder(tokenizer: PreTrainedTokenizerBase, max_length: int, sample: list[str]) -> Encode:
    """The fastest way to the ids that the tokenizer's own call gives.

    The Rust backend makes no masks and offsets. Some classes add to what their backend does (CodeLlama's in
    transformers 5.23), which the sample shows.
    """

    def by_call(texts: list[str]) -> list[list[int]]:
        return cast(list[list[int]], tokenizer(texts, truncation=True, max_length=max_length)["input_ids"])

    def by_backend(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch_fast(texts)]

    expected = by_call(sample)  # which sets the backend's truncation
    return by_backend if tokenizer.is_fast and by_backend(sample) == expected else by_call


def _reset(tokenizer: PreTrainedTokenizerBase) -> None:
    """Forget how to cut and pad. The last settings are saved with the model, and must not depend on the cache."""
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()

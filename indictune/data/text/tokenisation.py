"""Turn cleaned texts into token ids; a text over the limit is cut or read in windows."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from indictune.config.shared_arguments import LongText
from indictune.data.bad_rows import LINES_PER_FILE, Batches
from indictune.data.cache import (
    StoredRows,
    are_pairs,
    build_once,
    map_table,
    separated,
    smaller_batches,
    stored_batches,
    write_on,
)
from indictune.data.labels import REGRESSION, label_counts, target_type, targets, with_counts
from indictune.data.row_choice import Splits
from indictune.data.text.cleaning import is_on_cluster, spread
from indictune.errors import Problems, UserError, problem
from indictune.files import content_digest
from indictune.upstream import digest_of_split

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Ids = list[int]


class Encoded(NamedTuple):
    """The tokens of some texts: those of each window of each text; of pairs also the token types, if they are read."""

    windows: list[list[Ids]]
    types: list[Ids] | None = None


Encode = Callable[[list[str]], tuple[list[Ids], list[Ids] | None]]
Windows = Callable[[list[str]], Encoded]

SHARE_OF_OVERLAP = 4  # neighbouring windows share a quarter of their tokens

_MEASURED_TEXTS = 20_000
_AT_ONCE = 1_000
FLAG = "--long_text"
TYPES = "token_type_ids"


def have_types(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether texts, all of one kind, have token types that the model reads: see `read_pairs`."""
    return are_pairs(texts) and TYPES in tokenizer.model_input_names


def around(part: Ids, whole: Ids) -> tuple[Ids, Ids] | None:
    """What comes before and after a part of some tokens; None if it is no part of them."""
    for start in range(len(whole) - len(part) + 1):
        if whole[start : start + len(part)] == part:
            return whole[:start], whole[start + len(part) :]
    return None


def special_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[Ids, Ids]:
    """The tokens that the tokenizer adds before and after a text; raises `UserError` if it puts some inside."""
    text = "a b"
    bare = cast(Ids, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    full = cast(Ids, tokenizer(text, verbose=False)["input_ids"])
    if (found := around(bare, full)) is None:
        raise UserError("long-text-impossible", FLAG, tokenizer=tokenizer.name_or_path)
    return found


def usual_length(
    texts: pa.ChunkedArray, tokenizer: PreTrainedTokenizerBase, positions: int | None, percentile: float = 99.0
) -> int:
    """A percentile of the tokens of texts or of lists of words, special ones included, within the model's positions.

    Of many texts, up to 20,000 are measured, evenly spaced. `positions` is None for no limit. Logs what is found.
    """
    settings = {"return_attention_mask": False, "is_split_into_words": pa.types.is_list(texts.type), "verbose": False}
    step = -(-len(texts) // _MEASURED_TEXTS)
    measured = texts.take(pa.array(range(0, len(texts), step)))
    lengths: list[int] = []
    for start in range(0, len(measured), _AT_ONCE):
        some = measured.slice(start, _AT_ONCE).to_pylist()
        given = (words_with_spaces(tokenizer, some),) if settings["is_split_into_words"] else separated(some)
        lengths += map(len, tokenizer(*given, **settings)["input_ids"])
    usual = max(3, int(np.percentile(lengths, percentile, method="higher")))
    found = usual if positions is None else min(usual, positions)
    reason = f"the {percentile:g}th percentile of the training rows" if found == usual else "all the model's positions"
    logger.info("--max_length auto: %d tokens, %s", found, reason)
    return found


def words_with_spaces(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The words of each row as the tokenizer has to get them: their tokens are those of the words with spaces between.

    Byte-level BPE (LLaMA 3, Qwen, ModernBERT) and Gemma's read given words as one word, as if no spaces were between.
    """
    ids = tokenizer(["a", "b"], is_split_into_words=True, add_special_tokens=False)["input_ids"]
    before = "" if " " in str(tokenizer.decode(ids)).strip() else " "
    return [[*row[:1], *(before + word for word in row[1:])] for row in rows]


_BATCH_ROWS = 4_000  # while it is tokenised, a row takes some kilobytes
_SAMPLE_ROWS = 100
_FATES = {
    "truncate": "longer ones lose their ends",
    "head_tail": "longer ones lose their middles",
    "window": "longer ones are read in windows",
}


def schema_of(
    labels: Sequence[str], problem_type: str | None, in_windows: bool = False, has_types: bool = False
) -> pa.Schema:
    """The columns of tokenised rows; `seq_lengths` has the tokens of each window of a row."""
    columns = {"input_ids": pa.list_(pa.int32()), "labels": target_type(labels, problem_type)}
    columns |= {"length": pa.int32(), "language": pa.string()}
    columns |= {"seq_lengths": pa.list_(pa.int32())} if in_windows else {}
    return pa.schema(columns | ({TYPES: pa.list_(pa.int8())} if has_types else {}))


def tokenise_splits(
    splits: Splits[StoredRows],
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str],
    max_length: int,
    problem_type: str | None = None,
    long_text: LongText = "truncate",
) -> dict[str, Dataset]:
    """Tokenise rows, or take them from the cache. A warning says how many may be cut.

    `labels` are the names in the order of the class ids. Texts are cut to `max_length` tokens, special ones included.

    Returns:
        By split: columns `input_ids`, `labels` (see `targets`), `length` (tokens) and `language`, in the rows' order;
        in windows, `input_ids` has those of all windows of a row, and `seq_lengths` the tokens of each. Pairs have
        `token_type_ids` too, if the model reads them.

    Raises `UserError` if the tokenizer makes no token of a text.
    """
    given, settings = splits.rows, (labels, max_length, problem_type, long_text)

    def make(folder: Path) -> None:
        for name, rows in given.items():

            def batches_from(done: int, stored: Path = splits.folder / f"{name}.arrow") -> Batches:
                rest = itertools.islice(smaller_batches(stored_batches(stored), _BATCH_ROWS), done, None)
                if is_on_cluster():
                    return spread(partial(_tokenised_batch, tokenizer, *settings), rest)
                return tokenised(rest, tokenizer, *settings)

            schema = schema_of(labels, problem_type, long_text == "window", have_types(rows.texts, tokenizer))
            write_on(folder / f"{name}.arrow", schema, batches_from, f"tokenising the {name} rows", len(rows))

    first, listed = next(iter(given.values())), ", ".join(f"{len(rows):,} {name}" for name, rows in given.items())
    shown = ", ".join(labels) if problem_type == REGRESSION else with_counts(labels, label_counts(first, problem_type))
    logger.info("rows: %s; labels: %s", listed, shown)
    parts = [splits.folder.name, tokenizer_parts(tokenizer), list(labels), max_length, problem_type, long_text]
    folder = build_once("tokens", parts, "The token ids", make)
    reset_backend(tokenizer)
    datasets = {name: mapped_dataset(folder, name) for name in given}
    check_lengths(given, datasets, max_length, long_text)
    return datasets


def with_soft_labels(dataset: Dataset, rows: StoredRows, column: str, labels: int) -> Dataset:
    """The dataset of tokenised `rows` with a teacher's logits as `labels`, float32 [rows, labels].

    They are a column of the rows' parquet files, less the smallest of each row: the distribution is the same, and none
    of them is `IGNORED_LABEL`. Raises `UserError` if a row has no list of a number for each label.
    """
    from datasets import Dataset as Tokenised  # slow to import

    logits = list[np.ndarray]()
    for file in rows.files or [rows.source]:
        found: np.ndarray = np.empty(0)
        with suppress(pa.ArrowException, OSError, ValueError, TypeError, KeyError):
            found = np.array(pq.read_table(file, columns=[column])[column].to_pylist(), np.float32)
        if found.shape[1:] != (labels,) or not np.isfinite(found).all():
            raise UserError("soft-labels-unreadable", "--soft_label_column", column, file=file, labels=labels)
        logits.append(found)
    lines, starts = rows.table["line"].to_numpy(), np.cumsum([0, *map(len, logits)])
    of_rows = np.concatenate(logits)[starts[np.maximum(lines // LINES_PER_FILE - 1, 0)] + lines % LINES_PER_FILE - 1]
    soft = pa.FixedSizeListArray.from_arrays((of_rows - of_rows.min(1, keepdims=True)).reshape(-1), labels)
    table = dataset.data.table.drop(["labels"]).append_column("labels", soft)
    return Tokenised(table, fingerprint=f"{digest_of_split(dataset)}-{column}")


def check_lengths(
    given: Mapping[str, StoredRows], datasets: Mapping[str, Dataset], max_length: int, long_text: LongText = "truncate"
) -> None:
    """Refuse rows without tokens. Warn of rows as long as the limit: those that are cut, and the few that just fit."""
    problems = Problems()
    for name, rows in given.items():
        lengths = datasets[name].data["length"]
        empty = pc.index(lengths, 0).as_py()
        if empty >= 0:
            problems.append(problem("text-without-tokens", rows.origin, rows.location(empty)))
        reach = pc.sum(pc.greater_equal(lengths, max_length)).as_py()
        if reach:
            logger.log(
                logging.INFO if long_text == "window" else logging.WARNING,
                f"{rows.origin} {rows.source}: {reach:,} of {len(rows):,} rows ({reach / len(rows):.1%}) reach "
                f"--max_length {max_length}; {_FATES[long_text]}.",
            )
    problems.raise_any()


def mapped_dataset(folder: Path, name: str) -> Dataset:
    """The dataset in `<name>.arrow` of a folder from `build_once`."""
    from datasets import Dataset  # slow to import

    # Without a fingerprint, Dataset would read the whole table to compute one.
    return Dataset(map_table(folder / f"{name}.arrow"), fingerprint=f"{folder.name}-{name}")


def tokenizer_parts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """All that the ids of a text depend on: the class of the tokenizer, settings, and a digest of its content."""
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    settings = f"{tokenizer.truncation_side} {tokenizer.split_special_tokens} {tokenizer.special_tokens_map}"
    settings += f" {tokenizer.model_input_names}"
    if tokenizer.is_fast:
        reset_backend(tokenizer)
        return [kind, settings, hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()]
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return [kind, settings, *(content_digest(str(path)) for path in sorted(Path(folder).rglob("*")))]


def tokenised(
    batches: Iterable[pa.RecordBatch],
    tokenizer: PreTrainedTokenizerBase,
    labels: Sequence[str],
    max_length: int,
    problem_type: str | None = None,
    long_text: LongText = "truncate",
) -> Iterator[pa.RecordBatch]:
    """The columns of `schema_of` for batches of rows, in their order; arguments as of `tokenise_splits`.

    The next batch is encoded by Rust while Python makes columns of one.
    """
    read: Windows | None = None
    waiting = deque[tuple[pa.RecordBatch, Future[Encoded]]]()
    columns = partial(_columns, labels, problem_type, long_text == "window")
    with ThreadPoolExecutor(1) as thread:
        for batch in batches:
            texts = batch["text"].to_pylist()
            read = read or windows_of(tokenizer, max_length, texts[:_SAMPLE_ROWS], long_text)
            waiting.append((batch, thread.submit(read, texts)))
            if len(waiting) > 1:
                yield columns(*waiting.popleft())
        while waiting:
            yield columns(*waiting.popleft())


def _columns(
    labels: Sequence[str], problem_type: str | None, in_windows: bool, batch: pa.RecordBatch, encoded: Future[Encoded]
) -> pa.RecordBatch:
    rows, types = encoded.result()
    lengths = np.fromiter((sum(map(len, row)) for row in rows), np.int32, len(rows))
    ends = np.cumsum(lengths, dtype=np.int32)
    ids = itertools.chain.from_iterable(itertools.chain.from_iterable(rows))
    tokens = np.fromiter(ids, np.int32, int(lengths.sum()))  # several times as fast as pa.array of lists
    columns = [
        pa.ListArray.from_arrays(np.concatenate([np.zeros(1, np.int32), ends]), tokens),
        targets(batch["label"].to_pylist(), labels, problem_type),
        pa.array(lengths),
        batch["language"],
    ]
    if in_windows:
        columns.append(pa.array([list(map(len, row)) for row in rows], pa.list_(pa.int32())))
    if types is not None:
        flat = np.fromiter(itertools.chain.from_iterable(types), np.int8, len(tokens))
        columns.append(pa.ListArray.from_arrays(columns[0].offsets, flat))
    return pa.record_batch(columns, schema=schema_of(labels, problem_type, in_windows, types is not None))


def _tokenised_batch(tokenizer: PreTrainedTokenizerBase, *settings: Any) -> pa.RecordBatch:
    *of_rows, batch = settings
    return next(tokenised([batch], tokenizer, *of_rows))


def windows_of(
    tokenizer: PreTrainedTokenizerBase, max_length: int, sample: list[str], long_text: LongText = "truncate"
) -> Windows:
    """How texts become windows of at most `max_length` tokens, special ones included.

    All have one, but for long texts in `window`: each window begins three quarters after the previous one, and the
    last one ends with the text. `head_tail` keeps the first and the last tokens of a text. Raises `UserError` if
    `max_length` has no room, or as `special_ids`.
    """
    if are_pairs(sample) and max_length < (specials := tokenizer.num_special_tokens_to_add(pair=True)) + 2:
        raise UserError("no-room-for-text", "--max_length", max_length, specials=specials)
    encode = encoder(tokenizer, max_length if long_text == "truncate" else None, sample)
    if long_text == "truncate":

        def cut(texts: list[str]) -> Encoded:
            ids, types = encode(texts)
            return Encoded([[each] for each in ids], types)

        return cut
    before, after = special_ids(tokenizer)
    room = max_length - len(before) - len(after)
    if room < 1:
        raise UserError("no-room-for-text", "--max_length", max_length, specials=len(before) + len(after))
    head, step = (room + 1) // 2, room - room // SHARE_OF_OVERLAP

    def windows(texts: list[str]) -> Encoded:
        found = []
        for ids in encode(texts)[0]:
            content = ids[len(before) : len(ids) - len(after)]
            last, parts = len(content) - room, [content]
            if last > 0 and long_text == "head_tail":
                parts = [content[:head] + content[last + head :]]
            elif last > 0:
                parts = [content[start : start + room] for start in (*range(0, last, step), last)]
            found.append([[*before, *part, *after] for part in parts])
        return Encoded(found)

    return windows


def encoder(tokenizer: PreTrainedTokenizerBase, max_length: int | None, sample: list[str]) -> Encode:
    """The fastest way to the ids and types that the tokenizer's own call gives, uncut without a `max_length`.

    The Rust backend makes no masks and offsets. Some classes add to what their backend does (CodeLlama's in
    transformers 5.23), which the sample shows.
    """

    has_types = have_types(sample, tokenizer)

    def by_call(texts: list[str]) -> tuple[list[Ids], list[Ids] | None]:
        settings: dict[str, Any] = {"max_length": max_length, "return_token_type_ids": has_types, "verbose": False}
        # `True` cuts the longer text of a pair first.
        encoded = tokenizer(*separated(texts), truncation=max_length is not None, **settings)
        return cast(list[Ids], encoded["input_ids"]), encoded[TYPES] if has_types else None

    def by_backend(texts: list[str]) -> tuple[list[Ids], list[Ids] | None]:
        given = list(zip(*separated(texts), strict=True)) if are_pairs(texts) else texts
        found = tokenizer.backend_tokenizer.encode_batch_fast(given)
        return [each.ids for each in found], [each.type_ids for each in found] if has_types else None

    expected = by_call(sample)  # which sets the backend's truncation
    return by_backend if tokenizer.is_fast and by_backend(sample) == expected else by_call


def reset_backend(tokenizer: PreTrainedTokenizerBase) -> None:
    """Forget how to cut and pad. The last settings are saved with the model, and must not depend on the cache."""
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()

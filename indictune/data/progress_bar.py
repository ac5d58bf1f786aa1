"""How far a long preparation is."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator

import pyarrow as pa
from tqdm import tqdm

from indictune.progress import HERE

logger = logging.getLogger(__name__)

_PATIENCE_S = 2.0


def shown(batches: Iterable[pa.RecordBatch], what: str, total: int | None = None) -> Iterator[pa.RecordBatch]:
    """Pass record batches on and tell how many rows went by, unless that takes no more than two seconds.

    A terminal gets a bar; otherwise there is one line after the first two seconds, and one at the end.

    Args:
        batches: of rows.
        what: is done to them, such as "tokenising the train rows".
        total: rows, where that is known.
    """
    plain = not sys.stderr.isatty()
    started, rows, told = time.monotonic(), 0, False
    with tqdm(desc=what, total=total, unit=" rows", delay=_PATIENCE_S, disable=plain) as bar:
        for batch in batches:
            yield batch
            HERE.moved()
            rows += batch.num_rows
            bar.update(batch.num_rows)
            if plain and not told and time.monotonic() - started > _PATIENCE_S:
                told = True
                logger.info("%s: %s", what, f"{rows:,}" + (f" of {total:,} rows" if total else " rows so far"))
    seconds = time.monotonic() - started
    if seconds > _PATIENCE_S:
        logger.info("%s: %s rows in %.1f s (%s rows a second)", what, f"{rows:,}", seconds, f"{rows / seconds:,.0f}")

"""Show the progress of a long preparation."""

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


def with_progress(batches: Iterable[pa.RecordBatch], what: str, total: int | None = None) -> Iterator[pa.RecordBatch]:
    """Pass record batches on, and show how many rows went by if it takes more than two seconds.

    A terminal shows a bar. Elsewhere there is a line after two seconds and one at the end.

    Args:
        batches: of rows.
        what: the work, such as "tokenising the train rows".
        total: number of rows, if known.
    """
    plain = not sys.stderr.isatty()
    started, rows, reported = time.monotonic(), 0, False
    with tqdm(desc=what, total=total, unit=" rows", delay=_PATIENCE_S, disable=plain) as bar:
        for batch in batches:
            yield batch
            HERE.moved()
            rows += batch.num_rows
            bar.update(batch.num_rows)
            if plain and not reported and time.monotonic() - started > _PATIENCE_S:
                reported = True
                logger.info("%s: %s", what, f"{rows:,}" + (f" of {total:,} rows" if total else " rows so far"))
    seconds = time.monotonic() - started
    if seconds > _PATIENCE_S:
        logger.info("%s: %s rows in %.1f s (%s rows a second)", what, f"{rows:,}", seconds, f"{rows / seconds:,.0f}")

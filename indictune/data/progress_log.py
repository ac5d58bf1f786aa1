"""Log the progress of a long preparation."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator

import pyarrow as pa

from indictune.progress import OWN_PROGRESS

logger = logging.getLogger(__name__)

_EVERY_S = 5.0


def with_progress(batches: Iterable[pa.RecordBatch], what: str, total: int | None = None) -> Iterator[pa.RecordBatch]:
    """Pass record batches on, and log every five seconds how many rows went by, of `total` if known."""
    logged, rows, of_total = time.monotonic(), 0, f" of {total:,}" if total else ""
    for batch in batches:
        yield batch
        OWN_PROGRESS.moved()
        rows += batch.num_rows
        if time.monotonic() - logged > _EVERY_S:
            logger.info("%s: %s%s rows", what, f"{rows:,}", of_total)
            logged = time.monotonic()

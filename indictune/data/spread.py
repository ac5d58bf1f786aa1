"""Make something of each batch of rows, in order, by tasks of a Ray cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pyarrow as pa

from indictune.data.bad_rows import Batches

_WAITING = 3  # batches for each core, so that none waits for this process
_on_cluster = False


@contextmanager
def on_cluster() -> Iterator[None]:
    """A block in which rows are cleaned and tokenised by the Ray cluster that this process has joined."""
    global _on_cluster
    _on_cluster = True
    try:
        yield
    finally:
        _on_cluster = False


def is_on_cluster() -> bool:
    """Whether this process is in such a block."""
    return _on_cluster


def spread(make: Callable[[pa.RecordBatch], pa.RecordBatch], batches: Batches) -> Batches:
    """`make` of each batch, in order. Ray makes those of a lost node again."""
    import ray

    task, made = ray.remote(max_retries=-1)(make_one), deque[ray.ObjectRef[pa.RecordBatch]]()
    function = ray.put(make)
    most = _WAITING * max(1, int(ray.cluster_resources().get("CPU", 1)))  # type: ignore[no-untyped-call]
    for batch in batches:
        made.append(task.remote(function, batch))
        if len(made) >= most:
            yield ray.get(made.popleft())
    while made:
        yield ray.get(made.popleft())


def make_one(make: Callable[[pa.RecordBatch], pa.RecordBatch], batch: pa.RecordBatch) -> pa.RecordBatch:
    """The task of the cluster."""
    return make(batch)

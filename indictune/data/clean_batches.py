"""Clean batches of rows on all cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import cached_property
from itertools import chain, islice

import pyarrow as pa

from indictune.data.cleaning import clean
from indictune.data.columns import normalise_label
from indictune.data.languages import languages_of

SCHEMA = pa.schema([("text", pa.string()), ("label", pa.string()), ("language", pa.string()), ("line", pa.int64())])
_MAX_WORKERS = 8  # one process reads a file as fast as seven to nine clean it (benchmarks/preparation.py)


def cleaned(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """`clean_batch` of each batch, in order; several batches use one process for each core.

    Args:
        batches: columns `text`, `label`, `language` (nullable strings) and `line` (int64).
    """
    first = list(islice(batches, 2))
    if len(first) < 2:
        yield from map(clean_batch, first)
        return
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(_Worker())) for _ in range(min(os.cpu_count() or 1, _MAX_WORKERS))]
        idle, busy = deque(workers), deque[_Worker]()
        for batch in chain(first, batches):
            if not idle:
                idle.append(busy.popleft())
                yield idle[0].result()
            worker = idle.popleft()
            worker.send(batch)
            busy.append(worker)
        for worker in busy:
            yield worker.result()


def clean_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with cleaned texts, labels in one spelling and a language in every row."""
    texts = [clean(text or "") for text in batch["text"].to_pylist()]
    labels = batch["label"].to_pylist()
    spellings = {label: normalise_label(label) for label in set(labels)}
    languages = [(language or "").strip() for language in batch["language"].to_pylist()]
    unnamed = [index for index, language in enumerate(languages) if not language]
    for index, language in zip(unnamed, languages_of(texts[index] for index in unnamed), strict=True):
        languages[index] = language
    columns = (texts, [spellings[label] for label in labels], languages)
    arrays = [pa.array(column, pa.string()) for column in columns]
    return pa.record_batch([*arrays, batch["line"]], schema=SCHEMA)


class _Worker:
    """A process that cleans one batch at a time; they travel through pipes as Arrow streams.

    It is not a `multiprocessing` pool. Forked workers would keep our file locks after this process is killed, and
    wait forever. Spawned workers would first import the training script, which takes seconds. This process imports
    only Arrow, inherits no open files, and ends with its input.

    `-P` and PYTHONPATH let it find modules where this process does. Otherwise `-m` looks in the current folder first,
    which may hold someone else's files.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "indictune.data.clean_batches"]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)

    @cached_property
    def _input(self) -> pa.RecordBatchStreamWriter:
        return pa.ipc.new_stream(self._process.stdin, SCHEMA)

    @cached_property
    def _output(self) -> pa.RecordBatchStreamReader:
        return pa.ipc.open_stream(self._process.stdout)

    def send(self, batch: pa.RecordBatch) -> None:
        """Send a batch. The previous result must have been taken."""
        assert self._process.stdin is not None
        try:
            self._input.write_batch(batch.select(SCHEMA.names))
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def result(self) -> pa.RecordBatch:
        """Wait for the cleaned batch."""
        try:
            return self._output.read_next_batch()
        except (StopIteration, pa.ArrowInvalid, OSError) as error:
            raise self._ended() from error

    def _ended(self) -> RuntimeError:
        code = self._process.wait()
        return RuntimeError(f"A process that cleans rows ended with code {code}; was there too little memory?")

    def close(self) -> None:
        """End the process: all results were taken, or nobody needs them."""
        self._process.kill()
        self._process.communicate()


def _serve() -> None:
    """Clean batches until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with pa.ipc.open_stream(sys.stdin.buffer) as batches, pa.ipc.new_stream(sys.stdout.buffer, SCHEMA) as results:
        for batch in batches:
            results.write_batch(clean_batch(batch))
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()

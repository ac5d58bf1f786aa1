"""Batches cleaned by several processes: the same rows in the same order."""

from __future__ import annotations

import fcntl
import signal
import struct
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from indictune.data.text import cleaning
from indictune.data.text.cleaning import clean_batch, cleaned
from indictune.errors import UserError
from tests.refusals import refused

NAMES = ["text", "label", "language", "line"]


def workers() -> list[psutil.Process]:
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "indictune.data.text.cleaning" in child.cmdline()]


def batch(number: int, rows: int = 3) -> pa.RecordBatch:
    texts = [f"#tag_{number} @you  {row}" for row in range(rows)]
    lines = pa.array(range(rows), pa.int64())
    columns = [
        pa.array([*texts[:-1], None], pa.string()),
        pa.array(["1.0"] * rows, pa.string()),
        pa.array([" hi ", *[None] * (rows - 1)], pa.string()),
        lines,
    ]
    return pa.record_batch(columns, names=NAMES)


def test_a_batch_is_cleaned_in_place() -> None:
    assert clean_batch(batch(7)).to_pydict() == {
        "text": ["tag 7 @user 0", "tag 7 @user 1", ""],
        "label": ["1", "1", "1"],
        "language": ["hi", "und-Latn", "und"],
        "line": [0, 1, 2],
    }


@pytest.mark.parametrize("number", [0, 1, *(pytest.param(each, marks=pytest.mark.more) for each in (2, 9)), 3])
def test_batches_keep_their_order(number: int) -> None:
    given = [batch(index, rows=1 + 500 * (index % 3)) for index in range(number)]
    assert list(cleaned(iter(given), 3)) == [clean_batch(each) for each in given]


def test_one_batch_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning, "_Worker", lambda: pytest.fail("started a process"))
    assert len(list(cleaned(iter([batch(0)]), 3))) == 1


def test_a_problem_in_reading_is_reported_and_no_process_stays() -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield from (batch(0), batch(1), batch(2))
        raise UserError("no-such-file", "--train_file", "line 4")

    with refused("no-such-file", "line 4"):
        list(cleaned(broken(), 2))
    assert not workers()


def test_a_process_that_dies_is_reported() -> None:
    rows = cleaned((batch(index) for index in range(20)), 2)
    next(rows)
    for worker in workers():
        worker.send_signal(signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"ended with code -9; was there too little memory\?"):
        list(rows)


@pytest.mark.more
def test_a_process_that_dies_in_mid_answer_is_reported() -> None:
    def given() -> Iterator[pa.RecordBatch]:
        yield from (batch(0, rows=20_000), batch(1, rows=20_000))
        while len(busy := [worker for worker in workers() if bytes_waiting(worker) > 10_000]) < 2:
            time.sleep(0.02)
        for worker in busy:  # its answer is larger than a pipe
            worker.kill()

    with pytest.raises(RuntimeError, match=r"ended with code -9; was there too little memory\?"):
        list(cleaned(given(), 3))


def test_processes_find_modules_where_this_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyarrow.py").write_text("raise SystemExit(7)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="ended with code 7"):
        list(cleaned(iter([batch(0), batch(1)]), 2))


def bytes_waiting(worker: psutil.Process) -> int:
    """That it has written, and nobody has read."""
    with open(f"/proc/{worker.pid}/fd/1", "rb") as pipe:
        (waiting,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(waiting)

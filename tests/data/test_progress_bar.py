"""Of a long preparation it is told how far it is; of a short one nothing."""

from __future__ import annotations

import io
import logging
import re
import sys

import pyarrow as pa
import pytest

from indictune.data import progress_bar
from indictune.data.progress_bar import with_progress

BATCHES = [pa.record_batch({"text": ["a"] * 1000})] * 3


@pytest.mark.parametrize(("total", "first"), [(3000, "1,000 of 3,000 rows"), (None, "1,000 rows so far")])
def test_a_log_gets_one_line_when_it_is_long_and_one_at_the_end(
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    total: int | None,
    first: str,
) -> None:
    monkeypatch.setattr(progress_bar, "_PATIENCE_S", 0.0)
    with caplog.at_level(logging.INFO, logger="indictune"):
        assert list(with_progress(BATCHES, "reading", total)) == BATCHES
    assert caplog.messages[0] == f"reading: {first}"
    assert re.fullmatch(r"reading: 3,000 rows in \d+\.\d s \([\d,]+ rows a second\)", caplog.messages[1])
    assert len(caplog.messages) == 2
    assert capsys.readouterr() == ("", "")  # no bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "_PATIENCE_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal := Terminal())
        assert list(with_progress(BATCHES, "reading", 3000)) == BATCHES
    assert "reading: 100%" in terminal.getvalue()
    assert "3000/3000" in terminal.getvalue()


def test_of_a_short_one_nothing_is_told(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO, logger="indictune"):
        assert list(with_progress(BATCHES, "reading")) == BATCHES
    assert caplog.messages == []
    assert capsys.readouterr() == ("", "")

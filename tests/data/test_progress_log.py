"""A long preparation logs its progress, a short one nothing."""

from __future__ import annotations

import logging

import pyarrow as pa
import pytest

from indictune.data import cache
from indictune.data.cache import with_progress

BATCHES = [pa.record_batch({"text": ["a"] * 1000})] * 3


@pytest.mark.parametrize(("total", "first"), [(3000, "1,000 of 3,000 rows"), (None, "1,000 rows")])
def test_a_long_preparation_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, total: int | None, first: str
) -> None:
    monkeypatch.setattr(cache, "_EVERY_S", -1.0)
    with caplog.at_level(logging.INFO, logger="indictune"):
        assert list(with_progress(BATCHES, "reading", total)) == BATCHES
    assert caplog.messages[0] == f"reading: {first}"
    assert len(caplog.messages) == 3


def test_a_short_preparation_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="indictune"):
        assert list(with_progress(BATCHES, "reading")) == BATCHES
    assert caplog.messages == []

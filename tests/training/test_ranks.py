"""What a rank tells the others."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from indictune.training.ranks import Ranks


def test_the_end_is_told_though_the_watchdog_tells_at_the_same_time(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 0, 1, "attempt")
    ranks.begin()
    together = threading.Barrier(2)

    def tell(step: int) -> None:
        together.wait()
        ranks.at(step, step, "a place")

    for step in range(1, 300):
        watchdog = threading.Thread(target=tell, args=(step,))
        watchdog.start()
        together.wait()
        ranks.ended("failed", f"after step {step}")
        watchdog.join()
        told = json.loads((tmp_path / ".ranks" / "0.json").read_text(encoding="utf-8"))
        assert (told["step"], told["end"]["message"]) == (step, f"after step {step}")


class TestAnEndThatWasToldBeforeThisRankBegan:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        """Of a rank 1 that has ended."""
        other = Ranks(tmp_path, 1, 2, "attempt")
        other.begin()
        other.ended("user_error", "no such file")
        return tmp_path / ".ranks" / "1.json"

    def test_counts_where_both_began_together(self, file: Path, tmp_path: Path) -> None:
        assert Ranks(tmp_path, 0, 2, "attempt").first_end() == (1, "user_error", "no such file")

    def test_counts_for_nothing_where_an_earlier_attempt_has_left_it(self, file: Path, tmp_path: Path) -> None:
        left = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps({**left, "born": left["born"] - 10}), encoding="utf-8")
        mine = Ranks(tmp_path, 0, 2, "attempt")
        assert mine.first_end() is None
        new = Ranks(tmp_path, 1, 2, "attempt")
        new.begin()
        assert mine.first_end() is None
        new.ended("failed", "of this attempt")
        assert mine.first_end() == (1, "failed", "of this attempt")

    def test_counts_for_nothing_in_another_attempts_name(self, file: Path, tmp_path: Path) -> None:
        assert Ranks(tmp_path, 0, 2, "attempt after a restart").first_end() is None


def test_an_end_counts_wherever_its_rank_began_if_it_comes_after_this_one_began(tmp_path: Path) -> None:
    """Ranks that were started by hand, or on machines whose clocks differ."""
    other = Ranks(tmp_path, 1, 2, "attempt")
    other._mine["born"] -= 100
    other.begin()
    mine = Ranks(tmp_path, 0, 2, "attempt")
    other.ended("failed", "out of memory")
    assert mine.first_end() == (1, "failed", "out of memory")


def test_what_the_user_gave_is_the_cause_whatever_other_ranks_told_before(tmp_path: Path) -> None:
    for rank, state in ((1, "resumable"), (2, "user_error"), (3, "failed")):
        other = Ranks(tmp_path, rank, 4, "attempt")
        other.begin()
        other.ended(state, state)
    assert Ranks(tmp_path, 0, 4, "attempt").first_end() == (2, "user_error", "user_error")


def test_the_rank_that_the_others_wait_for_is_late(tmp_path: Path) -> None:
    ranks = [Ranks(tmp_path, rank, 4, "attempt") for rank in range(4)]
    for rank, count in ((0, 7), (1, 6), (2, 7), (3, 5)):
        ranks[rank].begin()
        ranks[rank].at(3, count, "reading rows")
    ranks[3].ended("failed", "out of memory")  # it holds up nobody any more: it is dead
    for each in (ranks[0], ranks[1]):
        assert list(each.late()) == [1]
        assert each.late()[1].endswith("holds up the others: since step 3 it came no further than reading rows")

"""What a rank tells the others."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import distributed
from torch._C._distributed_c10d import HashStore

from indictune.distributed.collectives import NEW_GROUP
from indictune.distributed.process_group import JOINING
from indictune.run import OWN_PROGRESS, Progress
from indictune.supervise.watchdog import Ranks, Watchdog
from tests.ranks.launching import python, start


def test_the_end_is_reported_though_the_watchdog_reports_at_the_same_time(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 0, 1, "attempt")
    ranks.begin()
    progress = Progress()
    together = threading.Barrier(2)

    def tell(step: int) -> None:
        together.wait()
        progress.step = step
        ranks.report_progress(progress)

    for step in range(1, 300):
        watchdog = threading.Thread(target=tell, args=(step,))
        watchdog.start()
        together.wait()
        ranks.report_end("failed", f"after step {step}")
        watchdog.join()
        record = json.loads((tmp_path / ".ranks" / "0.json").read_text(encoding="utf-8"))
        assert (record["step"], record["message"]) == (step, f"after step {step}")


class TestAnEndThatWasToldBeforeThisRankBegan:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        """Of a rank 1 that has ended."""
        other = Ranks(tmp_path, 1, 2, "attempt")
        other.begin()
        other.report_end("user_error", "no such file")
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
        new.report_end("failed", "of this attempt")
        assert mine.first_end() == (1, "failed", "of this attempt")

    def test_counts_for_nothing_in_another_attempts_name(self, file: Path, tmp_path: Path) -> None:
        assert Ranks(tmp_path, 0, 2, "attempt after a restart").first_end() is None


def test_an_end_counts_wherever_its_rank_began_if_it_comes_after_this_one_began(tmp_path: Path) -> None:
    """Ranks that were started by hand, or on machines whose clocks differ."""
    other = Ranks(tmp_path, 1, 2, "attempt")
    other.mine.born -= 100
    other.begin()
    mine = Ranks(tmp_path, 0, 2, "attempt")
    other.report_end("failed", "out of memory")
    assert mine.first_end() == (1, "failed", "out of memory")


def test_a_user_error_is_the_cause_whatever_other_ranks_reported_before(tmp_path: Path) -> None:
    for rank, state in ((1, "resumable"), (2, "user_error"), (3, "failed")):
        other = Ranks(tmp_path, rank, 4, "attempt")
        other.begin()
        other.report_end(state, state)
    assert Ranks(tmp_path, 0, 4, "attempt").first_end() == (2, "user_error", "user_error")


@pytest.mark.parametrize(("launcher", "code"), [(os.getppid(), -signal.SIGKILL), (1, None)])
def test_a_rank_of_the_same_launcher_is_killed_where_it_is_stopped(
    tmp_path: Path, launcher: int, code: int | None
) -> None:
    mine, other = (Ranks(tmp_path, rank, 2, "attempt") for rank in range(2))
    with subprocess.Popen(["sleep", "60"]) as process:
        other.mine.pid, other.mine.launcher = process.pid, launcher
        other.begin()
        mine.kill_stopped()
        assert psutil.Process(process.pid).is_running()
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        mine.kill_stopped()
        try:
            assert process.wait(1) == code
        except subprocess.TimeoutExpired:
            assert code is None
        finally:
            process.kill()


def having_passed(count: int) -> Progress:
    progress = Progress()
    progress.step = 3
    for _ in progress.passing("reading rows", range(count)):
        pass
    return progress


def test_the_rank_that_the_others_wait_for_is_late(tmp_path: Path) -> None:
    ranks = [Ranks(tmp_path, rank, 4, "attempt") for rank in range(4)]
    for rank, count in ((0, 7), (1, 6), (2, 7), (3, 5)):
        ranks[rank].begin()
        ranks[rank].report_progress(having_passed(count))
    ranks[3].report_end("failed", "out of memory")  # it holds up nobody any more: it is dead
    for each in (ranks[0], ranks[1]):
        assert list(each.late()) == [1]
        assert each.late()[1].endswith("holds up the others: since step 3 it got no further than reading rows")


def test_a_rank_that_waits_for_another_is_ahead_of_it_only_as_long_as_it_waits() -> None:
    progress = having_passed(2)
    with progress.waiting("waiting for the rows"):
        assert (progress.count, progress.place) == (3, "waiting for the rows")
    assert (progress.count, progress.place) == (2, "reading rows")


def test_a_rank_that_holds_up_another_is_warned_of_until_it_moves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "indictune")
    prepares, waits = Ranks(tmp_path, 0, 2, "attempt"), Ranks(tmp_path, 1, 2, "attempt")
    prepares.begin()
    prepares.report_progress(having_passed(3))
    waits.begin()
    watchdog = Watchdog(waits, 10.0, tmp_path / "rank-1.log", pytest.fail, pytest.fail)
    watchdog.progress = having_passed(4)
    for still_s, warnings in ((9.0, 0), (11.0, 1), (12.0, 1), (22.0, 2)):
        watchdog.progress._last = time.monotonic() - still_s
        watchdog.look()
        assert len(caplog.messages) == warnings
    assert all("rank 0 (process " in each and "got no further than reading rows" in each for each in caplog.messages)
    assert "most recent call first" in (tmp_path / "rank-1.log").read_text(encoding="utf-8")


PATIENCE_S = 100.0


class TestARankThatAnotherHoldsUp:
    """One rank of two. It has reported more places than the other."""

    @pytest.fixture
    def other(self, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
        """The process of rank 1."""
        with subprocess.Popen(["sleep", "600"]) as process:
            other = Ranks(tmp_path, 1, 2, "attempt")
            other.mine.pid = process.pid
            other.begin()
            other.report_progress(having_passed(2))
            yield process
            process.kill()

    @pytest.fixture
    def watchdog(self, other: subprocess.Popen[bytes], tmp_path: Path) -> Iterator[Watchdog]:
        """The watchdog of rank 0, which adds its last words to `messages`. The ranks have a group."""
        waits = Ranks(tmp_path, 0, 2, "attempt")
        waits.begin()
        self.messages: list[str] = []
        watchdog = Watchdog(waits, PATIENCE_S, tmp_path / "rank-0.log", pytest.fail, self.messages.append)
        watchdog.progress = having_passed(3)
        distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        yield watchdog
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def look_after(self, watchdog: Watchdog, seconds: float) -> list[str]:
        """The messages after so many seconds without progress."""
        watchdog.progress._last = time.monotonic() - seconds
        watchdog.look()
        return self.messages

    def test_ends_before_a_collective_gives_up(self, watchdog: Watchdog, other: subprocess.Popen[bytes]) -> None:
        """NCCL's ends the process without a word."""
        assert self.look_after(watchdog, 1.7 * PATIENCE_S) == []
        (message,) = self.look_after(watchdog, 1.9 * PATIENCE_S)
        name = f"rank 1 (process {other.pid} on {socket.gethostname()})"
        assert message == f"{name} holds up the others: since step 3 it got no further than reading rows"

    def test_ends_before_that_where_it_is_stopped(self, watchdog: Watchdog, other: subprocess.Popen[bytes]) -> None:
        other.send_signal(signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)
        assert self.look_after(watchdog, 1.7 * PATIENCE_S) == []
        assert self.look_after(watchdog, 1.9 * PATIENCE_S)[0].endswith(" is stopped (SIGSTOP)")

    @pytest.mark.parametrize("place", [JOINING, NEW_GROUP])
    def test_waits_for_it_where_the_waiting_ends_by_itself_or_may_take_hours(
        self, watchdog: Watchdog, place: str
    ) -> None:
        watchdog.progress.passed(place)
        assert self.look_after(watchdog, 9 * PATIENCE_S) == []

    def test_waits_for_it_where_there_is_no_collective_yet(self, watchdog: Watchdog) -> None:
        distributed.destroy_process_group()
        assert self.look_after(watchdog, 9 * PATIENCE_S) == []


@pytest.mark.more
def test_a_rank_that_hangs_and_lets_no_other_thread_run_leaves_its_stack(tmp_path: Path) -> None:
    """As in an extension that holds the GIL: the watchdog does not come to look."""
    assert start([*python(), "tests/training/holding.py", str(tmp_path)]).returncode == 0
    log = (tmp_path / "rank-0.log").read_text(encoding="utf-8")
    assert "Timeout (0:00:00.500000)!" in log
    assert 'holding.py", line 14 in <module>' in log


def test_what_a_rank_has_imported_before_it_is_watched_is_no_hang(tmp_path: Path) -> None:
    count = OWN_PROGRESS.count
    Watchdog(Ranks(tmp_path, 0, 2, "attempt"), 1.0, tmp_path / "rank-0.log", pytest.fail, pytest.fail)
    assert (OWN_PROGRESS.count, OWN_PROGRESS.place) == (count + 1, "the start")


ENDED = ("[rank 0] stopped by SIGTERM.", "resumable")


@pytest.mark.parametrize(
    ("place", "hears", "expected"),
    [
        (JOINING, False, ["asked", ENDED]),
        (NEW_GROUP, False, ["asked", ENDED]),
        (JOINING, True, ["asked"]),
        ("evaluating", False, []),
    ],
)
def test_a_rank_does_not_wait_to_meet_one_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, hears: bool, expected: list[Any]
) -> None:
    monkeypatch.setattr("indictune.supervise.watchdog._GRACE_S", 0.1)
    happened: list[Any] = []
    stopped, waits = Ranks(tmp_path, 0, 2, "attempt"), Ranks(tmp_path, 1, 2, "attempt")
    waits.begin()
    stopped.begin()

    def ask() -> None:
        happened.append("asked")
        if hears:
            waits.report_end("resumable", "stopped by SIGTERM.")

    watchdog = Watchdog(waits, 900.0, tmp_path / "rank-1.log", ask, lambda *end: happened.append(end))
    watchdog.progress = Progress()
    watchdog.progress.passed(place)
    time.sleep(0.2)
    watchdog.look()
    assert happened == []
    stopped.report_end("resumable", "stopped by SIGTERM.")
    watchdog.look()
    assert happened == expected


@pytest.mark.more
@pytest.mark.parametrize("state", ["failed", "user_error", "resumable", "ok"])
def test_a_rank_that_does_not_move_does_not_wait_for_one_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """On another machine, whose launcher does not end this rank: NCCL would wait for `--ddp_timeout`."""
    monkeypatch.setattr("indictune.supervise.watchdog._GRACE_S", 0.1)
    monkeypatch.setattr("indictune.supervise.watchdog._ENDS_AFTER_ANOTHER_S", 0.5)
    happened: list[Any] = []
    failed, waits = Ranks(tmp_path, 9, 10, "attempt"), Ranks(tmp_path, 0, 10, "attempt")
    failed.mine.host, failed.mine.launcher = "another-machine", 1
    waits.begin()
    failed.begin()
    ask = functools.partial(happened.append, "asked")
    watchdog = Watchdog(waits, 900.0, tmp_path / "rank-0.log", ask, lambda *end: happened.append(end))
    watchdog.progress = Progress()
    watchdog.progress.passed("the gradients")
    failed.report_end(state, "OutOfMemoryError: CUDA out of memory.")
    watchdog.look()
    assert happened == []  # it may find out by itself
    time.sleep(0.6)
    watchdog.look()
    end = ("[rank 9] OutOfMemoryError: CUDA out of memory.", state)
    assert happened == ([] if state == "ok" else ["asked", end])


@pytest.mark.parametrize(("local", "names"), [("2", 1), ("1", 0)])
def test_a_rank_that_has_not_begun_holds_up_the_others_of_its_node(tmp_path: Path, local: str, names: int) -> None:
    """On another node with a separate disk it may have begun."""
    ranks = Ranks.of_launch(tmp_path, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": local})
    assert [*ranks.late().values()] == names * ["rank 1 holds up the others: it has not begun"]

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch import distributed
from torch._C._distributed_c10d import HashStore

from indictune.distributed.collectives import NEW_GROUP
from indictune.distributed.elastic import JOINING
from indictune.progress import HERE, Progress
from indictune.supervise import execute
from indictune.supervise.heartbeat import Ranks
from indictune.supervise.watchdog import Watchdog
from tests.ranks.launching import python, start


def test_the_end_is_told_though_the_watchdog_tells_at_the_same_time(tmp_path: Path) -> None:
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
        told = json.loads((tmp_path / ".ranks" / "0.json").read_text(encoding="utf-8"))
        assert (told["step"], told["end"]["message"]) == (step, f"after step {step}")


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
    other._mine["born"] -= 100
    other.begin()
    mine = Ranks(tmp_path, 0, 2, "attempt")
    other.report_end("failed", "out of memory")
    assert mine.first_end() == (1, "failed", "out of memory")


def test_a_rank_of_another_machine_that_tells_no_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was killed there; by gloo's words alone its address would be known, and a port."""
    monkeypatch.setattr(execute, "SECONDS_TO_TELL", 0.1)
    ranks = [Ranks(tmp_path, rank, 4, "attempt") for rank in range(4)]
    for rank, host in ((1, "killed-there"), (2, "failed-there"), (3, socket.gethostname())):
        ranks[rank]._mine |= {"host": host, "pid": rank}
        ranks[rank].begin()
    ranks[2].report_end("failed", "Connection closed by peer")
    session: Any = SimpleNamespace(ranks=ranks[0], is_named=True, watchdog=None, output_dir=tmp_path)
    monkeypatch.setattr(Ranks, "dead", lambda _: {})
    cause = execute._first_cause(session, execute.End("failed", "Connection reset", "Traceback"), time.time())
    told = "rank 1 (process 1 on killed-there) did not report its end"
    assert cause.message == f"[rank 2] Connection closed by peer; {told}"
    ranks[1].report_end("failed", "out of memory")
    assert ranks[0].without_end() == {}


def test_what_the_user_gave_is_the_cause_whatever_other_ranks_told_before(tmp_path: Path) -> None:
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
        other._mine |= {"pid": process.pid, "launcher": launcher}
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


def test_a_rank_that_prepares_rows_is_not_warned_of_as_long_as_it_moves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "indictune")
    prepares, waits = Ranks(tmp_path, 0, 2, "attempt"), Ranks(tmp_path, 1, 2, "attempt")
    waits.begin()
    prepares.begin()
    patience_s = 0.8
    its_own, watchdog = (
        Watchdog(ranks, patience_s, tmp_path / f"rank-{ranks.rank}.log", pytest.fail, pytest.fail)
        for ranks in (prepares, waits)
    )
    its_own.progress, watchdog.progress = having_passed(3), having_passed(4)

    def look(moves: bool) -> None:
        for _ in range(40):
            time.sleep(patience_s / 10)
            if moves:
                its_own.progress.moved()
            its_own.look()
            watchdog.look()

    look(moves=True)
    assert caplog.messages == []
    look(moves=False)
    assert len(caplog.messages) >= 2
    assert all(
        "rank 0 (process " in message and "got no further than reading rows" in message for message in caplog.messages
    )
    assert "most recent call first" in (tmp_path / "rank-1.log").read_text(encoding="utf-8")


PATIENCE_S = 100.0


class TestARankThatAnotherHoldsUp:
    """As of two: it has told more places than the other."""

    @pytest.fixture
    def other(self, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
        """The process of rank 1."""
        with subprocess.Popen(["sleep", "600"]) as process:
            other = Ranks(tmp_path, 1, 2, "attempt")
            other._mine["pid"] = process.pid
            other.begin()
            before = having_passed(2)
            before.moved()  # long ago
            other.report_progress(before)
            yield process
            process.kill()

    @pytest.fixture
    def watchdog(self, other: subprocess.Popen[bytes], tmp_path: Path) -> Iterator[Watchdog]:
        """Of rank 0, which tells in `told` how it ends; the ranks have a group."""
        waits = Ranks(tmp_path, 0, 2, "attempt")
        waits.begin()
        self.told: list[str] = []
        watchdog = Watchdog(waits, PATIENCE_S, tmp_path / "rank-0.log", pytest.fail, self.told.append)
        watchdog.progress = having_passed(3)
        distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        yield watchdog
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def look_after(self, watchdog: Watchdog, seconds: float) -> list[str]:
        """What is told after so long without a place."""
        watchdog.progress._last = time.monotonic() - seconds
        watchdog.look()
        return self.told

    def look_long_after(self, watchdog: Watchdog) -> list[str]:
        """What is told where the other has not moved for long either, as a first look cannot know."""
        self.look_after(watchdog, 9 * PATIENCE_S)
        watchdog._moved_at -= 9 * PATIENCE_S
        return self.look_after(watchdog, 9 * PATIENCE_S)

    def test_ends_before_a_collective_gives_up(self, watchdog: Watchdog, other: subprocess.Popen[bytes]) -> None:
        """NCCL's ends the process without a word."""
        assert self.look_after(watchdog, 0.5 * PATIENCE_S) == []
        assert self.look_after(watchdog, 1.9 * PATIENCE_S) == []  # as if the other had just moved
        watchdog._moved_at -= 1.1 * PATIENCE_S
        assert self.look_after(watchdog, 1.7 * PATIENCE_S) == []
        (told,) = self.look_after(watchdog, 1.9 * PATIENCE_S)
        name = f"rank 1 (process {other.pid} on {socket.gethostname()})"
        assert told == f"{name} holds up the others: since step 3 it got no further than reading rows"

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
        assert self.look_long_after(watchdog) == []

    def test_waits_for_it_where_there_is_no_collective_yet(self, watchdog: Watchdog) -> None:
        distributed.destroy_process_group()
        assert self.look_long_after(watchdog) == []


@pytest.mark.parametrize(("still", "names"), [(0.5, 1), (1.5, 2)])
def test_a_rank_for_which_another_has_waited_until_it_was_gone_names_itself_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still: float, names: int
) -> None:
    """NCCL ends those that have waited for it."""
    monkeypatch.setattr("indictune.supervise.watchdog._GRACE_S", 0.1)
    late, waited = Ranks(tmp_path, 1, 2, "attempt"), Ranks(tmp_path, 0, 2, "attempt")
    with subprocess.Popen(["true"]) as process:
        waited._mine["pid"] = process.pid
    waited.begin()
    waited.report_progress(having_passed(4))
    late.begin()
    happened: list[str] = []
    watchdog = Watchdog(late, PATIENCE_S, tmp_path / "rank-1.log", pytest.fail, happened.append)
    watchdog.progress = having_passed(3)
    watchdog.progress._last -= still * PATIENCE_S
    watchdog.look()
    here = socket.gethostname()
    told = [
        f"rank 1 (process {os.getpid()} on {here}) holds up the others: since step 3 it got no further than "
        "reading rows",
        f"rank 0 (process {process.pid} on {here}) is gone: it was killed, or died without a word",
    ]
    assert happened == ["; ".join(told[-names:])]


HELD_UP = "rank 1 (process {pid} on {host}) holds up the others: since step 3 it got no further than reading rows"


@pytest.mark.parametrize(
    ("state", "count", "message", "told"),
    [
        ("failed", 3, HELD_UP, f"[rank 0] {HELD_UP}"),
        ("failed", 3, "RuntimeError: timed out", f"{HELD_UP}; [rank 0] RuntimeError: timed out"),
        ("failed", 4, "RuntimeError: timed out", None),
        ("user_error", 3, "no such file.", None),
    ],
)
def test_a_rank_for_which_another_has_waited_ends_soon_where_that_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, count: int, message: str, told: str | None
) -> None:
    """On another machine, whose launcher does not end this rank."""
    monkeypatch.setattr("indictune.supervise.watchdog._GRACE_S", 0.1)
    names = {"pid": os.getpid(), "host": socket.gethostname()}
    late, waited = Ranks(tmp_path, 1, 2, "attempt"), Ranks(tmp_path, 0, 2, "attempt")
    waited._mine |= {"host": "another-machine", "launcher": 1}
    waited.begin()
    waited.report_progress(having_passed(4))
    late.begin()
    happened: list[Any] = []
    ask = functools.partial(happened.append, "asked")
    watchdog = Watchdog(late, 5.0, tmp_path / "rank-1.log", ask, lambda *end: happened.append(end))
    watchdog.progress = having_passed(count)
    watchdog.progress._last -= 6.0
    watchdog.look()
    assert happened == []
    waited.report_end(state, message.format(**names))
    watchdog.look()
    assert happened == ([] if told is None else ["asked", (told.format(**names), state)])


def test_a_rank_that_hangs_and_lets_no_other_thread_run_leaves_its_stack(tmp_path: Path) -> None:
    """As in an extension that holds the GIL: the watchdog does not come to look."""
    assert start([*python(), "tests/train/holding.py", str(tmp_path)]).returncode == 0
    log = (tmp_path / "rank-0.log").read_text(encoding="utf-8")
    assert "Timeout (0:00:00.500000)!" in log
    assert 'holding.py", line 15 in <module>' in log


def test_what_a_rank_has_imported_before_it_is_watched_is_no_hang(tmp_path: Path) -> None:
    count = HERE.count
    Watchdog(Ranks(tmp_path, 0, 2, "attempt"), 1.0, tmp_path / "rank-0.log", pytest.fail, pytest.fail)
    assert (HERE.count, HERE.place) == (count + 1, "the start")


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


@pytest.mark.parametrize("before_training", [True, False])
def test_a_rank_does_not_wait_for_one_that_was_asked_to_stop_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_training: bool
) -> None:
    """NCCL would wait for it; after a step all stop together, and what this one does then may take a while."""
    monkeypatch.setattr("indictune.supervise.watchdog._GRACE_S", 0.1)
    happened: list[Any] = []
    stopped, waits = Ranks(tmp_path, 0, 2, "attempt"), Ranks(tmp_path, 1, 2, "attempt")
    waits.begin()
    stopped.begin()
    ask = functools.partial(happened.append, "asked")
    watchdog = Watchdog(waits, 900.0, tmp_path / "rank-1.log", ask, lambda *end: happened.append(end))
    watchdog.progress = Progress()
    watchdog.progress.passed("writing a checkpoint")
    stopped.report_end("resumable", "stopped by SIGTERM.", before_training)
    watchdog.look()
    assert happened == []  # it may just have come there
    time.sleep(0.2)
    watchdog.look()
    assert happened == (["asked", ENDED] if before_training else [])


@pytest.mark.parametrize("state", ["failed", "user_error", "resumable", "ok"])
def test_a_rank_that_stands_still_anywhere_does_not_wait_for_one_that_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """On another machine, whose launcher does not end this rank: NCCL would wait for `--ddp_timeout`."""
    monkeypatch.setattr("indictune.supervise.watchdog._GRACE_S", 0.1)
    monkeypatch.setattr("indictune.supervise.watchdog._ENDS_AFTER_ANOTHER_S", 0.5)
    happened: list[Any] = []
    failed, waits = Ranks(tmp_path, 9, 10, "attempt"), Ranks(tmp_path, 0, 10, "attempt")
    failed._mine |= {"host": "another-machine", "launcher": 1}
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
    in_vain = state in ("failed", "user_error")
    assert happened == (["asked", ("[rank 9] OutOfMemoryError: CUDA out of memory.", state)] if in_vain else [])


def test_a_rank_does_not_take_the_end_of_an_earlier_launchs_rank_for_one_of_its_own(tmp_path: Path) -> None:
    earlier = Ranks(tmp_path, 0, 2, "attempt")
    earlier._mine["born"] -= 60.0
    earlier.begin()
    begun = Ranks(tmp_path, 1, 2, "attempt")
    earlier.report_end("resumable", "interrupted.")
    assert begun.first_end_of_launch() is None
    (tmp_path / ".ranks" / "0.json").unlink()
    assert Ranks(tmp_path, 1, 2, "attempt").first_end_of_launch() is None
    started_again = Ranks(tmp_path, 0, 2, "attempt")
    started_again.begin()
    started_again.report_end("user_error", "no such file.")
    assert begun.first_end_of_launch() == (0, "user_error", "no such file.")


# As torchrun tells rank 0 of two.
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": f"test-{os.getpid()}"}


class TestARankThatHasNotBegun:
    @pytest.fixture
    def started(self) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
        """Starts a process of this launch."""
        with ExitStack() as running:

            def start(**given: str) -> subprocess.Popen[bytes]:
                process = subprocess.Popen(["sleep", "600"], env={**os.environ, **LAUNCHED, **given})
                running.callback(process.wait)
                running.callback(process.kill)
                return process

            yield start

    @pytest.fixture
    def process(self, started: Callable[..., subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """That of rank 1, beside one in place of this one, whose environment has been changed since it began."""
        started()
        return started(RANK="1")

    def test_holds_up_the_others(self, process: subprocess.Popen[bytes], tmp_path: Path) -> None:
        ranks = Ranks.of_launch(tmp_path, LAUNCHED)
        name = f"rank 1 (process {process.pid} on {socket.gethostname()})"
        assert (ranks.gone(), ranks.dead()) == ({}, {})
        assert ranks.late() == {1: f"{name} holds up the others: it has not begun"}
        process.send_signal(signal.SIGSTOP)
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert (ranks.gone(), ranks.dead(), ranks.late()) == ({}, {1: f"{name} is stopped (SIGSTOP)"}, {})

    def test_is_gone_when_its_process_is(self, process: subprocess.Popen[bytes], tmp_path: Path) -> None:
        ranks = Ranks.of_launch(tmp_path, LAUNCHED)
        process.kill()
        process.wait()
        said = {1: "rank 1 is gone: it was killed, or died without a word, before it had begun"}
        assert (ranks.gone(), ranks.dead(), ranks.late()) == (said, said, {})

    def test_is_no_process_of_another_attempt(
        self, process: subprocess.Popen[bytes], started: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
    ) -> None:
        again = {"TORCHELASTIC_RESTART_COUNT": "1"}
        ranks = Ranks.of_launch(tmp_path, LAUNCHED | again)
        assert (ranks.gone(), ranks.late()) == ({}, {})  # nor can be told where this one's own is not seen
        started(**again)
        assert (len(ranks.gone()), ranks.late()) == (1, {})

    def test_is_not_known_of_where_it_may_be_on_another_machine(self, tmp_path: Path) -> None:
        assert Ranks.of_launch(tmp_path, LAUNCHED | {"LOCAL_WORLD_SIZE": "1"}).gone() == {}

    def test_may_come_yet_where_ranks_are_started_by_hand(self, tmp_path: Path) -> None:
        by_hand = {name: value for name, value in LAUNCHED.items() if not name.startswith("TORCHELASTIC")}
        assert Ranks.of_launch(tmp_path, by_hand).gone() == {}

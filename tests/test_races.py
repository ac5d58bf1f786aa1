"""Contenders that take turns against the clock. Nothing heavy is imported here: they start from this module."""

from __future__ import annotations

import os
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from benchmarks.contenders import Contender, Job


def runs_well(_contender: Contender, _job: Job, connection: Connection, seconds: float = 0) -> None:
    connection.send("ready")
    laps = 0
    while True:
        connection.recv()
        time.sleep(seconds)
        laps += 1
        connection.send((1.5, {"laps": laps}))


def takes_part(contender: Contender, job: Job, connection: Connection) -> None:
    from benchmarks.contenders import write_to_log

    if contender.title == "before its log":
        os._exit(9)
    write_to_log(contender, job)
    if contender.title == "within a letter":
        os.write(2, "ह".encode()[:2])
        os._exit(9)
    if contender.title == "within a message":
        os.write(connection.fileno(), struct.pack("!i", 100) + b"ready")
        os._exit(9)
    if contender.title == "early":
        raise ValueError("cannot start")
    if contender.title == "late":
        connection.send("ready")
        connection.recv()
        connection.send((1.0, {}))
        connection.recv()
        raise ValueError("cannot go on")
    if contender.title == "between":
        connection.send("ready")
        connection.recv()
        connection.send((1.0, {}))
        os._exit(9)  # as one that is killed for memory while others have their turns
    if contender.title == "silent":
        connection.send("ready")
        time.sleep(600)
    if contender.title == "hangs":
        connection.send("ready")
        connection.recv()
        connection.send((1.0, {}))
        time.sleep(600)
    if contender.title == "ready last":
        time.sleep(4)
    runs_well(contender, job, connection, seconds=2 if contender.title == "slow" else 0)


@pytest.mark.slow
def test_a_contender_that_fails_is_out_and_the_others_go_on(tmp_path: Path) -> None:
    from benchmarks.contenders import Contender, Job
    from benchmarks.turns import Race

    job = Job(tmp_path, tmp_path, steps=9, steps_per_lap=3, folder=tmp_path)
    race = Race(takes_part, time.time(), time.time() + 300)
    titles = ("early", "late", "between", "slow", "well")
    race.enter_all([(Contender(title), job) for title in titles], at_once=5)
    rounds: list[int] = []
    race.run(3, lambda: rounds.append(len(race.laps["well"])))
    assert rounds == [1, 2, 3]
    assert race.counted["well"] == {"laps": 4}
    assert race.laps["well"] == [1.5] * 3
    assert race.errors["early"].splitlines()[-1] == "ValueError: cannot start"
    assert race.errors["late"].splitlines()[-1] == "ValueError: cannot go on"
    assert race.errors["between"].startswith("between failed:")
    assert set(race.errors) == {"early", "late", "between"}
    assert race.seconds_to_ready == {}  # side by side a start takes longer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "error"),
    [
        ("before its log", "before its log failed:"),
        ("within a letter", "within a letter failed:\n\ufffd"),
        ("within a message", "within a message failed:"),
    ],
)
def test_a_contender_that_ends_anywhere_is_out(tmp_path: Path, title: str, error: str) -> None:
    from benchmarks.contenders import Contender, Job
    from benchmarks.turns import Race

    job = Job(tmp_path, tmp_path, steps=9, steps_per_lap=3, folder=tmp_path)
    race = Race(takes_part, time.time(), time.time() + 300)
    race.enter_all([(Contender(title), job)], at_once=1)
    assert race.errors == {title: error}


@pytest.mark.slow
def test_a_race_is_over_in_time_whoever_is_silent(tmp_path: Path) -> None:
    from benchmarks.contenders import Contender, Job
    from benchmarks.turns import Race

    job = Job(tmp_path, tmp_path, steps=9, steps_per_lap=3, folder=tmp_path)
    deadline = time.time() + 40
    race = Race(takes_part, time.time(), deadline)
    race.enter_all([(Contender(title), job) for title in ("well", "silent")], at_once=1)
    race.run(3, lambda: None)
    assert time.time() < deadline
    assert race.counted["well"] == {"laps": 1}
    assert race.seconds_to_ready.keys() == {"well", "silent"}
    assert race.errors == dict.fromkeys(("well", "silent"), "It had no time for a lap that counts.")


@pytest.mark.slow
def test_of_a_round_that_is_cut_the_first_to_enter_has_its_lap(tmp_path: Path) -> None:
    from benchmarks.contenders import Contender, Job
    from benchmarks.turns import Race

    job = Job(tmp_path, tmp_path, steps=9, steps_per_lap=3, folder=tmp_path)
    race = Race(takes_part, time.time(), time.time() + 40)
    race.enter_all([(Contender(title), job) for title in ("ready last", "hangs")], at_once=2)
    told: list[dict[str, list[float]]] = []
    race.run(3, lambda: told.append({title: list(laps) for title, laps in race.laps.items()}))
    assert told == [{"ready last": [1.5], "hangs": []}]
    assert race.errors == {"hangs": "It had no time for a lap that counts."}

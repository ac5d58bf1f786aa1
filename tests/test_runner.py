"""Contenders run one after the other; one that fails does not stop the others."""

from __future__ import annotations

import os
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks.contenders import Contender, Job, write_to_log
from benchmarks.runner import measure_each


def fails_or_runs(contender: Contender, job: Job, connection: Connection) -> None:
    """Run laps of 1.5 s by its own account, or fail as the title says."""
    write_to_log(contender, job)
    if contender.title == "within a letter":
        os.write(2, "ह".encode()[:2])
        os._exit(9)
    if contender.title == "within a message":
        os.write(connection.fileno(), struct.pack("!i", 100) + b"ready")
        os._exit(9)
    if contender.title == "raises":
        raise ValueError("cannot start")
    connection.send("ready")
    laps = 0
    while connection.recv():
        if contender.title == "silent":
            time.sleep(600)
        if contender.title == "dies" and laps == 2:
            os._exit(9)
        laps += 1
        connection.send((1.5, {"laps": laps, "first_step_s": 1.0}))


def job(folder: Path) -> Job:
    return Job(folder, folder, steps=9, steps_per_lap=3, folder=folder)


@pytest.mark.slow
def test_a_contender_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    titles = ("raises", "dies", "within a letter", "within a message", "well")
    runs = [Contender(title) for title in titles]
    found = {each.title: each for each in measure_each(runs, job(tmp_path), 3, time.time() + 300, fails_or_runs)}
    assert found["raises"].error.splitlines()[-1] == "ValueError: cannot start"
    assert found["dies"].laps == [1.5]
    assert found["within a letter"].error.endswith("\ufffd")
    assert all(found[title].error.startswith(f"{title} failed:") for title in titles[:-1])
    assert (found["well"].laps, found["well"].counted["laps"], found["well"].error) == ([1.5] * 3, 4, "")
    assert found["well"].seconds_to_first_step > 1


@pytest.mark.slow
def test_a_silent_contender_ends_with_its_share_of_the_time(tmp_path: Path) -> None:
    since = time.time()
    runs = [Contender(title) for title in ("silent", "well")]
    silent, well = measure_each(runs, job(tmp_path), 3, since + 60, fails_or_runs)
    assert 25 < time.time() - since < 60
    assert silent.error == "silent did not answer in its time."
    assert well.laps == [1.5] * 3

"""`indictune parity` as a user types it: it trains, compares, and reports what a file refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks.launching import ROOT, start

pytestmark = pytest.mark.slow


def parity(job: Path, *flags: str) -> tuple[int, str, str]:
    program = "import sys; from indictune.cli import main; sys.exit(main())"
    words = ["python", "-c", program, "parity", "sentiment", str(job), *flags]
    done = start(words, {"PYTHONPATH": str(ROOT)}, anew=True)
    return done.returncode, done.stdout, done.stderr


def test_one_process_and_two_train_one_model(job: Path, tmp_path: Path) -> None:
    picture = tmp_path / "curves.svg"
    flags = ["--strategies", "zero2,pipeline", "--steps", "3", "--json", "--plot", str(picture)]
    code, said, errors = parity(job, *flags)
    assert code == 0, errors
    found = json.loads(said)
    assert {name: each["agrees"] for name, each in found["runs"].items()} == {"zero2": True, "pipeline": True}
    assert [len(each) for each in found["losses"].values()] == [3, 3, 3]
    assert picture.is_file()


def test_a_refusal_and_a_cause_are_reported(job: Path, tmp_path: Path) -> None:
    """24 rows of a step are no multiple of five processes; dropout makes two processes differ from one."""
    code, said, errors = parity(job, "--strategies", "ddp", "--num_processes", "5", "--steps", "2")
    assert (code, "ddp on 5 processes cannot run it: " in said) == (1, True), errors
    kept = ["--output_dir", str(tmp_path / "kept"), "--dropout", "0.1"]
    code, said, errors = parity(job, "--strategies", "ddp", "--steps", "2", *kept)
    assert (code, "ddp differs by dropout: the masks differ" in said) == (1, True), errors
    assert (tmp_path / "kept/ddp/parity_trace.jsonl").is_file()

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


def test_files_are_compared_and_one_is_refused(job: Path, tmp_path: Path) -> None:
    """FSDP2 cannot shard the states of Adagrad."""
    picture, kept = tmp_path / "curves.svg", tmp_path / "kept"
    flags = ["--strategies", "ddp,fsdp2", "--optim", "adagrad", "--steps", "2", "--output_dir", str(kept)]
    code, said, errors = parity(job, *flags, "--json", "--plot", str(picture))
    assert code == 0, errors
    found = json.loads(said)
    assert {name: each["agrees"] for name, each in found["runs"].items()} == {"ddp": True}
    assert [len(each) for each in found["losses"].values()] == [2, 2]
    assert found["stopped"]["fsdp2"]["state"] == "user_error"
    assert "adagrad" in found["stopped"]["fsdp2"]["message"]
    assert picture.is_file()
    assert (kept / "ddp/parity_trace.jsonl").is_file()

"""Faults that are planted on one of 2 or 3 gloo ranks. Doctor must find each, and name the rank and the item."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.ranks.launching import free_port, python, start, torchrun

SCRIPT = "tests/doctor/planted.py"
ROWS = [{"text": f"{word} film {number}", "label": word} for number in range(8) for word in ("good", "bad")]


class Examined(NamedTuple):
    """What doctor said: its exit code, and its lines by check."""

    code: int
    lines: dict[str, list[dict[str, Any]]]

    def bad(self) -> dict[str, list[str]]:
        """What was found by the checks that are not ok."""
        bad = {check: [each for each in lines if each["status"] != "ok"] for check, lines in self.lines.items()}
        return {check: [each["found"] for each in lines] for check, lines in bad.items() if lines}


def examined(folder: Path, ranks: int, *faults: str, timeout_s: int = 60) -> Examined:
    """Doctor on so many ranks, with faults as `RANK:FAULT`."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    flags = ["--model_name_or_path", "builtin:tiny-indic-bert", "--train_file", str(rows)]
    flags += [
        "--validation_split",
        "0.25",
        "--global_batch_size",
        "24",
        "--per_device_train_batch_size",
        "4",
        "--output_dir",
        str(folder / "out"),
    ]
    flags += ["--json", "true", "--collective_timeout", str(timeout_s)]
    done = start([*torchrun(ranks), SCRIPT, *faults, "doctor", *flags], {"PLANTED": str(folder)})
    assert done.stdout.startswith("{"), done.stderr
    lines: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(done.stdout)["checks"]:
        lines.setdefault(each["check"], []).append(each)
    assert (done.returncode == 0) == json.loads(done.stdout)["ok"]
    return Examined(done.returncode, lines)


# Fault -> the check that finds it, and what its line says of rank 1.
FOUND = {
    "another_seed": ("ranks alike", "--seed of rank 1: 7; the others have 42"),
    "no_recipe": ("recipe", "rank 1: --config nowhere.yaml: there is no such file."),
    "another_dataset": ("ranks alike", "content of --train_file of rank 1: 1 file(s), "),
    "stale_package": ("ranks alike", "version of trl of rank 1: 0.9; the others have "),
    "slow": ("slowest rank", "rank 1 computes "),
    "wrong_sum": ("all-reduce", "rank 1 got a wrong result"),
    "fast_clock": ("clocks", "the clock of rank 1 is "),
}


@pytest.mark.slow
def test_sound_ranks_are_sound(tmp_path: Path) -> None:
    sound = examined(tmp_path, 2)
    assert sound.code == 0
    assert set(sound.bad()) <= {"slowest rank", "slowest link"}  # other programs are on this machine too
    assert {"all-reduce", "all-gather", "reduce-scatter"} <= sound.lines.keys()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_planted_fault_is_found_and_named(tmp_path: Path, ranks: int) -> None:
    """All at once: each has a line of its own."""
    found = examined(tmp_path, ranks, *(f"1:{fault}" for fault in FOUND))
    assert found.code != 0
    bad = found.bad()
    for check, text in FOUND.values():
        assert [each for each in bad.get(check, []) if each.startswith(text)], (check, text, bad)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FOUND)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_planted_fault_is_found_alone(tmp_path: Path, ranks: int, fault: str) -> None:
    bad = examined(tmp_path, ranks, f"1:{fault}").bad()
    check, text = FOUND[fault]
    assert [each for each in bad.pop(check) if each.startswith(text)]
    assert set(bad) <= {"slowest rank", "slowest link", "packages"}


@pytest.mark.more
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["never_enters", pytest.param("never_arrives", marks=pytest.mark.slow)])
def test_a_rank_that_never_comes_is_named_with_its_stack(tmp_path: Path, ranks: int, fault: str) -> None:
    found = examined(tmp_path, ranks, f"1:{fault}", timeout_s=6)
    assert found.code != 0
    (line,) = found.lines["all-reduce" if fault == "never_enters" else "pairs of ranks"]
    assert line["found"].startswith("rank 1 (process ")
    assert ("does not take part" if fault == "never_enters" else "did not arrive") in line["found"]
    assert "in _sleeps: time.sleep(600)" in line["stack"][-1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stopped_rank_is_named_as_stopped(tmp_path: Path, ranks: int) -> None:
    found = examined(tmp_path, ranks, "1:stopped", timeout_s=6)
    assert found.code != 0
    (line,) = found.lines["pairs of ranks"]
    assert line["found"].startswith("rank 1 (process ")
    assert line["found"].endswith("its process is stopped.")
    assert line["cure"]


@pytest.mark.slow
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    found = examined(tmp_path, 3, "2:dies", timeout_s=5)
    (line,) = found.lines["reduce-scatter"]
    assert line["found"].startswith("rank 2 (process ")


@pytest.mark.slow
def test_a_first_node_out_of_reach_is_named() -> None:
    launch = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    command = [*python(), "indictune/__main__.py", "doctor", "--collective_timeout", "1"]
    done = start(command, {**launch, "MASTER_PORT": str(free_port())})
    assert done.returncode == 1
    assert "[first-node-unreachable]" in done.stdout


@pytest.mark.slow
def test_a_slow_link_is_named(tmp_path: Path) -> None:
    bad = examined(tmp_path, 3, "1:slow_link_to_0").bad()
    assert [each for each in bad["slowest link"] if each.startswith("ranks 0, 1: ")]

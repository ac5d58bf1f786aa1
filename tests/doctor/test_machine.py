"""What doctor finds on one machine: packages, disks, tools, 4-bit weights."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import namedtuple
from importlib import resources
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from indictune.config.plan import Launch
from indictune.doctor import machine, rank_checks, run_files
from indictune.doctor.check_lines import Outcome
from indictune.doctor.machine import shared_memory_line
from indictune.doctor.roll_call import why_silent
from indictune.doctor.run_files import row_digests, row_line
from tests.plans import plan_of
from tests.ranks.launching import ROOT

Usage = namedtuple("Usage", "total used free")


def planted_package(folder: Path, name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = folder / f"{name}-{version}.dist-info" / "METADATA"
    written.parent.mkdir()
    written.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))


def test_a_stale_package_is_named_with_the_version_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted_package(tmp_path, "accelerate", "1.9", monkeypatch)
    found = [line for line in machine.package_lines({}, 0, 1) if line.found.startswith("accelerate")]
    assert [(line.status, line.cure) for line in found] == [("warn", 'pip install "accelerate<1.16,>=1.15"')]


def test_the_versions_are_those_of_pyproject() -> None:
    """A light install lacks no package. A line of its own lists the extras that it has not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {each.name for each in machine.requirements()}
    assert names <= {Requirement(each).name for each in project["dependencies"]}
    more = {each.name for each in machine.requirements("train")} - names
    assert more == {"bitsandbytes", "deepspeed", "ninja", "trl"}
    mission = {
        "accelerate",
        "bitsandbytes",
        "datasets",
        "deepspeed",
        "evaluate",
        "peft",
        "torch",
        "transformers",
        "trl",
    }
    assert mission <= names | more


def test_missing_extras_are_listed_and_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "versions_of", lambda names: {name: "1" for name in names if name != "trl"})
    assert machine.extras_line() == Outcome("extras", "ok", "not installed: train (trl)")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert machine.four_bit_line(torch.device("cpu"), is_needed=False).status == "ok"


def test_each_known_fault_is_found_in_its_environment_alone() -> None:
    installed = {"torch": "2.13.0", "bitsandbytes": "0.50.2"}
    assert len(machine.known_faults()) >= 5
    for fault in machine.known_faults():
        assert fault["packages"].keys() <= installed.keys()
        assert fault["source"]
        environ = {name: value.replace("*", "128") for name, value in fault["variables"].items()}
        assert fault["found"] in [line.found for line in machine.package_lines(environ, 1, 2)]
        assert fault["found"] not in [line.found for line in machine.package_lines({}, 1, 2)]
    assert [line.status for line in machine.package_lines({"CUDA_LAUNCH_BLOCKING": "1"}, 0, 1)] == ["ok"]


def test_the_error_of_nf4_is_that_of_its_codebook() -> None:
    """The 16 values of QLoRA, appendix E, with blocks of 64: bitsandbytes, and the constant, against plain torch."""
    half = [0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0]
    lower = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
    codes = torch.tensor([*lower, *half])
    weights = torch.randn(1 << 14, 64, generator=torch.Generator().manual_seed(1))
    largest = weights.abs().amax(1, keepdim=True)
    nearest = codes[((weights / largest)[..., None] - codes).abs().argmin(-1)] * largest
    expected = float((nearest - weights).abs().mean())
    assert expected == pytest.approx(machine.KNOWN_ERROR, rel=0.01)
    assert machine.four_bit_line(torch.device("cpu"), is_needed=True).status == "ok"


@pytest.mark.parametrize(("is_needed", "status"), [(True, "fail"), (False, "warn")])
def test_a_bitsandbytes_that_rounds_wrong_or_does_not_load_is_found(
    monkeypatch: pytest.MonkeyPatch, is_needed: bool, status: str
) -> None:
    monkeypatch.setattr(machine, "round_trip_error", lambda _: 0.09)
    line = machine.four_bit_line(torch.device("cpu"), is_needed)
    assert (line.status, line.found) == (status, "NF4 and back on cpu: mean error 0.0900, known 0.0728")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    line = machine.four_bit_line(torch.device("cpu"), is_needed)
    assert line.status == status
    assert line.found.startswith("does not run on cpu: ")


@pytest.mark.parametrize(
    ("total", "free", "status"), [(64 << 20, 60 << 20, "warn"), (8 << 30, 1 << 20, "fail"), (8 << 30, 4 << 30, "ok")]
)
def test_a_small_shared_memory_is_found(monkeypatch: pytest.MonkeyPatch, total: int, free: int, status: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total, total - free, free))
    assert shared_memory_line().status == status


@pytest.mark.parametrize(("free", "status"), [(1 << 20, "fail"), (80 << 20, "warn"), (4 << 30, "ok")])
def test_a_disk_needs_room_for_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str
) -> None:
    """A checkpoint of 50 MB, of which there are 3 at once with a --save_total_limit of 2."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(9 << 30, 0, free))
    monkeypatch.setattr(run_files, "meta_of", lambda _: object())
    monkeypatch.setattr(run_files, "checkpoint_of_node", lambda *_: 50_000_000)
    plan = plan_of(output_dir=str(tmp_path / "a" / "b"))
    assert run_files.disk_line(plan, timed=False).status == status
    unsaved = plan_of({"save_strategy": "no"}, output_dir=str(tmp_path))
    assert run_files.disk_line(unsaved, timed=False).status == ("fail" if free < 32 << 20 else "ok")


def test_the_speed_of_a_disk_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    line = run_files.disk_line(plan_of(output_dir=str(tmp_path / "out")), timed=True)
    assert line.found.endswith(" MB/s")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_slow_for_a_checkpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "meta_of", lambda _: object())
    monkeypatch.setattr(run_files, "checkpoint_of_node", lambda *_: 700_000_000)
    monkeypatch.setattr(run_files, "write_rate", lambda _: 1e6)
    line = run_files.disk_line(plan_of(output_dir=str(tmp_path)), timed=True)
    assert (line.status, line.found.rpartition(": ")[2]) == ("warn", "700 s for a checkpoint")


def test_a_process_that_does_not_answer_is_stopped_gone_or_busy() -> None:
    here = gethostname()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"started")
        assert process.stdout.read(7) == b"started"  # before its answer it may still wait for the disk
        busy = why_silent(process.pid, here)[0]
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        stopped = why_silent(process.pid, here)[0]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        unread = why_silent(process.pid, here)[0]
    assert (busy, stopped, unread) == ("busy outside Python", "stopped", "gone")
    assert why_silent(process.pid, here)[0] == "gone"
    assert f"ps -o stat= -p {process.pid}" in why_silent(process.pid, "another")[1]


def test_a_burst_of_another_program_makes_no_rank_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    product, until = torch.Tensor.__matmul__, time.perf_counter() + 0.3

    def slowed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02 if time.perf_counter() < until else 0)
        return product(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", slowed)
    assert rank_checks.compute_s(torch.device("cpu")) < 0.02


@pytest.mark.parametrize(("device", "status"), [("cpu", "fail"), ("none", "ok")])
def test_a_missing_compiler_matters_to_an_offloaded_optimizer(
    monkeypatch: pytest.MonkeyPatch, device: str, status: str
) -> None:
    deepspeed: dict[str, Any] = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": device}}}
    launch = Launch("zero2_offload", deepspeed=deepspeed)
    assert machine.build_line(launch).status == "ok"
    monkeypatch.setenv("PATH", "/nowhere")
    line = machine.build_line(launch)
    assert line.status == status
    assert line.found.startswith("cannot be built without a C++ compiler, ninja on PATH")


def test_rows_are_compared_by_their_content_not_by_their_names(tmp_path: Path) -> None:
    for name, text in (("a", "x,y\n"), ("b", "x,y\n"), ("c", "x,z\n")):
        (tmp_path / f"{name}.csv").write_text(text, encoding="utf-8")
    a, b, c = (row_digests({"train_file": str(tmp_path / f"{name}.csv")}) for name in "abc")
    assert a == b != c
    missing = row_digests({"train_file": str(tmp_path / "no.csv")})
    assert row_line(missing).status == "fail"
    assert str(tmp_path / "no.csv") in row_line(missing).found
    assert row_line(a).found == f"--train_file: {a['content of --train_file']}"
    weighted = row_digests({"train_files": [str(tmp_path / "a.csv"), str(tmp_path / "c.csv")]})
    assert weighted["content of --train_files"].startswith("2 file(s), 8 bytes, ")


def test_the_toml_of_faults_is_installed() -> None:
    assert resources.files("indictune.doctor").joinpath("known_faults.toml").is_file()
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"doctor/known_faults.toml"' in text

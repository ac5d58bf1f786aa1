"""Runs and sweeps on a real Ray cluster: two nodes on this machine, each with one core."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.ranks.conftest import write_job
from tests.ranks.launching import ROOT, Run, accelerate, free_port, path, python, torchrun, train


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from ray.cluster_utils import Cluster  # takes seconds

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_job(tmp_path_factory.mktemp("job")))


def typed(*words: str) -> subprocess.Popen[str]:
    """`indictune ...`, typed in the folder of the repository."""
    environ = {**os.environ, "PATH": path(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [*python(), "-m", "indictune", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True)


def on_ray(job: str, folder: Path, *flags: str) -> subprocess.Popen[str]:
    words = ["sentiment", "--config", job, "--output_dir", str(folder), "--report", "false", "--baseline", "false"]
    return typed("train", *words, "--engine", "ray", *flags)


def curve(run: Run) -> list[tuple[float, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in run.log]


def same_weights(one: Run, other: Run) -> bool:
    return all(bool((tensor == other.weights[name]).all()) for name, tensor in one.weights.items())


def kill_rank_after_checkpoint(rank: str, folder: Path, checkpoint: str) -> None:
    while not (folder / checkpoint).exists():
        time.sleep(0.02)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in process.cmdline() and process.environ().get("RANK") == rank:
                process.send_signal(signal.SIGKILL)
                return
    raise AssertionError("there was no such rank")


@pytest.mark.more
def test_a_killed_rank_resumes_and_the_run_equals_that_of_torchrun(job: str, address: str, tmp_path: Path) -> None:
    with on_ray(job, tmp_path / "ray", "--ray_address", address, "--num_workers", "2") as started:
        kill_rank_after_checkpoint("1", tmp_path / "ray", "checkpoint-4")
        shown, said = started.communicate()
    assert started.returncode == 0, shown + said
    assert "Resuming from" in said
    expected = train(torchrun(2), tmp_path / "torchrun", "--config", job, "--baseline", "false")
    assert curve(Run(tmp_path / "ray")) == curve(expected)
    assert same_weights(Run(tmp_path / "ray"), expected)


@pytest.mark.more
def test_a_strategy_is_that_of_the_file(job: str, address: str, tmp_path: Path) -> None:
    flags = ["--max_steps", "3", "--baseline", "false"]
    started = on_ray(
        job, tmp_path / "ray", "--ray_address", address, "--strategy", "fsdp2", "--num_workers", "2", *flags
    )
    shown, said = started.communicate()
    assert started.returncode == 0, shown + said
    assert "2 processes, float32, strategy fsdp2" in said
    expected = train(accelerate("fsdp2", 2), tmp_path / "accelerate", "--config", job, *flags)
    assert curve(Run(tmp_path / "ray")) == curve(expected)


@pytest.mark.more
def test_a_refused_run_is_not_tried_again_and_its_own_cluster_ends(job: str, tmp_path: Path) -> None:
    started = on_ray(job, tmp_path / "out", "--label_column", "nothing")
    time.sleep(5)
    with suppress(psutil.NoSuchProcess):
        of_ray = psutil.Process(started.pid).children(recursive=True)
    _, said = started.communicate()
    assert started.returncode == 2
    assert said.count("[column-missing]") == 2  # of the training rows, and of the validation rows
    assert of_ray
    assert not any(each.is_running() for each in of_ray)


def scripts_in(folder: Path) -> int:
    """How many training scripts run now in folders below this one."""
    words = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return sum(
        f"--output_dir {folder}/" in (line := " ".join(each)) and "train_sentiment.py" in line for each in words
    )


@pytest.mark.more
def test_a_sweep_tries_its_settings_at_once_and_finds_the_same(job: str, address: str, tmp_path: Path) -> None:
    words = ["sweep", "sentiment", "--config", job, "--grid", "learning_rate=1e-4,1e-3", "--max_steps", "3"]
    tables, at_once = [], []
    for name, flags in {"ray": ["--engine", "ray", "--ray_address", address], "local": []}.items():
        swept, at_most = typed(*words, "--output_dir", str(tmp_path / name), *flags), 0
        while swept.poll() is None:
            at_most = max(at_most, scripts_in(tmp_path / name))
            time.sleep(0.5)
        table, said = swept.communicate()
        assert swept.returncode == 0, said
        tables.append(table[table.index("trial ") : table.index("Written to")])
        at_once.append(at_most)
    assert tables[0] == tables[1]
    assert at_once == [2, 1]


def refused(*words: str) -> str:
    started = typed(*words)
    _, said = started.communicate()
    assert started.returncode == 2
    return said


@pytest.mark.parametrize("verb", ["train", pytest.param("sweep", marks=pytest.mark.more)])
def test_an_address_without_a_cluster_is_refused(verb: str, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    flags = ["--engine", "ray", "--ray_address", address, "--output_dir", str(tmp_path / "out")]
    said = refused(verb, "sentiment", *flags, *(["--grid", "learning_rate=1e-4,1e-3"] if verb == "sweep" else []))
    assert f"indictune: --ray_address {address}: " in said
    assert "[no-ray-cluster]" in said

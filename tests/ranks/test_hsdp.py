"""HSDP: two copies of the model, each in shards on two ranks, give the run of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.launching import BIN, SCRIPT, Run, accelerate, python, start, train
from tests.ranks.matrix import launched_file
from tests.ranks.nodes import FIRST, on_nodes
from tests.ranks.test_parity import PLAIN, RELATIVE, differences
from tests.ranks.test_resume import stopped_copy

Start = Callable[..., Run]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four ranks on this machine, as two nodes of two."""
    return accelerate(launched_file("hsdp", tmp_path_factory.mktemp("hsdp")), 4)


@pytest.fixture(scope="module")
def copies(launcher: list[str], job: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of four ranks."""
    return train(launcher, tmp_path_factory.mktemp("copies"), "--config", str(job))


@pytest.mark.more
def test_a_checkpoint_has_each_weight_once(run_under: Start, copies: Run) -> None:
    folder = "checkpoint-3/pytorch_model_fsdp_0"
    written, shards = (
        sum(file.stat().st_size for file in (run.folder / folder).glob("*.distcp"))
        for run in (copies, run_under("fsdp2", 2))
    )
    assert written == pytest.approx(shards, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_others_resume_a_checkpoint(copies: Run, job: Path, tmp_path: Path, strategy: str) -> None:
    command = python() if strategy == "single" else accelerate(strategy, 2)
    folder = stopped_copy(copies, tmp_path / "run")
    resumed = train(command, folder, "--config", str(job), "--resume_from_checkpoint", "auto")
    for name in ("loss", "grad_norm"):
        assert resumed.series(name) == pytest.approx(copies.series(name), rel=RELATIVE)


@pytest.mark.slow
def test_copies_evaluate_exactly(copies: Run, launcher: list[str], job: Path, tmp_path: Path) -> None:
    files = ["--test_file", str(job.parent / "validation.jsonl"), "--output_dir", str(tmp_path)]
    result = start([*launcher, "indictune/__main__.py", "evaluate", "--model", str(copies.folder), *files])
    assert result.returncode == 0, result.stderr
    assert Run(tmp_path).metrics["test"]["loss"] == pytest.approx(copies.metrics["eval"]["loss"], abs=1e-6)


@pytest.mark.slow
def test_the_shipped_file_makes_a_copy_a_node(run_under: Start, job: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    file = ["--config_file", "accelerate_configs/hsdp.yaml", "--num_machines", "2", "--num_processes", "4"]
    meeting = ["--main_process_ip", FIRST, "--main_process_port", "29500"]
    launch = [str(BIN / "accelerate"), "launch", *file, *meeting]
    script = [SCRIPT, "--config", str(job), "--output_dir", str(out)]
    ended = on_nodes(tmp_path / "nodes", [[*launch, "--machine_rank", str(node), *script] for node in range(2)])
    assert [each.code for each in ended] == [0, 0], ended
    assert Run(out).metrics["strategy"] == "hsdp"
    assert differences(run_under("single", 1, *PLAIN), Run(out)) == []

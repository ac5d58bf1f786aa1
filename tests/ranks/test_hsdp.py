"""HSDP: two copies of the model, each in shards on two ranks, give the run of one process."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.conftest import starter
from tests.ranks.launching import BIN, ROOT, SCRIPT, Run, accelerate, free_port, python, start, train
from tests.ranks.nodes import FIRST, on_nodes
from tests.ranks.test_llama import JOB as LLAMA_JOB
from tests.ranks.test_llama import METHODS, MICRO_BATCH_OF_12
from tests.ranks.test_llama import SCRIPT as LLAMA_SCRIPT
from tests.ranks.test_parity import PLAIN, RELATIVE, differences

pytestmark = pytest.mark.slow

Start = Callable[..., Run]
STOPPED_AT = 7
CHATS = ROOT / "indictune/data/samples/chats"


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four ranks on this machine, as two nodes of two: the shipped file with the number of nodes."""
    text = (ROOT / "accelerate_configs/hsdp.yaml").read_text(encoding="utf-8")
    file = tmp_path_factory.mktemp("hsdp") / "hsdp.yaml"
    file.write_text(re.sub(r"replicate_size: -1", "replicate_size: 2", text), encoding="utf-8")
    words = ["launch", "--config_file", str(file), "--num_processes", "4", "--main_process_port", str(free_port())]
    return [str(BIN / "accelerate"), *words]


@pytest.fixture(scope="module")
def copies(launcher: list[str], job: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of four ranks."""
    return train(launcher, tmp_path_factory.mktemp("copies"), "--config", str(job))


def stopped(run: Run, folder: Path) -> Path:
    """The run as a stop after one of its checkpoints would leave it."""
    shutil.copytree(run.folder, folder)
    for step in range(STOPPED_AT + 1, 13):
        shutil.rmtree(folder / f"checkpoint-{step}")
    for name in ("metrics.json", "model.safetensors"):
        (folder / name).unlink()
    return folder


def test_copies_train_the_model_of_one_process(run_under: Start, copies: Run) -> None:
    one = run_under("single", 1, *PLAIN)
    assert (copies.metrics["strategy"], copies.metrics["world_size"]) == ("hsdp", 4)
    assert differences(one, copies) == []


def test_a_checkpoint_has_each_weight_once(run_under: Start, copies: Run) -> None:
    folder = "checkpoint-3/pytorch_model_fsdp_0"
    written, shards = (
        sum(file.stat().st_size for file in (run.folder / folder).glob("*.distcp"))
        for run in (copies, run_under("fsdp2", 2))
    )
    assert written == pytest.approx(shards, rel=0.1)


@pytest.mark.parametrize("strategy", ["single", "fsdp2", "hsdp"])
def test_others_resume_a_checkpoint(
    copies: Run, launcher: list[str], job: Path, tmp_path: Path, strategy: str
) -> None:
    command = {"single": python(), "fsdp2": accelerate("fsdp2", 2), "hsdp": launcher}[strategy]
    folder = stopped(copies, tmp_path / "run")
    resumed = train(command, folder, "--config", str(job), "--resume_from_checkpoint", "auto")
    for name in ("loss", "grad_norm"):
        assert resumed.series(name) == pytest.approx(copies.series(name), rel=RELATIVE)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_copies_of_llama_train_as_one_process(
    launcher: list[str], tmp_path_factory: pytest.TempPathFactory, method: str
) -> None:
    folder = tmp_path_factory.mktemp("chats")
    recipe = folder / "job.yaml"
    files = f"train_file: {CHATS / 'train.jsonl'}\nvalidation_file: {CHATS / 'validation.jsonl'}\n"
    recipe.write_text(LLAMA_JOB + files, encoding="utf-8")
    flags = METHODS[method]
    one = starter(recipe, tmp_path_factory, LLAMA_SCRIPT)("single", 1, *flags, *MICRO_BATCH_OF_12)
    two = train(launcher, folder / "out", "--config", str(recipe), *flags, script=LLAMA_SCRIPT)
    for name in ("loss", "grad_norm"):
        assert two.series(name) == pytest.approx(one.series(name), rel=RELATIVE)
    assert two.metrics["eval"]["loss"] == pytest.approx(one.metrics["eval"]["loss"], abs=1e-4)


def test_copies_evaluate_exactly(copies: Run, launcher: list[str], job: Path, tmp_path: Path) -> None:
    files = ["--test_file", str(job.parent / "validation.jsonl"), "--output_dir", str(tmp_path)]
    result = start([*launcher, "indictune/__main__.py", "evaluate", "--model", str(copies.folder), *files])
    assert result.returncode == 0, result.stderr
    assert Run(tmp_path).metrics["test"]["loss"] == pytest.approx(copies.metrics["eval"]["loss"], abs=1e-6)


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

"""Strategy files as other tools write them run as they are, and train the same model."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from tests.ranks.launching import BIN, SCRIPT, Run, deepspeed, free_port, start

# As `accelerate config` writes it for ZeRO-3, where every other question gets its default.
ZERO_3: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "deepspeed_config": {
        "gradient_accumulation_steps": 1,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": False,
        "zero3_save_16bit_model": False,
        "zero_stage": 3,
    },
    "distributed_type": "DEEPSPEED",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
# As axolotl's and LLaMA-Factory's: their own optimizer and schedule, an old compiler block, and no clipping.
PEERS: dict[str, Any] = {
    "zero_optimization": {"stage": 1, "overlap_comm": True},
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": "auto",
        "auto_cast": False,
        "loss_scale": 0,
        "initial_scale_power": 32,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "compile": {"disable": True, "backend": "inductor"},
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
# Gradients are larger than the norm that they are cut to, and Adam would take other steps.
JOB = """
model_name_or_path: builtin:tiny-indic-bert
max_length: 16
global_batch_size: 8
per_device_train_batch_size: 2
dropout: 0
optim: sgd
learning_rate: 1.0
lr_scheduler_type: linear
max_grad_norm: 0.1
max_steps: 3
logging_steps: 1
eval_strategy: 'no'
save_strategy: 'no'
load_best_model_at_end: false
"""
TWEETS = ("बहुत अच्छा", "चलो ठीक", "एकदम बेकार", "చాలా బాగుంది")


@dataclass(frozen=True)
class Outcome:
    """A finished run, and what it printed."""

    run: Run
    printed: list[str]

    @property
    def recipe(self) -> dict[str, Any]:
        return dict(yaml.safe_load((self.run.folder / "recipe.yaml").read_text(encoding="utf-8")))

    def line_with(self, words: str) -> str:
        (line,) = [line for line in self.printed if words in line]
        return line


class Runs:
    """Runs of one recipe on sixteen rows. Those on two processes start together: launchers mostly wait."""

    def __init__(self, folder: Path) -> None:
        rows = [{"text": f"{TWEETS[n % 4]} {n}", "label": "pn"[n % 2]} for n in range(16)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / "job.yaml").write_text(JOB + f"train_file: {folder / 'train.jsonl'}\n", encoding="utf-8")
        (folder / "zero3.yaml").write_text(yaml.safe_dump(ZERO_3), encoding="utf-8")
        (folder / "peers.json").write_text(json.dumps(PEERS), encoding="utf-8")
        self.folder = folder
        fp32 = ("--bf16", "false")
        of_one = self._start("one", accelerate(trls("single_gpu")), *fp32)  # it starts the server of the forks
        with ThreadPoolExecutor(2) as pool:
            self._results = {
                "peers": pool.submit(self._start, "peers", deepspeed(2), "--deepspeed", str(folder / "peers.json")),
                "ddp": pool.submit(self._start, "ddp", two(trls("multi_gpu"))),
                "fsdp1": pool.submit(self._start, "fsdp1", two(trls("fsdp1")), *fp32),
                "zero3": pool.submit(self._start, "zero3", two(folder / "zero3.yaml"), *fp32),
            }
        self.of_one = self._outcome("one", of_one)

    def _start(self, name: str, launcher: list[str], *flags: str) -> CompletedProcess[str]:
        words = ["--config", str(self.folder / "job.yaml"), "--output_dir", str(self.folder / name)]
        return start([*launcher, SCRIPT, *words, *flags])

    def _outcome(self, name: str, result: CompletedProcess[str]) -> Outcome:
        assert result.returncode == 0, result.stderr
        return Outcome(Run(self.folder / name), result.stderr.splitlines())

    def of_two(self, name: str, strategy: str) -> Outcome:
        """A run that ended well, on two processes under a strategy."""
        outcome = self._outcome(name, self._results[name].result())
        assert (outcome.run.metrics["strategy"], outcome.run.metrics["world_size"]) == (strategy, 2)
        return outcome

    def is_as_one_process(self, outcome: Outcome) -> None:
        for name in ("loss", "grad_norm", "learning_rate"):
            assert outcome.run.series(name) == pytest.approx(self.of_one.run.series(name), abs=1e-4), name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def accelerate(file: Path, *options: str) -> list[str]:
    return [str(BIN / "accelerate"), "launch", "--config_file", str(file), *options]


def two(file: Path) -> list[str]:
    """A launcher of two processes, whatever number is in the file."""
    return accelerate(file, "--num_processes", "2", "--main_process_port", str(free_port()))


def trls(name: str) -> Path:
    """A strategy file that TRL installs."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("accelerate_configs") / f"{name}.yaml"


@pytest.mark.more
def test_one_process_of_a_file_that_asks_for_eight(runs: Runs) -> None:
    metrics = runs.of_one.run.metrics
    assert (metrics["strategy"], metrics["world_size"]) == ("single", 1)
    assert runs.of_one.line_with("starts one process")


@pytest.mark.more
def test_ddp_with_a_precision(runs: Runs) -> None:
    outcome = runs.of_two("ddp", "ddp")
    assert outcome.recipe["bf16"] is True
    assert "From the strategy file: --bf16 true" in outcome.printed
    assert not any("Ignoring" in line for line in outcome.printed)


@pytest.mark.more
def test_fsdp_1(runs: Runs) -> None:
    outcome = runs.of_two("fsdp1", "fsdp2")
    assert "FULL_SHARD is reshard_after_forward true" in outcome.line_with("FSDP 1")
    runs.is_as_one_process(outcome)


@pytest.mark.more
def test_zero_3_of_accelerate_config_saves_the_whole_model(runs: Runs) -> None:
    outcome = runs.of_two("zero3", "zero3")
    assert outcome.recipe["bf16"] is False
    line = outcome.line_with("Ignoring")
    assert "gradient_accumulation_steps 1 (2 follows from --global_batch_size 8)" in line
    assert "mixed_precision bf16 (--bf16 false counts)" in line
    assert "zero3_save_16bit_model false" in line
    runs.is_as_one_process(outcome)


@pytest.mark.more
def test_a_deepspeed_file_of_peers_does_not_change_the_model(runs: Runs) -> None:
    outcome = runs.of_two("peers", "zero1")
    line = outcome.line_with("Ignoring")
    assert "optimizer.type AdamW (--optim sgd counts)" in line
    assert "scheduler.type WarmupLR (--lr_scheduler_type linear counts)" in line
    runs.is_as_one_process(outcome)

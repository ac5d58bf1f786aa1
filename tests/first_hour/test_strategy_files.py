"""Strategy files as other tools write them run as they are, and train the same model."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
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


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with sixteen rows."""
    folder = tmp_path_factory.mktemp("job")
    rows = [{"text": f"{TWEETS[n % 4]} {n}", "label": "pn"[n % 2]} for n in range(16)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = folder / "job.yaml"
    recipe.write_text(JOB + f"train_file: {folder / 'train.jsonl'}\n", encoding="utf-8")
    return recipe


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


def run(launcher: list[str], job: Path, folder: Path, *flags: str) -> tuple[Run, list[str]]:
    """A finished run, and the lines that it printed."""
    result = start([*launcher, SCRIPT, "--config", str(job), "--output_dir", str(folder / "out"), *flags])
    assert result.returncode == 0, result.stderr
    return Run(folder / "out"), result.stderr.splitlines()


def recorded(run: Run) -> dict[str, Any]:
    return dict(yaml.safe_load((run.folder / "recipe.yaml").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def one_process(job: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[str]]:
    """A run under TRL's file for one GPU, which asks for eight processes."""
    folder = tmp_path_factory.mktemp("one")
    return run(accelerate(trls("single_gpu")), job, folder, "--bf16", "false")


def is_the_same(done: Run, one_process: tuple[Run, list[str]]) -> None:
    for name in ("loss", "grad_norm", "learning_rate"):
        assert done.series(name) == pytest.approx(one_process[0].series(name), abs=1e-4), name


def test_one_process(one_process: tuple[Run, list[str]]) -> None:
    done, printed = one_process
    assert (done.metrics["strategy"], done.metrics["world_size"]) == ("single", 1)
    assert sum("starts one process" in line for line in printed) == 1


def test_ddp_with_a_precision(job: Path, tmp_path: Path) -> None:
    done, printed = run(two(trls("multi_gpu")), job, tmp_path)
    assert (done.metrics["strategy"], done.metrics["world_size"]) == ("ddp", 2)
    assert recorded(done)["bf16"] is True
    assert "From the strategy file: --bf16 true" in printed
    assert not any("Ignoring" in line for line in printed)


def test_fsdp_1(job: Path, one_process: tuple[Run, list[str]], tmp_path: Path) -> None:
    done, printed = run(two(trls("fsdp1")), job, tmp_path, "--bf16", "false")
    assert done.metrics["strategy"] == "fsdp2"
    (line,) = [line for line in printed if "FSDP 1" in line]
    assert "FULL_SHARD is reshard_after_forward true" in line
    is_the_same(done, one_process)


def test_zero_3_of_accelerate_config_saves_the_whole_model(
    job: Path, one_process: tuple[Run, list[str]], tmp_path: Path
) -> None:
    file = tmp_path / "zero3.yaml"
    file.write_text(yaml.safe_dump(ZERO_3), encoding="utf-8")
    done, printed = run(two(file), job, tmp_path, "--bf16", "false")
    assert done.metrics["strategy"] == "zero3"
    assert recorded(done)["bf16"] is False
    (line,) = [line for line in printed if "Ignoring" in line]
    assert "gradient_accumulation_steps 1 (2 follows from --global_batch_size 8)" in line
    assert "mixed_precision bf16 (--bf16 false counts)" in line
    assert "zero3_save_16bit_model false" in line
    is_the_same(done, one_process)


def test_a_deepspeed_file_of_peers_does_not_change_the_model(
    job: Path, one_process: tuple[Run, list[str]], tmp_path: Path
) -> None:
    file = tmp_path / "peers.json"
    file.write_text(json.dumps(PEERS), encoding="utf-8")
    done, printed = run(deepspeed(2), job, tmp_path, "--deepspeed", str(file))
    assert done.metrics["strategy"] == "zero1"
    (line,) = [line for line in printed if "Ignoring" in line]
    assert "optimizer.type AdamW (--optim sgd counts)" in line
    assert "scheduler.type WarmupLR (--lr_scheduler_type linear counts)" in line
    is_the_same(done, one_process)

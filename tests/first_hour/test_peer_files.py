"""The strategy files of other tools and of `accelerate config`: which of them run, and what is said of them."""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.cluster import get_cluster_input
from accelerate.commands.menu import BulletMenu

from indictune.distributed.strategy import hide_file_values, notes_on_file, taken_values
from tests.launch_environment import launched
from tests.plans_under_files import planned, planned_by, planned_with_deepspeed

SIZES = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
PRECISION = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}}
OFFLOAD = {"device": "cpu", "pin_memory": True}
OLD_NAMES_OF_STAGE_3: dict[str, Any] = {
    "stage": 3,
    "sub_group_size": 0,
    "reduce_bucket_size": "auto",
    "prefetch_bucket_size": "auto",
    "param_persistence_threshold": "auto",
    "max_live_parameters": 0,
    "max_reuse_distance": 0,
    "gather_16bit_weights_on_model_save": True,
}

GPUS = {"Which type of machine": 4, "How many GPU(s) should be used": "8"}
ZERO = {"use DeepSpeed?": "yes", "How many GPU(s) should be used": "8"}


def configured(file: Path, answers: Mapping[str, Any]) -> Path:
    """What `accelerate config` writes by these answers, by a part of the question; the others get their default."""

    def answer(question: str, default: Any = "") -> Any:
        return next((given for part, given in answers.items() if part in question), default)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "input", answer)
        patch.setattr(BulletMenu, "run", lambda menu, default_choice: answer(menu.prompt, default_choice))
        get_cluster_input().to_yaml_file(file)
    return file


def trls() -> list[Path]:
    """The strategy files that TRL installs."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    files = sorted(Path(spec.origin).with_name("accelerate_configs").glob("*.yaml"))
    assert len(files) >= 7
    return files


@pytest.mark.parametrize("file", [pytest.param(each, id=each.stem) for each in trls()])
def test_a_file_of_trl(file: Path) -> None:
    """Each is for eight GPUs in bf16, and runs on two processes."""
    plan, problems = planned(file)
    assert problems == []
    of_one = file.stem == "single_gpu"
    name = {"single_gpu": "single", "multi_gpu": "ddp", "fsdp1": "fsdp2"}.get(file.stem, file.stem)
    assert (plan.launch.strategy, plan.launch.world_size) == (name, 1 if of_one else 2)
    assert plan.training.bf16 is True
    assert taken_values(plan) == "--bf16 true"


@pytest.mark.parametrize(
    ("answers", "strategy", "said"),
    [
        ({}, "single", []),
        (GPUS, "ddp", []),
        (GPUS | {"FullyShardedDataParallel": "yes"}, "fsdp2", []),
        (GPUS | {"FullyShardedDataParallel": "yes", "FSDP version": 0}, "fsdp2", ["FULL_SHARD is"]),
        (ZERO, "zero2", ["gradient_accumulation_steps 1 (2 "]),
        (ZERO | {"ZeRO optimization stage": 3}, "zero3", ["_steps 1 (2 ", "; zero3_save_16bit_model false ("]),
        (ZERO | {"json file to a DeepSpeed": "yes", "path to the json": "ds_configs/zero1.json"}, "zero1", []),
    ],
    ids=["one process", "ddp", "fsdp2", "fsdp1", "zero2", "zero3", "deepspeed file"],
)
def test_what_accelerate_config_writes(
    tmp_path: Path, answers: Mapping[str, Any], strategy: str, said: list[str]
) -> None:
    """What is said of it takes one line."""
    file = configured(tmp_path / "answered.yaml", answers)
    environ = launched(file, 1 if strategy == "single" else 2)
    plan, problems = planned_by(environ, "--global_batch_size", "32", "--per_device_train_batch_size", "8")
    assert (problems, plan.launch.strategy) == ([], strategy)
    assert len(notes_on_file(plan)) == bool(said)
    assert all(part in line for part in said for line in notes_on_file(plan))


@pytest.mark.parametrize(
    ("content", "strategy", "taken"),
    [
        ({"zero_optimization": {"stage": 0, "allgather_bucket_size": 5e8}}, "ddp", ""),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, "zero1", ""),
        (
            {"compile": {"disable": False, "backend": "inductor"}, "zero_optimization": {"stage": 1}},
            "zero1",
            "--torch_compile true --torch_compile_backend inductor",
        ),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "zero2_offload", ""),
        ({"zero_optimization": OLD_NAMES_OF_STAGE_3, "bf16": {"enabled": True}}, "zero3", "--bf16 true"),
        (
            {"zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": 3, "offload_param": OFFLOAD}},
            "zero3_offload",
            "",
        ),
        (
            {
                "zero_optimization": {"stage": 3, "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9},
                "comms_config": {"verbose": False},
                "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}},
                "timers": {"throughput": {"enabled": True}},
            },
            "zero3",
            "",
        ),
    ],
)
def test_a_deepspeed_file_of_axolotl_or_llama_factory(
    tmp_path: Path, content: dict[str, Any], strategy: str, taken: str
) -> None:
    file = tmp_path / "peers.json"
    file.write_text(json.dumps(SIZES | PRECISION | {"zero_allow_untested_optimizer": True} | content))
    plan, problems = planned_with_deepspeed(file)
    assert problems == []
    assert (plan.launch.strategy, taken_values(plan)) == (strategy, taken)


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        ({"sequence_parallel_size": 2}, ["sequence_parallel_size: 2"]),
        (
            {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3, "sub_group_size": "auto"}},
            ["tensor_parallel.autotp_size: 2", "zero_optimization.sub_group_size: auto"],
        ),
    ],
)
def test_keys_that_cannot_run_are_refused_in_one_message(
    tmp_path: Path, content: dict[str, Any], keys: list[str]
) -> None:
    file = tmp_path / "peers.json"
    file.write_text(json.dumps(SIZES | PRECISION | {"zero_optimization": {"stage": 2}} | content))
    _, problems = planned_with_deepspeed(file)
    assert [(each.code, each.value) for each in problems] == [("strategy-file-not-supported", ", ".join(keys))]


def test_all_conflicts_come_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    content: dict[str, Any] = {
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False},
        "optimizer": {"type": "Lamb", "params": {"lr": 3e-5, "weight_decay": 0.1, "max_coeff": 0.3}},
        "scheduler": {"type": "OneCycle", "params": {"total_num_steps": 500}},
        "train_micro_batch_size_per_gpu": 4,
    }
    file.write_text(json.dumps(content))
    flags = ("--learning_rate", "0.0001", "--global_batch_size", "32", "--per_device_train_batch_size", "8")
    plan, problems = planned_with_deepspeed(file, *flags)
    assert problems == []
    assert taken_values(plan) == "--weight_decay 0.1"
    (line,) = notes_on_file(plan)
    assert re.findall(r"(\S+ \S+) \(([^)]*)\)", line) == [
        ("train_micro_batch_size_per_gpu 4", "--per_device_train_batch_size 8 counts"),
        ("optimizer.params.lr 3e-05", "--learning_rate 0.0001 counts"),
        ("zero_optimization.stage3_gather_16bit_weights_on_model_save false", "the model is saved whole"),
        ("optimizer.type Lamb", "--optim counts"),
        ("optimizer.params.max_coeff 0.3", "--optim counts"),
        ("scheduler.type OneCycle", "--lr_scheduler_type counts"),
        ("scheduler.params.total_num_steps 500", "the steps of the run count"),
    ]


def test_stage_3_of_an_accelerate_config_is_told_to_save_the_whole_model(tmp_path: Path) -> None:
    file = configured(tmp_path / "answered.yaml", ZERO | {"ZeRO optimization stage": 3})
    plan, _ = planned(file)
    environ = launched(file)
    hide_file_values(plan.launch, environ)
    assert environ["ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"] == "true"


def test_stage_0_runs_without_deepspeed(tmp_path: Path) -> None:
    file = configured(tmp_path / "answered.yaml", ZERO | {"ZeRO optimization stage": 0})
    plan, _ = planned(file)
    assert (plan.launch.strategy, "stage 0" in notes_on_file(plan)[0]) == ("ddp", True)
    environ = launched(file)
    assert hide_file_values(plan.launch, environ) == {"deepspeed": None}
    assert "ACCELERATE_USE_DEEPSPEED" not in environ

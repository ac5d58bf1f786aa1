"""The shipped strategy files, read the way the launchers read them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from indictune.distributed.launch import read_launch
from indictune.distributed.zero import OVERLAP
from tests.launch_environment import launched

ROOT = Path(__file__).parents[2]
DS_NAMES = ["zero1", "zero1_tp", "zero2", "zero2_offload", "zero2_tp", "zero3", "zero3_offload"]
TENSOR_NAMES = ["ddp_tp", "fsdp2_tp", "tp"]
OTHER_NAMES = ["ddp", "fsdp2", "fsdp2_cp", "fsdp2_offload", "fsdp2_qlora", "hsdp", "pipeline", "single_gpu"]
NAMES = ["3d", *OTHER_NAMES, *TENSOR_NAMES, *DS_NAMES]


SPLITS = ("_comment", "zero_optimization", "tensor_parallel")


def config_path(name: str) -> Path:
    return ROOT / "accelerate_configs" / f"{name}.yaml"


def config(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load(config_path(name).read_text(encoding="utf-8")))


def ds_config(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "ds_configs" / f"{name}.json").read_text(encoding="utf-8")))


def test_the_files_are_those_of_the_design() -> None:
    assert sorted(path.name for path in (ROOT / "accelerate_configs").iterdir()) == sorted(
        f"{name}.yaml" for name in NAMES
    )
    assert sorted(path.name for path in (ROOT / "ds_configs").iterdir()) == [f"{name}.json" for name in DS_NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_starts_the_strategy_in_the_files_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    processes = 4 if name in ("3d", "ddp_tp", "fsdp2_tp", "hsdp") else 2
    sizes = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": "2" if name == "hsdp" else str(processes)}
    environ = launched(config_path(name), 1 if name == "single_gpu" else processes)
    launch = read_launch(environ | (sizes if processes == 4 else {}))
    expected = {"single_gpu": ("single", 1), "fsdp2_qlora": ("fsdp2", 2)}.get(name, (name, processes))
    assert (launch.strategy, launch.world_size) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_file_loads_and_leaves_the_number_of_devices_and_the_precision_to_the_run(name: str) -> None:
    loaded = load_config_from_file(str(config_path(name)))
    assert loaded.num_processes == (1 if name == "single_gpu" else -1)  # -1: to be given on the command line
    assert ("num_processes" in config(name)) == (name == "single_gpu")
    assert loaded.num_machines == 1
    assert loaded.use_cpu is False
    assert loaded.gpu_ids is None
    assert config(name).get("mixed_precision", "no") == "no"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_when_to_pick_it_and_how_to_launch_it(name: str) -> None:
    text = config_path(name).read_text(encoding="utf-8")
    header = text.partition("compute_environment:")[0].splitlines()
    assert all(line.startswith("#") for line in header)
    words = " ".join(line.lstrip("# ") for line in header)
    assert re.search(r"(For |The usual choice |The fastest while |The largest model )", words)
    command = f"accelerate launch --config_file accelerate_configs/{name}.yaml --num_processes "
    assert command in words
    scripts = re.findall(r"scripts/\w+\.py", words)
    assert scripts
    assert all((ROOT / script).is_file() for script in scripts)


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_cp", "fsdp2_offload", "fsdp2_qlora", "hsdp"])
def test_fsdp_files_are_of_version_2_and_name_no_architecture(name: str) -> None:
    fsdp = config(name)["fsdp_config"]
    assert fsdp["fsdp_version"] == 2
    assert fsdp["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert "fsdp_transformer_layer_cls_to_wrap" not in fsdp
    assert fsdp["fsdp_offload_params"] is (name == "fsdp2_offload")


@pytest.mark.parametrize("name", DS_NAMES)
def test_a_zero_file_names_the_deepspeed_file_of_its_name(name: str) -> None:
    settings = config(name)["deepspeed_config"]
    assert settings["deepspeed_config_file"] == f"ds_configs/{name}.json"
    assert settings["zero3_init_flag"] is name.startswith("zero3")
    assert settings["deepspeed_multinode_launcher"] == "standard"  # accelerate's own, as SECURITY.md says


@pytest.mark.parametrize("name", DS_NAMES)
def test_a_deepspeed_file_leaves_everything_that_a_flag_says_to_the_flag(name: str) -> None:
    content = ds_config(name)
    assert {key: value for key, value in content.items() if key not in SPLITS} == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
    }
    assert {key.partition(".")[0] for key in OVERLAP} <= {*content, "optimizer", "scheduler"}


@pytest.mark.parametrize("name", DS_NAMES)
def test_a_deepspeed_file_has_the_stage_in_its_name(name: str) -> None:
    zero = ds_config(name)["zero_optimization"]
    assert zero["stage"] == int(name[4])
    offloaded = {key for key in zero if key.startswith("offload_")}
    assert offloaded == {
        "zero2_offload": {"offload_optimizer"},
        "zero3_offload": {"offload_optimizer", "offload_param"},
    }.get(name, set())
    assert ds_config(name).get("tensor_parallel") == ({"autotp_size": 2} if name.endswith("_tp") else None)
    if zero["stage"] == 3:
        assert zero["stage3_gather_16bit_weights_on_model_save"] is True

"""Strategy files as other tools write them run as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import BertConfig, PreTrainedConfig

from indictune.config.arguments import ModelArguments
from indictune.config.plan import AnyPlan
from indictune.config.recipe import read_recipe
from indictune.distributed.strategy_file import ignored_values, leave_to_plan, notes, taken_values
from indictune.errors import Problem
from indictune.preflight.checks import preflight
from indictune.preflight.derive import make_plan
from indictune.tasks.classification import Classification
from tests.launch_environment import launched
from tests.plans import codes
from tests.ranks.launching import BIN, SCRIPT, Run, free_port, start

# As `accelerate config` begins a file for one machine with eight GPUs.
MACHINE = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
DDP = {"distributed_type": "MULTI_GPU", "gpu_ids": "all", "mixed_precision": "bf16"}
ZERO_3: dict[str, Any] = {
    "distributed_type": "DEEPSPEED",
    "mixed_precision": "bf16",
    "deepspeed_config": {
        "zero_stage": 3,
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
    },
}
FSDP_1: dict[str, Any] = {
    "distributed_type": "FSDP",
    "enable_cpu_affinity": False,
    "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_forward_prefetch": True,
        "fsdp_offload_params": False,
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": True,
    },
}
JOB = """
model_name_or_path: builtin:tiny-indic-bert
max_length: 16
global_batch_size: 8
per_device_train_batch_size: 2
max_steps: 2
logging_steps: 1
eval_strategy: 'no'
save_strategy: 'no'
load_best_model_at_end: false
"""
TWEETS = ("बहुत अच्छा", "चलो ठीक", "एकदम बेकार", "చాలా బాగుంది")


class Tiny(Classification):
    """Of a model that no file has."""

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return BertConfig()


def written(folder: Path, *parts: dict[str, Any]) -> Path:
    """An accelerate config of `MACHINE` and some more keys."""
    file = folder / "theirs.yaml"
    content = MACHINE | {key: value for part in parts for key, value in part.items()}
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


def planned(file: Path, *flags: str) -> tuple[AnyPlan, list[Problem]]:
    """The plan of one of two processes under an accelerate config, and all its problems."""
    task = Tiny()
    argv = ["--output_dir", "out", "--dataset_name", "builtin:tweets", *flags]
    plan, problems = make_plan(read_recipe(argv, task.arguments()), launched(file), task)
    return plan, problems + preflight(plan, task)


def run(file: Path, folder: Path, *flags: str) -> tuple[Run, str]:
    """A finished run of a tiny model under an accelerate config, and what it printed."""
    rows = [{"text": f"{TWEETS[n % 4]} {n}", "label": "pn"[n % 2]} for n in range(16)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "job.yaml").write_text(JOB + f"train_file: {folder / 'train.jsonl'}\n", encoding="utf-8")
    launcher = [str(BIN / "accelerate"), "launch", "--config_file", str(file), "--num_processes", "2"]
    command = [*launcher, "--main_process_port", str(free_port()), SCRIPT, "--config", str(folder / "job.yaml")]
    result = start([*command, "--output_dir", str(folder / "out"), *flags])
    assert result.returncode == 0, result.stderr
    return Run(folder / "out"), result.stderr


def recorded(run: Run) -> dict[str, Any]:
    return dict(yaml.safe_load((run.folder / "recipe.yaml").read_text(encoding="utf-8")))


class TestRuns:
    """Two real processes over gloo."""

    def test_ddp_with_a_precision(self, tmp_path: Path) -> None:
        done, printed = run(written(tmp_path, DDP), tmp_path)
        assert done.metrics["strategy"] == "ddp"
        assert recorded(done)["bf16"] is True
        assert "From the strategy file: --bf16 true" in printed
        assert "Ignoring" not in printed

    def test_zero3_with_a_fixed_accumulation(self, tmp_path: Path) -> None:
        done, printed = run(written(tmp_path, ZERO_3), tmp_path, "--bf16", "false")
        assert done.metrics["strategy"] == "zero3"
        assert (recorded(done)["bf16"], recorded(done)["max_grad_norm"]) == (False, 0.5)
        (line,) = [line for line in printed.splitlines() if "Ignoring" in line]
        assert "gradient_accumulation_steps 1 (2 follows from --global_batch_size 8)" in line
        assert "mixed_precision bf16 (--bf16 false counts)" in line

    def test_fsdp_1(self, tmp_path: Path) -> None:
        done, printed = run(written(tmp_path, FSDP_1), tmp_path)
        assert done.metrics["strategy"] == "fsdp2"
        assert recorded(done)["bf16"] is True
        (line,) = [line for line in printed.splitlines() if "FSDP 1" in line]
        assert "SHARD_GRAD_OP is reshard_after_forward false" in line
        assert "Ignoring" not in printed


class TestWhatCounts:
    """The recipe and the flags; where they say nothing, the strategy file."""

    @pytest.mark.parametrize(
        ("precision", "flags", "fields", "ignored"),
        [
            ("bf16", (), (True, False), False),
            ("no", (), (False, False), False),
            ("no", ("--bf16", "true"), (True, False), False),
            ("bf16", ("--bf16", "true"), (True, False), False),
            ("bf16", ("--fp16", "false"), (True, False), False),
            ("bf16", ("--bf16", "false"), (False, False), True),
            ("fp16", ("--bf16", "true"), (True, False), True),
        ],
    )
    def test_a_precision(
        self, tmp_path: Path, precision: str, flags: tuple[str, ...], fields: tuple[bool, bool], ignored: bool
    ) -> None:
        plan, problems = planned(written(tmp_path, DDP, {"mixed_precision": precision}), *flags)
        assert problems == []
        assert (plan.training.bf16, plan.training.fp16) == fields
        assert len(ignored_values(plan)) == ignored

    def test_a_precision_that_needs_a_gpu_is_refused_as_the_flag_is(self, tmp_path: Path) -> None:
        _, problems = planned(written(tmp_path, DDP, {"mixed_precision": "fp16"}))
        assert codes(problems) == [("fp16-without-gpu", "--fp16")]

    def test_a_compiler(self, tmp_path: Path) -> None:
        dynamo = {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"}}
        file = written(tmp_path, DDP, dynamo)
        plan, _ = planned(file)
        training = plan.training
        assert (training.torch_compile, training.torch_compile_backend) == (True, "inductor")
        assert training.torch_compile_mode == "max-autotune"
        plan, _ = planned(file, "--torch_compile", "false")
        assert plan.training.torch_compile is False
        assert "dynamo_backend inductor (--torch_compile false counts)" in ignored_values(plan)[0]

    def test_accumulation_and_clipping(self, tmp_path: Path) -> None:
        file = written(tmp_path, ZERO_3)
        plan, problems = planned(file, "--global_batch_size", "32", "--per_device_train_batch_size", "4")
        assert problems == []
        assert (plan.training.gradient_accumulation_steps, plan.training.max_grad_norm) == (4, 0.5)
        assert taken_values(plan) == "--bf16 true --max_grad_norm 0.5"
        (ignored,) = ignored_values(plan)
        assert "gradient_accumulation_steps 1 (4 follows from --global_batch_size 32)" in ignored
        plan, _ = planned(file, "--max_grad_norm", "2")
        assert plan.training.max_grad_norm == 2
        assert "gradient_clipping 0.5 (--max_grad_norm 2.0 counts)" in ignored_values(plan)[0]

    def test_an_accumulation_that_is_ours_is_not_named(self, tmp_path: Path) -> None:
        plan, _ = planned(written(tmp_path, ZERO_3), "--global_batch_size", "8", "--per_device_train_batch_size", "4")
        assert ignored_values(plan) == []

    def test_libraries_see_what_the_plan_has(self, tmp_path: Path) -> None:
        file = written(tmp_path, ZERO_3, {"mixed_precision": "fp16"})
        plan, _ = planned(file, "--bf16", "true")
        environ = launched(file)
        assert leave_to_plan(plan.launch, environ) == {"deepspeed": None}
        assert environ["ACCELERATE_MIXED_PRECISION"] == "no"
        assert not {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING"} & environ.keys()


def fsdp(**settings: Any) -> dict[str, Any]:
    """`FSDP_1` with other settings; None leaves one out."""
    merged = {**FSDP_1["fsdp_config"], **settings}
    return FSDP_1 | {"fsdp_config": {key: value for key, value in merged.items() if value is not None}}


class TestFSDP:
    """Settings of FSDP 1 and their counterparts."""

    @pytest.mark.parametrize(
        ("settings", "reshards"),
        [
            ({"fsdp_sharding_strategy": "FULL_SHARD"}, "true"),
            ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "false"),
            ({"fsdp_sharding_strategy": 1}, "true"),
            ({"fsdp_sharding_strategy": 2}, "false"),
            ({"fsdp_sharding_strategy": None}, "true"),
            ({"fsdp_sharding_strategy": None, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, "false"),
            ({"fsdp_sharding_strategy": None, "fsdp_reshard_after_forward": False, "fsdp_version": 2}, "false"),
        ],
    )
    def test_a_sharding_strategy(self, tmp_path: Path, settings: dict[str, Any], reshards: str) -> None:
        file = written(tmp_path, fsdp(**settings))
        plan, problems = planned(file)
        assert (problems, plan.launch.strategy) == ([], "fsdp2")
        assert len(notes(plan)) == ("fsdp_version" not in settings)
        environ = launched(file)
        leave_to_plan(plan.launch, environ)
        assert (environ["FSDP_VERSION"], environ["FSDP_RESHARD_AFTER_FORWARD"]) == ("2", reshards)

    @pytest.mark.parametrize(
        ("file", "keys"),
        [
            (fsdp(fsdp_sharding_strategy="NO_SHARD"), ["fsdp_sharding_strategy: NO_SHARD"]),
            (fsdp(fsdp_sharding_strategy="HYBRID_SHARD_ZERO2"), ["fsdp_sharding_strategy: HYBRID_SHARD_ZERO2"]),
            (
                fsdp(fsdp_sharding_strategy=4, fsdp_ignored_modules="bert.pooler"),
                ["fsdp_sharding_strategy: HYBRID_SHARD", "fsdp_ignored_modules: bert.pooler"],
            ),
            (
                fsdp(fsdp_version=2, fsdp_activation_checkpointing=True, fsdp_activation_checkpointing_offload=True),
                ["fsdp_activation_checkpointing_offload: true"],
            ),
            (
                fsdp(fsdp_version=2, fsdp_reshard_after_forward=True)
                | {"parallelism_config": {"parallelism_config_cp_size": 2}},
                ["parallelism_config_cp_size: 2"],
            ),
        ],
    )
    def test_what_has_no_counterpart_is_named(self, tmp_path: Path, file: dict[str, Any], keys: list[str]) -> None:
        _, problems = planned(written(tmp_path, file))
        assert [(each.code, each.value) for each in problems] == [("strategy-file-not-supported", ", ".join(keys))]

    def test_offloading(self, tmp_path: Path) -> None:
        plan, _ = planned(written(tmp_path, fsdp(fsdp_offload_params=True)))
        assert plan.launch.strategy == "fsdp2_offload"

    def test_layers_are_those_of_the_model_and_checkpoints_are_shards(self, tmp_path: Path) -> None:
        settings = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000}
        file = written(tmp_path, fsdp(**settings))
        plan, problems = planned(file)
        assert problems == []
        assert "fsdp_auto_wrap_policy SIZE_BASED_WRAP" in ignored_values(plan)[0]
        environ = launched(file)
        leave_to_plan(plan.launch, environ)
        assert environ["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
        assert environ["FSDP_STATE_DICT_TYPE"] == "SHARDED_STATE_DICT"

    def test_recomputed_activations_are_the_flags(self, tmp_path: Path) -> None:
        file = written(tmp_path, fsdp(fsdp_activation_checkpointing=True))
        plan, _ = planned(file)
        assert plan.training.gradient_checkpointing is True
        plan, _ = planned(file, "--gradient_checkpointing", "false")
        assert plan.training.gradient_checkpointing is False
        environ = launched(file)
        leave_to_plan(plan.launch, environ)
        assert environ["FSDP_ACTIVATION_CHECKPOINTING"] == "false"

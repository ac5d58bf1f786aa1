"""Which values of a strategy file count, and what becomes of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from indictune.distributed.strategy import hide_file_values, ignored_values, notes_on_file, taken_values
from tests.launch_environment import launched
from tests.plans import codes
from tests.plans_under_files import planned

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


def written(folder: Path, *parts: dict[str, Any]) -> Path:
    """An accelerate config of `MACHINE` and some more keys."""
    file = folder / "theirs.yaml"
    content = MACHINE | {key: value for part in parts for key, value in part.items()}
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


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
        assert hide_file_values(plan.launch, environ) == {"deepspeed": None}
        assert environ["ACCELERATE_MIXED_PRECISION"] == "no"
        assert not {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING"} & environ.keys()


def fsdp(**settings: Any) -> dict[str, Any]:
    """`FSDP_1` with other settings; None leaves one out."""
    merged = {**FSDP_1["fsdp_config"], **settings}
    return FSDP_1 | {"fsdp_config": {key: value for key, value in merged.items() if value is not None}}


def mesh(replicas: int, shards: int) -> dict[str, Any]:
    """FSDP2 with sizes of data parallelism."""
    sizes = {"parallelism_config_dp_replicate_size": replicas, "parallelism_config_dp_shard_size": shards}
    return fsdp(fsdp_version=2, fsdp_reshard_after_forward=True) | {"parallelism_config": sizes}


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
        assert len(notes_on_file(plan)) == ("fsdp_version" not in settings)
        environ = launched(file)
        hide_file_values(plan.launch, environ)
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
                | {"parallelism_config": {"parallelism_config_sp_size": 2}},
                ["parallelism_config_sp_size: 2"],
            ),
            (
                DDP | {"parallelism_config": {"parallelism_config_cp_size": 2}},
                ["parallelism_config_cp_size: 2 with ddp"],
            ),
        ],
    )
    def test_what_has_no_counterpart_is_named(self, tmp_path: Path, file: dict[str, Any], keys: list[str]) -> None:
        _, problems = planned(written(tmp_path, file))
        assert [(each.code, each.value) for each in problems] == [("strategy-file-not-supported", ", ".join(keys))]

    @pytest.mark.parametrize(("replicas", "shards"), [(1, 8), (2, 1), (2, 2)])
    def test_sizes_for_other_processes_are_refused(self, tmp_path: Path, replicas: int, shards: int) -> None:
        _, problems = planned(written(tmp_path, mesh(replicas, shards)))
        assert [(each.code, each.value) for each in problems] == [("axes-do-not-multiply", 2)]

    def test_sizes_of_data_parallelism_that_fit(self, tmp_path: Path) -> None:
        plan, problems = planned(written(tmp_path, mesh(1, 2)))
        assert (problems, plan.launch.strategy) == ([], "fsdp2")
        file = written(tmp_path, DDP, {"parallelism_config": {"parallelism_config_dp_replicate_size": 2}})
        plan, problems = planned(file)
        assert (problems, plan.launch.strategy) == ([], "ddp")
        environ = launched(file)
        hide_file_values(plan.launch, environ)
        assert "ACCELERATE_USE_PARALLELISM_CONFIG" not in environ

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
        hide_file_values(plan.launch, environ)
        assert environ["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
        assert environ["FSDP_STATE_DICT_TYPE"] == "SHARDED_STATE_DICT"

    def test_recomputed_activations_are_the_flags(self, tmp_path: Path) -> None:
        file = written(tmp_path, fsdp(fsdp_activation_checkpointing=True))
        plan, _ = planned(file)
        assert plan.training.gradient_checkpointing is True
        plan, _ = planned(file, "--gradient_checkpointing", "false")
        assert plan.training.gradient_checkpointing is False
        environ = launched(file)
        hide_file_values(plan.launch, environ)
        assert environ["FSDP_ACTIVATION_CHECKPOINTING"] == "false"

"""What the launcher asked for: the environments were printed by each launcher (accelerate 1.15, torch 2.13)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from indictune.config.plan import Launch
from indictune.distributed.launch import deepspeed_file, for_evaluation, rank_of, read_deepspeed, read_launch
from indictune.errors import UserError

ROOT = Path(__file__).parents[2]

# Rank 1 of 2 processes.
TORCHRUN = {
    "LOCAL_RANK": "1", "RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "35071", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
ACCELERATE_DDP = TORCHRUN | ACCELERATE
ACCELERATE_FSDP = ACCELERATE_DDP | {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "false",
}  # fmt: skip
ACCELERATE_DEEPSPEED = ACCELERATE_DDP | {
    "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero3_init_flag",
}  # fmt: skip
DEEPSPEED = {
    "LOCAL_RANK": "1", "RANK": "1", "LOCAL_SIZE": "2", "WORLD_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip
# `distributed_type: NO`, or --cpu: one process.
ACCELERATE_PLAIN = ACCELERATE | {"ACCELERATE_USE_CPU": "False"}
ALONE = {"LOCAL_RANK": "0", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}


def launch_of(environ: dict[str, str], deepspeed_flag: str | None = None) -> tuple[str, int, int, int]:
    """The strategy, world size, local world size and rank."""
    launch = read_launch(environ, deepspeed_file(environ, deepspeed_flag))
    return launch.strategy, launch.world_size, launch.local_world_size, launch.rank


def shipped(name: str) -> str:
    return str(ROOT / "ds_configs" / f"{name}.json")


@pytest.mark.parametrize("environ", [{}, {"OMP_NUM_THREADS": "1"}, ACCELERATE_PLAIN])
def test_one_process_without_a_group_is_single(environ: dict[str, str]) -> None:
    assert launch_of(environ) == ("single", 1, 1, 0)


@pytest.mark.parametrize("environ", [TORCHRUN, ACCELERATE_DDP, DEEPSPEED])
def test_ranks_without_a_sharding_strategy_are_ddp(environ: dict[str, str]) -> None:
    assert launch_of(environ) == ("ddp", 2, 2, 1)


@pytest.mark.parametrize("environ", [TORCHRUN, ACCELERATE_DDP])
def test_a_group_of_one_is_still_the_strategy_that_was_asked_for(environ: dict[str, str]) -> None:
    assert launch_of(environ | ALONE) == ("ddp", 1, 1, 0)


def test_accelerates_fsdp_is_read_with_its_offloading() -> None:
    assert launch_of(ACCELERATE_FSDP) == ("fsdp2", 2, 2, 1)
    assert launch_of(ACCELERATE_FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}) == ("fsdp2_offload", 2, 2, 1)


def test_the_trainers_own_fsdp_flag_counts_too() -> None:
    assert read_launch(TORCHRUN, fsdp="full_shard").strategy == "fsdp2"


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"])
def test_every_launcher_reads_the_shipped_deepspeed_files_by_their_names(name: str) -> None:
    assert launch_of(TORCHRUN, shipped(name)) == (name, 2, 2, 1)
    assert launch_of(DEEPSPEED, shipped(name)) == (name, 2, 2, 1)
    in_config = ACCELERATE_DEEPSPEED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": shipped(name)}
    assert launch_of(in_config) == (name, 2, 2, 1)


def test_a_flag_beside_another_file_of_the_accelerate_config_is_refused() -> None:
    """The launcher's own choice is never replaced in silence; the same file twice is no contradiction."""
    file = "ds_configs/zero3.json"
    in_config = ACCELERATE_DEEPSPEED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": file}
    assert deepspeed_file(in_config, None) == file
    assert deepspeed_file(in_config, file) == file
    with pytest.raises(UserError, match=f"--deepspeed mine\\.json: the accelerate config names {file}"):
        deepspeed_file(in_config, "mine.json")
    with pytest.raises(UserError, match=r"--deepspeed mine\.json: the accelerate config asks for FSDP"):
        deepspeed_file({"ACCELERATE_USE_FSDP": "true"}, "mine.json")


def test_evaluation_runs_side_by_side_where_a_stage_splits_only_training() -> None:
    environ = {"ACCELERATE_USE_DEEPSPEED": "true"}
    evaluated = for_evaluation(Launch("zero2_offload", 2, 2, 1, {"zero_optimization": {"stage": 2}}), environ)
    assert evaluated == Launch("ddp", 2, 2, 1, None)
    assert environ == {}
    kept = Launch("zero3", 2, 2, 1, {"zero_optimization": {"stage": 3}})
    assert for_evaluation(kept, environ) is kept


def test_a_deepspeed_file_that_no_launcher_asked_for_is_not_read() -> None:
    left_over = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero3.json"}
    assert deepspeed_file(left_over, None) is None
    assert deepspeed_file(left_over | {"ACCELERATE_USE_DEEPSPEED": "false"}, None) is None


def test_an_accelerate_config_may_hold_the_stage_itself() -> None:
    assert launch_of(ACCELERATE_DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"})[0] == "zero3"
    assert launch_of(ACCELERATE_DEEPSPEED)[0] == "zero2"  # accelerate's default


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_two_nodes_of_eight_have_eight_processes_each(launcher: str) -> None:
    ranks = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "10.0.0.1"}
    here = {"torchrun": {"LOCAL_WORLD_SIZE": "8"}, "deepspeed": {"LOCAL_SIZE": "8"}}[launcher]
    assert launch_of(ranks | here) == ("ddp", 16, 8, 11)


def test_processes_that_do_not_know_how_many_are_on_their_node_are_refused() -> None:
    with pytest.raises(UserError, match=r"WORLD_SIZE is 16, and LOCAL_WORLD_SIZE, .* is not set"):
        launch_of({"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "10.0.0.1"})
    assert launch_of({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}) == ("ddp", 1, 1, 0)


@pytest.mark.parametrize("flag", ["False", "True"])  # distributed_type: NO, and --cpu
def test_several_processes_asked_for_and_one_started_is_refused(flag: str) -> None:
    environ = ACCELERATE_PLAIN | {"ACCELERATE_USE_CPU": flag, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(UserError) as raised:
        launch_of(environ)
    assert raised.value.problems == [
        "accelerate launch was asked for more than one process and has started one: the config file has "
        "`distributed_type: NO`, or --cpu was given. Use accelerate_configs/ddp.yaml (it also runs on a CPU), or "
        "--num_processes 1."
    ]


def test_an_address_that_a_cluster_sets_is_no_reason_to_refuse_plain_python() -> None:
    assert launch_of({"MASTER_ADDR": "10.0.0.1"}) == ("single", 1, 1, 0)


def test_plain_python_with_deepspeed_is_refused_with_the_ways_to_start_it() -> None:
    with pytest.raises(UserError) as raised:
        launch_of({}, shipped("zero2"))
    assert raised.value.problems == [
        f"--deepspeed {shipped('zero2')}: plain python cannot start DeepSpeed. Start the script with "
        "`deepspeed --num_gpus 1`, `torchrun --nproc_per_node 1` or `accelerate launch`."
    ]


def test_fsdp_1_is_refused_with_what_its_file_lacks() -> None:
    with pytest.raises(UserError, match=r"accelerate was asked for FSDP 1, .* Write `fsdp_version: 2` below"):
        read_launch({**ACCELERATE, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("environ", "flag", "asked"),
    [({}, "full_shard", "--fsdp full_shard"), ({"ACCELERATE_USE_FSDP": "true"}, None, "ACCELERATE_USE_FSDP")],
)
def test_plain_python_with_fsdp_is_refused_with_the_ways_to_start_it(
    environ: dict[str, str], flag: str | None, asked: str
) -> None:
    with pytest.raises(UserError) as raised:
        read_launch(environ, fsdp=flag)
    assert raised.value.problems == [
        f"{asked}: plain python cannot start FSDP. Start the script with `torchrun --nproc_per_node 1` or `accelerate "
        "launch --config_file accelerate_configs/fsdp2.yaml`, or leave it out."
    ]


class TestDeepSpeedFile:
    def test_it_is_read_from_a_file_or_from_the_text_itself(self, tmp_path: Path) -> None:
        content = {"zero_optimization": {"stage": 2}, "note": "हिन्दी"}
        (tmp_path / "ds.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        assert read_deepspeed(str(tmp_path / "ds.json")) == content
        assert read_deepspeed(" " + json.dumps(content)) == content

    def test_the_launch_keeps_its_content(self) -> None:
        assert read_launch(TORCHRUN, '{"zero_optimization": {"stage": 1}}').deepspeed == {
            "zero_optimization": {"stage": 1}
        }
        assert read_launch(ACCELERATE_DEEPSPEED).deepspeed == {}
        assert read_launch(TORCHRUN).deepspeed is None

    def test_a_missing_file_is_told(self) -> None:
        with pytest.raises(UserError) as raised:
            read_launch(TORCHRUN, "no/such.json")
        assert raised.value.problems == [
            "--deepspeed no/such.json: cannot be read (No such file or directory). The path counts from the folder in "
            "which the command is typed."
        ]

    def test_broken_json_is_told_with_its_place(self, tmp_path: Path) -> None:
        path = tmp_path / "ds.json"
        path.write_text('{"zero_optimization": {"stage": 2},\n}')
        with pytest.raises(UserError, match=r"ds\.json: is not valid JSON: .*line 2"):
            read_launch(TORCHRUN, str(path))

    def test_what_is_no_object_is_told(self, tmp_path: Path) -> None:
        path = tmp_path / "ds.json"
        path.write_text("[2]")
        with pytest.raises(UserError, match=r"ds\.json: expected a JSON object, found list\."):
            read_launch(TORCHRUN, str(path))

    @pytest.mark.parametrize(
        ("zero", "name"),
        [
            ('{"stage": 3, "offload_param": {"device": "nvme"}}', "zero3_offload"),
            ('{"stage": 2, "offload_optimizer": {"device": "none"}}', "zero2"),
            ('{"stage": 3, "offload_optimizer": null}', "zero3"),
            ("{}", "zero0"),
            ("null", "zero0"),
        ],
    )
    def test_the_name_follows_from_stage_and_offloading(self, zero: str, name: str) -> None:
        assert launch_of(TORCHRUN, f'{{"zero_optimization": {zero}}}')[0] == name


@pytest.mark.parametrize(
    ("strategy", "family"),
    [("single", "single"), ("fsdp2_offload", "fsdp2"), ("zero3_offload", "zero3"), ("zero1", "zero1")],
)
def test_the_family_is_the_strategy_without_offloading(strategy: str, family: str) -> None:
    assert Launch(strategy).family == family


def test_the_rank_is_known_without_reading_anything_else() -> None:
    assert rank_of(TORCHRUN) == 1
    assert rank_of(ACCELERATE_PLAIN) == 0

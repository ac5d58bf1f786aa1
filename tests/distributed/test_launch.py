"""What the launcher asked for: the environments were printed by each launcher (accelerate 1.15, torch 2.13)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from indictune.config.plan import Launch
from indictune.distributed.launch import (
    engine_of,
    for_evaluation,
    is_one_node,
    rank_of,
    read_deepspeed,
    read_launch,
    starts_one_of_several,
)
from tests.refusals import refused

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
    launch = read_launch(environ, deepspeed_flag)
    return launch.strategy, launch.world_size, launch.local_world_size, launch.rank


def shipped(name: str) -> str:
    return str(ROOT / "ds_configs" / f"{name}.json")


@pytest.mark.parametrize("environ", [{}, {"OMP_NUM_THREADS": "1"}, ACCELERATE_PLAIN])
def test_one_process_without_a_group_is_single(environ: dict[str, str]) -> None:
    assert launch_of(environ) == ("single", 1, 1, 0)


@pytest.mark.parametrize("environ", [TORCHRUN, ACCELERATE_DDP, DEEPSPEED])
def test_ranks_without_a_sharding_strategy_are_ddp(environ: dict[str, str]) -> None:
    assert launch_of(environ) == ("ddp", 2, 2, 1)


@pytest.mark.parametrize("environ", [{}, TORCHRUN, DEEPSPEED])
def test_other_nodes_are_seen_by_the_sizes_of_every_launcher(environ: dict[str, str]) -> None:
    assert is_one_node(environ)
    assert not is_one_node({"LOCAL_WORLD_SIZE": "1", **environ, "WORLD_SIZE": "4"})


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


def test_a_flag_that_contradicts_the_accelerate_config_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "ds_configs/zero3.json"
    in_config = ACCELERATE_DEEPSPEED | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": file}
    monkeypatch.chdir(ROOT)
    assert read_launch(in_config) == read_launch(in_config, file)
    with refused("launcher-contradicts-flag", file, flag="--deepspeed"):
        read_launch(in_config, "mine.json")
    with refused("launcher-contradicts-flag", "FSDP", flag="--deepspeed"):
        read_launch(ACCELERATE_FSDP, "mine.json")


def test_evaluation_under_zero_1_and_2_is_ddp() -> None:
    environ = {"ACCELERATE_USE_DEEPSPEED": "true"}
    evaluated = for_evaluation(Launch("zero2_offload", 2, 2, 1, {"zero_optimization": {"stage": 2}}), environ)
    assert evaluated == Launch("ddp", 2, 2, 1, None)
    assert environ == {}
    kept = Launch("zero3", 2, 2, 1, {"zero_optimization": {"stage": 3}})
    assert for_evaluation(kept, environ) is kept


def test_a_deepspeed_file_that_no_launcher_asked_for_is_not_read() -> None:
    left_over = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero3.json"}
    assert read_launch(left_over).deepspeed is None
    assert read_launch(left_over | {"ACCELERATE_USE_DEEPSPEED": "false"}).deepspeed is None


def test_an_accelerate_config_may_hold_the_stage_itself() -> None:
    assert launch_of(ACCELERATE_DEEPSPEED | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"})[0] == "zero3"
    assert launch_of(ACCELERATE_DEEPSPEED)[0] == "zero2"  # accelerate's default
    offloaded = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}
    assert launch_of(ACCELERATE_DEEPSPEED | offloaded)[0] == "zero3_offload"


def test_an_accelerate_configs_values_are_read_as_those_of_a_deepspeed_file() -> None:
    values = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_GRADIENT_CLIPPING": "0.5"}
    config = read_launch(ACCELERATE_DEEPSPEED | values).deepspeed
    assert config is not None
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (4, 0.5)


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_two_nodes_of_eight_have_eight_processes_each(launcher: str) -> None:
    ranks = {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "10.0.0.1"}
    here = {"torchrun": {"LOCAL_WORLD_SIZE": "8"}, "deepspeed": {"LOCAL_SIZE": "8"}}[launcher]
    assert launch_of(ranks | here) == ("ddp", 16, 8, 11)


def test_processes_that_do_not_know_how_many_are_on_their_node_are_refused() -> None:
    with refused("local-world-size-missing", "16"):
        launch_of({"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "10.0.0.1"})
    assert launch_of({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}) == ("ddp", 1, 1, 0)


def test_several_processes_asked_for_and_one_started() -> None:
    several = {**ACCELERATE_PLAIN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with refused("one-process-started", flag="--num_processes"):
        launch_of({**several, "ACCELERATE_USE_CPU": "True"})  # --cpu
    of_one = {**several, "ACCELERATE_USE_CPU": "False"}  # distributed_type: NO
    assert (launch_of(of_one), starts_one_of_several(of_one)) == (("single", 1, 1, 0), True)
    assert not starts_one_of_several(ACCELERATE_PLAIN)


def test_plain_python_may_have_a_master_address() -> None:
    assert launch_of({"MASTER_ADDR": "10.0.0.1"}) == ("single", 1, 1, 0)


def test_fsdp_1_is_fsdp2_where_it_has_the_same() -> None:
    version_1 = {**ACCELERATE_FSDP, "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}
    assert launch_of(version_1) == ("fsdp2", 2, 2, 1)
    with refused("strategy-file-not-supported", "fsdp_sharding_strategy: HYBRID_SHARD"):
        launch_of({**version_1, "FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"})


def test_plain_python_starts_no_sharding_strategy() -> None:
    with refused("launcher-missing", "zero2"):
        launch_of({}, shipped("zero2"))
    for environ, flag in (({}, "full_shard"), ({"ACCELERATE_USE_FSDP": "true"}, None)):
        with refused("launcher-missing", "fsdp2"):
            read_launch(environ, fsdp=flag)


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
        assert read_launch(TORCHRUN).deepspeed is None

    def test_a_missing_file_is_refused(self) -> None:
        with refused("unreadable", "no/such.json", "No such file", flag="--deepspeed"):
            read_launch(TORCHRUN, "no/such.json")

    @pytest.mark.parametrize(
        ("text", "reason"), [('{"zero_optimization": {"stage": 2},\n}', "line 2"), ("[2]", "found list")]
    )
    def test_broken_json_is_refused(self, tmp_path: Path, text: str, reason: str) -> None:
        path = tmp_path / "ds.json"
        path.write_text(text)
        with refused("invalid-json", "ds.json", reason, flag="--deepspeed"):
            read_launch(TORCHRUN, str(path))

    @pytest.mark.parametrize(
        ("zero", "name"),
        [
            ('{"stage": 3, "offload_param": {"device": "nvme"}}', "zero3_offload"),
            ('{"stage": 2, "offload_optimizer": {"device": "none"}}', "zero2"),
            ('{"stage": 3, "offload_optimizer": null}', "zero3"),
            ('{"stage": 0}', "ddp"),  # shards nothing
            ("{}", "ddp"),
            ("null", "ddp"),
        ],
    )
    def test_the_name_follows_from_stage_and_offloading(self, zero: str, name: str) -> None:
        assert launch_of(TORCHRUN, f'{{"zero_optimization": {zero}}}')[0] == name


@pytest.mark.parametrize(
    ("strategy", "family"),
    [("single", "single"), ("fsdp2_offload", "fsdp2"), ("zero3_offload", "zero3"), ("zero1", "zero1")],
)
def test_the_family_is_the_strategy_without_offloading(strategy: str, family: str) -> None:
    assert engine_of(strategy) == family


def test_the_rank_is_known_without_reading_anything_else() -> None:
    assert rank_of(TORCHRUN) == 1
    assert rank_of(ACCELERATE_PLAIN) == 0

"""Sizes of the axes, from environments as accelerate's launcher makes them."""

from __future__ import annotations

from typing import Any

import pytest

from indictune.config.plan import Axes, Launch
from indictune.distributed.launch import hand_over, read_axes, shown_axes
from indictune.errors import UserError
from tests.refusals import refused

FSDP = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


def mesh(**sizes: int) -> dict[str, str]:
    """The variables of a `parallelism_config`, such as `TP=2`."""
    return {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()}


def stages(pipeline: int, tensor: int = 1, shards: bool = False) -> dict[str, str]:
    """The variables of a `megatron_lm_config`."""
    environ = {"MEGATRON_LM_PP_DEGREE": str(pipeline), "MEGATRON_LM_TP_DEGREE": str(tensor)}
    return environ | {"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_USE_CUSTOM_FSDP": str(shards)}


def axes_of(
    environ: dict[str, str], world_size: int, on_node: int = 8, deepspeed: dict[str, Any] | None = None
) -> Axes:
    """The axes of FSDP2 if the environment says so."""
    is_fsdp = "ACCELERATE_USE_FSDP" in environ
    return read_axes(environ, deepspeed or {}, world_size, min(on_node, world_size), is_fsdp)


@pytest.mark.parametrize(
    ("environ", "world_size", "axes"),
    [
        ({}, 8, Axes()),
        (mesh(DP_REPLICATE=8), 8, Axes()),
        (FSDP, 8, Axes(is_sharded=True)),
        (mesh(TP=2), 8, Axes(tensor=2)),
        (mesh(TP=-1), 8, Axes(tensor=8)),
        (mesh(TP=-1), 16, Axes(tensor=8)),  # of one node
        (FSDP | mesh(TP=2), 8, Axes(tensor=2, is_sharded=True)),
        (FSDP | mesh(CP=2), 2, Axes(context=2, is_sharded=True)),  # FSDP2 shards over the context axis too
        (FSDP | mesh(CP=-1), 16, Axes(context=8, is_sharded=True)),  # of one node
        (FSDP | mesh(DP_REPLICATE=-1), 16, Axes(replicas=2, is_sharded=True)),  # one on each node
        (FSDP | mesh(DP_REPLICATE=-1, DP_SHARD=2), 8, Axes(replicas=4, is_sharded=True)),
        (FSDP | mesh(DP_REPLICATE=2), 8, Axes(replicas=2, is_sharded=True)),
        (FSDP | mesh(DP_REPLICATE=-1, TP=2), 16, Axes(tensor=2, replicas=2, is_sharded=True)),
        (stages(-1), 4, Axes(pipeline=4)),
        (stages(2), 8, Axes(pipeline=2)),
        (stages(2, 2), 8, Axes(pipeline=2, tensor=2)),
        (stages(2, -1), 16, Axes(pipeline=2, tensor=4)),
        (stages(2, 1, shards=True), 4, Axes(pipeline=2, is_sharded=True)),
        (mesh(DP_REPLICATE=-1, TP=2), 8, Axes(tensor=2)),
    ],
)
def test_open_sizes_follow_from_the_number_of_processes(environ: dict[str, str], world_size: int, axes: Axes) -> None:
    assert axes_of(environ, world_size) == axes


@pytest.mark.parametrize(("size", "tensor"), [(0, 1), (1, 1), (2, 2)])
def test_tensor_parallelism_of_a_deepspeed_file(size: int, tensor: int) -> None:
    assert axes_of({}, 4, deepspeed={"tensor_parallel": {"autotp_size": size}}).tensor == tensor


@pytest.mark.parametrize(
    ("environ", "world_size", "possible"),
    [
        (mesh(TP=4), 6, "data 2 x tensor 3; data 1 x tensor 6; data 3 x tensor 2; data 6 x tensor 1"),
        (mesh(DP_REPLICATE=3), 4, "data 4"),
        (FSDP | mesh(TP=2), 2, "shards 2 x tensor 1"),
        (FSDP | mesh(DP_SHARD=8), 2, "shards 2"),
        (FSDP | mesh(DP_REPLICATE=3), 4, "replicas 2 x shards 2; replicas 1 x shards 4"),
        (stages(3), 4, "pipeline 4 x data 1; pipeline 2 x data 2; pipeline 1 x data 4"),
        (stages(2, 2, shards=True), 4, "pipeline 1 x shards 2 x tensor 2; pipeline 2 x shards 2 x tensor 1"),
    ],
)
def test_another_product_is_refused_with_the_ones_that_are_possible(
    environ: dict[str, str], world_size: int, possible: str
) -> None:
    with refused("axes-do-not-multiply", possible, flag="--num_processes"):
        axes_of(environ, world_size)


def test_ranks_of_a_group_have_the_same_rows() -> None:
    axes = Axes(pipeline=2, tensor=2)
    launches = [Launch("3d", 8, 8, rank, axes=axes) for rank in range(8)]
    assert [each.data_rank for each in launches] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [each.measures_rows for each in launches] == [False, False, False, False, True, False, True, False]
    assert launches[0].data_size == 2
    assert shown_axes(launches[0]) == "data 2 x pipeline 2 x tensor 2"


def test_accelerate_gets_the_sizes_of_fsdp_alone() -> None:
    environ = FSDP | mesh(DP_REPLICATE=-1, TP=1, CP=1)
    hand_over(Axes(replicas=2, is_sharded=True), 8, environ)
    assert environ == FSDP | mesh(DP_REPLICATE=2, DP_SHARD=4, TP=1, CP=1)
    environ = FSDP | mesh(CP=2, TP=1)
    hand_over(Axes(context=2, is_sharded=True), 4, environ)
    assert environ == FSDP | mesh(DP_REPLICATE=1, DP_SHARD=4, TP=1, CP=1)
    environ = stages(2) | mesh(TP=2) | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
    hand_over(Axes(pipeline=2), 4, environ)
    assert not {"ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_PARALLELISM_CONFIG"} & environ.keys()


@pytest.mark.parametrize(
    ("environ", "deepspeed", "key"),
    [
        (mesh(TP=0), {}, "parallelism_config_tp_size: 0"),
        ({**mesh(TP=2), "PARALLELISM_CONFIG_TP_SIZE": "two"}, {}, "parallelism_config_tp_size: two"),
        (stages(0), {}, "megatron_lm_pp_degree: 0"),
        (stages(-2), {}, "megatron_lm_pp_degree: -2"),
        ({}, {"tensor_parallel": {"autotp_size": "auto"}}, "tensor_parallel.autotp_size: auto"),
        ({}, {"tensor_parallel": {"autotp_size": -1}}, "tensor_parallel.autotp_size: -1"),
    ],
)
def test_a_size_that_is_no_number_of_processes_is_refused(
    environ: dict[str, str], deepspeed: dict[str, Any], key: str
) -> None:
    with pytest.raises(UserError, match="strategy-file-not-supported") as error:
        axes_of(environ, 8, deepspeed=deepspeed)
    assert key in str(error.value)

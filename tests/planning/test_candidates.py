"""What a plan says of each strategy file, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import BertConfig, LlamaConfig

from indictune.config.arguments import DataArguments
from indictune.config.plan import AnyPlan, Axes, Launch, unresolved
from indictune.config.shared_arguments import MachineArguments
from indictune.models.config_shapes import meta_model
from indictune.planning.candidates import Candidate, MicroBatchSize, candidates, micro_batches
from indictune.planning.hardware import machine_of, machine_of_flags
from indictune.planning.memory import RankMemory, node_memory, written_bytes
from indictune.planning.rank_weights import ModelWeights
from indictune.planning.step_time import RowLengths
from tests.plans import plan_of

LLAMA = LlamaConfig(
    vocab_size=1000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=16,
    num_key_value_heads=16,
)  # fmt: skip
PARAMETERS = 2 * 1000 * 1024 + 8 * (4 * 1024**2 + 3 * 1024 * 4096) + (2 * 8 + 1) * 1024
BERT = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64)
SHARDED = Axes(is_sharded=True)


def planned(config: Any = LLAMA, method: str = "full", **training: Any) -> AnyPlan:
    plan = plan_of({"bf16": True, "global_batch_size": 64, **training}, {"method": method})
    head = "ForCausalLM" if isinstance(config, LlamaConfig) else "ForSequenceClassification"
    data = unresolved(DataArguments, {"max_length": 128})
    return replace(plan, data=data, model_config=config, head=head, gpus=8)


def weights_of(plan: AnyPlan, active_rows: int | None = None) -> ModelWeights:
    assert plan.model_config is not None
    return ModelWeights(meta_model(plan.model, plan.model_config, plan.head, active_rows))


def found(plan: AnyPlan, gpus: int = 8, **given: Any) -> dict[str, Candidate]:
    machine = replace(machine_of("h100", gpus), host_bytes=given.pop("host_bytes", 0.0))
    machine = replace(machine, memory_bytes=given.pop("memory_bytes", machine.memory_bytes))
    return {each.strategy: each for each in candidates(plan, weights_of(plan), machine, **given)}


@pytest.mark.parametrize(("checkpointing", "mfu"), [(False, 0.4), (True, 0.4 * 6 / 8)])
def test_a_gpu_that_waits_for_nothing_uses_what_it_achieves(checkpointing: bool, mfu: float) -> None:
    plan = planned(gradient_checkpointing=checkpointing, global_batch_size=4096)
    assert found(plan, gpus=1)["single_gpu"].mfu == pytest.approx(mfu, rel=0.01)


def test_bytes_of_a_step_take_their_time_on_the_link() -> None:
    step = found(planned())["ddp"].step
    assert step is not None
    assert step.sent_bytes == pytest.approx(2 * 7 / 8 * 4 * PARAMETERS)
    assert step.sent_s == pytest.approx(step.sent_bytes / (0.8 * 450e9))


def test_the_first_row_is_the_fastest_that_fits() -> None:
    ranked = list(found(planned(), memory_bytes=3.3e9).values())
    fitting = [each for each in ranked if each.fits]
    assert ranked[: len(fitting)] == fitting
    assert 0 < len(fitting) < len(ranked)
    assert all(each.memory is None or each.memory.total_bytes > 0.9 * 3.3e9 for each in ranked[len(fitting) :])


def test_a_tenth_of_the_memory_stays_free() -> None:
    memory = found(planned(), asked=8)["ddp"].memory
    assert memory is not None
    for share, fits in [(0.89, True), (0.91, False)]:
        assert found(planned(), asked=8, memory_bytes=memory.total_bytes / share)["ddp"].fits is fits


def test_of_steps_faster_than_python_the_plainest_file_comes_first() -> None:
    assert next(iter(found(planned(BERT)).values())).strategy == "ddp"


def test_the_largest_micro_batch_that_fits_is_found() -> None:
    roomy, tight = found(planned())["ddp"], found(planned(), memory_bytes=4e9)["ddp"]
    assert roomy.largest == MicroBatchSize(8, 8 * 128, 1)
    assert tight.largest is not None
    assert tight.largest.rows in (1, 2, 4)
    assert tight.fits


def test_a_micro_batch_that_is_asked_for_is_the_only_one() -> None:
    assert found(planned(), asked=2)["ddp"].rows == 2
    assert found(planned(), asked=3)["ddp"].refused


def test_groups_that_cannot_share_the_global_batch_are_refused() -> None:
    assert "--global_batch_size 4" in found(planned(global_batch_size=4))["ddp"].refused


@pytest.mark.parametrize(("rows", "asked", "sizes"), [(32, None, "30 or 33"), (32, 4, "24 or 36"), (2, None, "3")])
def test_a_global_batch_that_cannot_be_shared_names_the_nearest_that_can(
    rows: int, asked: int | None, sizes: str
) -> None:
    refused = found(planned(global_batch_size=rows), gpus=3, asked=asked)["ddp"].refused
    assert refused.endswith(f"use {sizes}")


def test_tokens_of_a_micro_batch_do_not_count_as_rows_of_the_global_batch() -> None:
    plan = planned(global_batch_size=32, max_tokens_per_device=512)
    assert found(plan, gpus=3, asked=512)["ddp"].refused.endswith("use 30 or 33")


def test_too_little_cpu_memory_rules_out_offloading() -> None:
    needed = found(planned())["zero3_offload"].node
    assert needed is not None
    short = found(planned(), host_bytes=needed.needed - 1)
    assert (short["zero3_offload"].fits, short["zero3"].fits) == (False, True)
    assert found(planned(), host_bytes=needed.needed)["zero3_offload"].fits


@pytest.mark.more
@pytest.mark.parametrize(("method", "optim"), [("qlora", 2), ("lora", 8)])
def test_qlora_has_its_own_optimizer_on_a_gpu(method: str, optim: int) -> None:
    memory = found(planned(method=method))["ddp"].memory
    assert memory is not None
    trained = weights_of(planned(method=method)).counts.trained
    assert memory.optimizer_states == trained * optim


def memory_of(launch: Launch, config: Any = LLAMA, method: str = "full", rows: int | None = None) -> RankMemory:
    plan = replace(planned(config, method), launch=launch)
    return RankMemory(plan, weights_of(plan, rows))


@pytest.mark.parametrize(
    ("launch", "offloaded", "loading"),
    [
        (Launch("ddp", 8, 8), 0, 8 * 4),  # each process reads fp32 weights
        (Launch("fsdp2", 8, 8, axes=SHARDED), 0, 4),  # the first process sends them
        (Launch("zero3_offload", 8, 8), 18, 4),  # 2 + 16 bytes, of all shards
        (Launch("zero2_offload", 8, 4), (4 + 4 + 8) / 2, 4 * 4),  # a node has half of the shards
        (Launch("tp", 8, 8, axes=Axes(tensor=8)), 0, 4),
    ],
    ids=lambda each: each.strategy if isinstance(each, Launch) else "",
)
def test_cpu_memory_of_a_node_in_bytes_a_parameter(launch: Launch, offloaded: float, loading: float) -> None:
    node = node_memory(memory_of(launch), launch.local_world_size)
    assert node.offloaded / PARAMETERS == pytest.approx(offloaded, rel=0.001)
    assert node.loading / PARAMETERS == pytest.approx(loading)
    assert node.reading_back / PARAMETERS == pytest.approx(2)
    assert node.needed == max(node.loading, node.offloaded + node.reading_back)


def test_every_process_reads_an_encoder() -> None:
    memory = memory_of(Launch("fsdp2", 8, 8, axes=SHARDED), BERT)
    assert node_memory(memory, 8).loading == 8 * 4 * memory.weights.counts.total


def test_tokens_of_a_device_are_doubled_up_to_all_rows() -> None:
    plan = replace(planned(max_tokens_per_device=999), launch=Launch("ddp", 8, 8))
    lengths = RowLengths(mean=50, longest=120, attended=60, rows=1000)
    assert micro_batches(plan, lengths) == [
        MicroBatchSize(2, 120, 4),
        MicroBatchSize(4, 240, 2),
        MicroBatchSize(8, 480, 1),
    ]
    assert micro_batches(plan, lengths, asked=300) == [MicroBatchSize(4, 300, 2)]


def test_context_groups_share_the_tokens_of_a_row() -> None:
    plan = replace(planned(), launch=Launch("fsdp2_cp", 8, 8, axes=Axes(context=4, is_sharded=True)))
    assert micro_batches(plan, RowLengths(100, 100, 100))[0] == MicroBatchSize(1, 25, 32)


@pytest.mark.parametrize(
    ("given", "memory", "in_node", "between"),
    [
        ({"gpu": "h100"}, 80e9, 450e9, 50e9),
        ({"gpu": "h100", "interconnect": "pcie", "internode": "200Gb"}, 80e9, 64e9, 200e9 / 8 / 4),
        ({"gpu_memory": "79GiB", "internode": "25 GB/s"}, 79 * 2**30, 300e9, 25e9 / 4),
        ({"gpu": "l4", "interconnect": "pcie", "gpu_memory": "24gb"}, 24e9, 32e9, 50e9),
        ({"gpu": "a100", "interconnect": "nvlink", "internode": "100Gbit/s"}, 80e9, 300e9, 100e9 / 8 / 4),
    ],
)
def test_a_machine_by_its_flags(given: dict[str, str], memory: float, in_node: float, between: float) -> None:
    machine = machine_of_flags(MachineArguments(gpus=8, nodes=2, host_memory="0.5TB", **given))
    assert (machine.memory_bytes, machine.in_node, machine.between_nodes) == (memory, in_node, between)
    assert machine.host_bytes == 500e9


# Bytes of weights and states that runs of recipes/llama/demo.yaml wrote in bf16 on 2 ranks: 1,417,856 parameters.
@pytest.mark.parametrize(
    ("launch", "checkpoint", "model"),
    [
        (Launch("ddp", 2, 2), 5_673_640 + 11_360_752, 5_673_640),
        (Launch("fsdp2", 2, 2, axes=SHARDED), 2 * 2_868_829 + 5_739_235 + 5_802_816, 5_673_640),
        (Launch("zero2", 2, 2), 8_513_413 + 8_513_349 + 2_843_493 + 2_837_952, 2_837_952),
        (Launch("zero3", 2, 2), 2 * 8_512_645 + 2_837_952, 2_837_952),
    ],
    ids=lambda each: each.strategy if isinstance(each, Launch) else "",
)
def test_a_run_writes_what_runs_wrote(launch: Launch, checkpoint: int, model: int) -> None:
    memory = memory_of(launch)
    written, scale = written_bytes(memory.plan, memory.weights), 1_417_856 / memory.weights.counts.total
    assert written.checkpoint * scale == pytest.approx(checkpoint, rel=0.02)
    assert written.model * scale == pytest.approx(model, rel=0.02)


def test_a_trained_adapter_alone_is_written() -> None:
    memory = memory_of(Launch("ddp", 8, 8), method="lora")
    written = written_bytes(memory.plan, memory.weights)
    trained = weights_of(planned(method="lora")).counts.trained
    assert (written.model, written.checkpoint) == (4 * trained, 12 * trained)


def test_a_saved_model_has_the_rows_that_an_active_vocabulary_does_not_train() -> None:
    both = [memory_of(Launch("ddp", 8, 8), BERT, rows=rows) for rows in (None, 20)]
    whole, active = (written_bytes(each.plan, each.weights) for each in both)
    assert whole.model == active.model
    assert whole.checkpoint - active.checkpoint == 8 * 30 * 32

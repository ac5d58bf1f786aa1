"""The jobs, machines and layouts that `benchmarks/axes_worth.py` compares, as plans of runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from transformers import BertConfig, LlamaConfig, PreTrainedConfig

from indictune.config.arguments import DataArguments, ModelArguments, SentimentTrainingArguments
from indictune.config.plan import AnyPlan, Axes, Launch, RunPlan, unresolved
from indictune.config.recipe import Recipe
from indictune.errors import Problems
from indictune.models.config_shapes import meta_model
from indictune.planning.hardware import Machine, machine_of
from indictune.planning.memory import Memory, RankMemory
from indictune.planning.rank_weights import ModelWeights
from indictune.planning.step_time import RowLengths, Step, estimate_step

TOKENS_AT_ONCE = 8192  # most tokens of a micro-batch

# A DGX H100 has a port of 400 Gb/s InfiniBand for each GPU. The slow nodes have 100 Gb/s Ethernet each.
MACHINES = {
    "NVLink": ("8 x H100, NVLink", machine_of("h100", 8)),
    "PCIe": ("8 x A100 80 GB, PCIe", machine_of("a100", 8, interconnect="pcie4")),
    "4 nodes, InfiniBand": ("4 nodes of them, InfiniBand", machine_of("h100", 32, nodes=4)),
    "4 nodes, Ethernet": ("4 nodes of them, Ethernet", machine_of("h100", 32, nodes=4, internode_bytes_s=12.5e9)),
}
# config.json of meta-llama/Llama-3.1-8B and -70B, and of ai4bharat/IndicBERTv2-MLM-only.
SMALL = LlamaConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=131_072,
)  # fmt: skip
LARGE = LlamaConfig(
    vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, max_position_embeddings=131_072,
)  # fmt: skip
ENCODER = BertConfig(vocab_size=250_000)


@dataclass(frozen=True)
class Job:
    """What is trained in a step.

    Attributes:
        name: for the table.
        plan: of one process.
        weights: of the model.
        length: tokens of a row.
    """

    name: str
    plan: AnyPlan
    weights: ModelWeights
    length: int

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.plan.training.global_batch_size


def job_of(name: str, config: PreTrainedConfig, rows: int, length: int) -> Job:
    """A job of full fine-tuning; a LLaMA checkpoints its activations, as its recipes do."""
    is_llama = isinstance(config, LlamaConfig)
    head = "ForCausalLM" if is_llama else "ForSequenceClassification"
    values: dict[str, Any] = {"global_batch_size": rows, "bf16": True, "gradient_checkpointing": is_llama}
    plan: AnyPlan = RunPlan(
        recipe=Recipe(values, Problems()),
        model=unresolved(ModelArguments, {}),
        data=unresolved(DataArguments, {"max_length": length}),
        training=unresolved(SentimentTrainingArguments, values),
        gpus=8,
        model_config=config,
        head=head,
    )
    return Job(name, plan, ModelWeights(meta_model(plan.model, config, head)), length)


def jobs() -> list[Job]:
    """An encoder on tweets, and two LLaMAs on conversations; the smaller one on long ones too."""
    return [
        job_of("IndicBERT v2, 2,048 tweets", ENCODER, 2048, 40),
        job_of("LLaMA 8B, 64 x 2,048 tokens", SMALL, 64, 2048),
        job_of("LLaMA 8B, 8 x 131,072 tokens", SMALL, 8, 131_072),
        job_of("LLaMA 70B, 64 x 2,048 tokens", LARGE, 64, 2048),
    ]


def layouts(machine: Machine) -> dict[str, Launch]:
    """How each file splits a run over the machine's GPUs."""
    gpus, nodes, of_node = machine.gpus, machine.nodes, machine.of_node
    stages = max(2, nodes)
    plain = Launch("ddp", gpus, of_node)
    sharded = replace(plain, strategy="fsdp2", axes=Axes(is_sharded=True))
    found = {
        "ddp": plain,
        "zero1": replace(plain, strategy="zero1"),
        "fsdp2": sharded,
        "tp": replace(plain, strategy="tp" if nodes == 1 else "ddp_tp", axes=Axes(tensor=of_node)),
        "fsdp2_tp": replace(sharded, strategy="fsdp2_tp", axes=Axes(tensor=4, is_sharded=True)),
        "fsdp2_cp": replace(sharded, strategy="fsdp2_cp", axes=Axes(context=4, is_sharded=True)),
        "pipeline": replace(plain, strategy="pipeline", axes=Axes(pipeline=4)),
        "pipeline, FSDP2 inside": replace(plain, strategy="pipeline", axes=Axes(pipeline=4, is_sharded=True)),
        "3d": replace(plain, strategy="3d", axes=Axes(pipeline=stages, tensor=2)),
    }
    hsdp = {"hsdp": replace(sharded, strategy="hsdp", axes=Axes(replicas=nodes, is_sharded=True))}
    return found if nodes == 1 else found | hsdp


def estimate(job: Job, launch: Launch, machine: Machine) -> tuple[Memory, Step]:
    """Memory and time of a step, of as few micro-batches as `TOKENS_AT_ONCE` allows, in a pipeline of a row each."""
    memory = RankMemory(replace(job.plan, launch=launch), job.weights)
    rows = job.rows // launch.data_size
    most = max(1, TOKENS_AT_ONCE * launch.axes.context // job.length)
    micro_batches = min(rows, 32) if launch.axes.pipeline > 1 else -(-rows // most)
    tokens = rows * job.length // micro_batches // launch.axes.context
    lengths = RowLengths(job.length, job.length, job.length)
    return memory.at(tokens, micro_batches), estimate_step(memory, job.weights, machine, lengths, micro_batches)

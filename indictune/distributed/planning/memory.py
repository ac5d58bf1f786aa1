"""Estimate the memory that training takes on each process, by closed forms that no GPU has calibrated yet."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property

from indictune.config.plan import AnyPlan
from indictune.distributed.pipeline.schedule import chunks_of
from indictune.distributed.planning import activations
from indictune.distributed.planning.kept_bytes import gradients_between, kept_bytes, types_of
from indictune.distributed.planning.rank_weights import ModelWeights, Weight
from indictune.models.config_shapes import MetaModel

# Of a process on a GPU: CUDA with the code of its kernels, and buffers of NCCL for each kind of group. Judgements.
CONTEXT_BYTES, NCCL_BYTES = 600_000_000, 400_000_000


@dataclass(frozen=True)
class Memory:
    """Bytes of one process, by term.

    Attributes:
        parameters: with the fp32 copies that DeepSpeed updates.
        gradients: of the backward pass, or between micro-batches if they take more then.
        optimizer_states: of the optimizer.
        activations: kept for the backward pass.
        logits: and their gradient.
        working_copies: weights that are gathered or cast, and gradients while they are summed.
        framework: of CUDA and NCCL; 0 on a CPU.
    """

    parameters: int
    gradients: int
    optimizer_states: int
    activations: int
    logits: int = 0
    working_copies: int = 0
    framework: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of all terms."""
        return sum(asdict(self).values())

    @property
    def largest(self) -> str:
        """Name of the largest term."""
        terms = asdict(self)
        return max(terms, key=terms.__getitem__).replace("_", " ")


class RankMemory:
    """The memory of the processes of a run, for any micro-batch.

    Args:
        plan: of the run, with its launch and its model configuration.
        weights: of the model.
    """

    def __init__(self, plan: AnyPlan, weights: ModelWeights) -> None:
        assert plan.model_config is not None
        self.plan, self.config, self.types = plan, plan.model_config, types_of(plan)
        self.weights = weights
        axes = plan.launch.axes
        chunks = chunks_of(plan.training.pipeline_schedule) if axes.pipeline > 1 else 1
        self.stages = weights.of_stages(axes, chunks)
        self.kept = [kept_bytes(each, plan.launch, self.types) for each in self.stages]
        self._between = [gradients_between(each, plan.launch, self.types) for each in self.stages]
        self._working = [activations.working_bytes(plan, each, self.types) for each in self.stages]
        self._repeats = weights.repeats

    @cached_property
    def heaviest(self) -> list[Weight]:
        """The weights of a rank of the stage that has most."""
        return max(self.stages, key=lambda some: sum(each.numel for each in some))

    def at(self, tokens: int, micro_batches: int) -> Memory:
        """The memory of the process that needs most.

        Args:
            tokens: of each process in its largest micro-batch.
            micro_batches: of a step.
        """
        every = [self.of_stage(stage, tokens, micro_batches) for stage in range(len(self.stages))]
        return max(every, key=lambda each: each.total_bytes)

    def of_stage(self, stage: int, tokens: int, micro_batches: int) -> Memory:
        """As `at`, of a process of one stage: the first keeps the most micro-batches, the last has the head."""
        plan, kept = self.plan, self.kept[stage]
        flight = activations.in_flight(plan, stage, micro_batches)
        has_logits = plan.head == "ForCausalLM" and stage == len(self.stages) - 1
        groups = NCCL_BYTES if plan.launch.world_size > 1 else 0
        return Memory(
            int(kept.parameters),
            int(max(kept.gradients, self._between[stage]) if micro_batches > 1 else kept.gradients),
            int(kept.optimizer_states),
            int(activations.activation_bytes(plan, self.types, tokens, self.stages[stage], self._repeats, flight)),
            activations.logits_bytes(self.config, self.types, tokens) if has_logits else 0,
            int(self._working[stage]),
            CONTEXT_BYTES + groups if plan.gpus else 0,
        )


def estimate_memory(plan: AnyPlan, meta: MetaModel, tokens: int) -> Memory:
    """The memory of the process that needs most.

    Args:
        plan: of the run, with its launch and its model configuration.
        meta: the model, built by `meta_model`.
        tokens: of each process in its largest micro-batch.
    """
    return RankMemory(plan, ModelWeights(meta)).at(tokens, plan.training.gradient_accumulation_steps)


def memory_of_rank(plan: AnyPlan, meta: MetaModel, tokens: int) -> Memory:
    """As `estimate_memory`, of the process that the launch is of."""
    stage = plan.launch.rank // (plan.launch.world_size // plan.launch.axes.pipeline)
    memory = RankMemory(plan, ModelWeights(meta))
    return memory.of_stage(stage, tokens, plan.training.gradient_accumulation_steps)


def micro_batch_tokens(plan: AnyPlan, longest: int) -> int:
    """Most tokens in a micro-batch of one process, if all rows were as long as the longest."""
    training = plan.training
    if training.max_tokens_per_device is not None:
        return training.max_tokens_per_device
    in_windows = plan.configuration.get("long_text") == "window"  # a row has all its windows
    longest = longest if in_windows else min(longest, plan.sequence_limit)
    return math.ceil(training.per_device_train_batch_size * longest / plan.launch.axes.context)

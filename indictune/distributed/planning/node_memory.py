"""CPU memory that the processes of a node need: offloaded states, and whole weights while they are read."""

from __future__ import annotations

from dataclasses import dataclass

from indictune.distributed.launch import engine_of
from indictune.distributed.planning.kept_bytes import FP32, NF4_BYTES, NF4_SCALES
from indictune.distributed.planning.memory import RankMemory


@dataclass(frozen=True)
class NodeMemory:
    """Bytes of the first node, which needs most.

    Attributes:
        offloaded: weights, gradients and states that live there.
        loading: whole weights that its processes hold when the run starts.
        reading_back: the saved model, which the first process compares with the trained one at the end.
    """

    offloaded: float
    loading: float
    reading_back: float

    @property
    def needed(self) -> float:
        """At one time. Nothing else is offloaded yet while weights are read."""
        return max(self.loading, self.offloaded + self.reading_back)


def node_memory(memory: RankMemory, of_node: int) -> NodeMemory:
    """The CPU memory of a node, without that of Python and its libraries.

    Every process reads all weights, but where the first one sends the others theirs: under ZeRO-3 (transformers 5.23),
    and for a language model under FSDP2 or in stages and tensor parts. A quantised base is always read by all.

    Args:
        memory: of the run.
        of_node: processes of a node.
    """
    plan, types, whole = memory.plan, memory.types, memory.weights.every
    packed = sum(each.numel for each in whole if each.is_packed) * (NF4_BYTES + NF4_SCALES)
    plain = [each for each in whole if not each.is_packed]
    is_causal = plan.head == "ForCausalLM"
    read = packed + sum(each.numel * (FP32 if each.is_trained or not is_causal else types.frozen) for each in plain)
    saved = packed + sum(each.numel for each in plain) * (types.computed if is_causal else FP32)
    kept_at_most = max(each.host for each in memory.kept) * of_node
    return NodeMemory(kept_at_most, read * _readers(memory, of_node), saved)


def _readers(memory: RankMemory, of_node: int) -> int:
    plan = memory.plan
    engine, axes = engine_of(plan.launch.strategy), plan.launch.axes
    is_sent = engine == "fsdp2" or (axes.pipeline * axes.tensor > 1 and plan.launch.deepspeed is None)
    reads_once = engine == "zero3" or (is_sent and plan.head == "ForCausalLM")
    return 1 if reads_once and plan.model.method != "qlora" else of_node

"""What a pipeline cannot run: checks of the plan, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from indictune.config.plan import AnyPlan
from indictune.distributed.pipeline.layout import LAYOUTS
from indictune.distributed.pipeline.schedule import INTERLEAVED, chunks_of
from indictune.distributed.strategy_limits import runs_optimizer
from indictune.errors import Problem, problem
from indictune.models.load import has_own_code

_SHARES_LAYERS = "albert"


def check_pipeline(plan: AnyPlan) -> list[Problem]:
    """Refuse models that cannot be cut into so many stages, and flags that stages do not have."""
    if plan.launch.axes.pipeline == 1:
        return []
    flags = [
        problem("not-in-a-pipeline", f"--{flag}", str(value).lower(), reason=reason)
        for flag, value, reason in _refused_flags(plan)
    ]
    return [*_of_model(plan), *flags, *check_micro_batches(plan)]


def check_micro_batches(plan: AnyPlan) -> list[Problem]:
    """Refuse a number of micro-batches that the schedule does not have, once it is known."""
    stages, steps = plan.launch.axes.pipeline, plan.derived.get("gradient_accumulation_steps")
    if stages == 1 or plan.training.pipeline_schedule != INTERLEAVED or steps is None or steps % stages == 0:
        return []
    return [problem("interleaved-micro-batches", "--pipeline_schedule", INTERLEAVED, stages=stages, steps=steps)]


def _of_model(plan: AnyPlan) -> list[Problem]:
    config, name = plan.model_config, plan.model.model_name_or_path
    if config is None:
        return []
    if config.model_type not in LAYOUTS or has_own_code(plan.model, config):
        reason = f"Models of type {config.model_type} are not known ({', '.join(LAYOUTS)} are)"
        if config.model_type == _SHARES_LAYERS:
            reason = "All its layers are one set of weights, which each stage would hold"
        elif config.model_type in LAYOUTS:
            reason = "It has its own code"
        return [problem("model-without-stages", "--model_name_or_path", name, reason=reason)]
    if plan.launch.axes.tensor > 1 and plan.head == "ForCausalLM" and config.tie_word_embeddings:
        reason = "Its head is tied to its embedding, which stages whose matrices are split do not share"
        return [problem("model-without-stages", "--model_name_or_path", name, reason=reason)]
    layers: int = config.num_hidden_layers
    ranks, chunks = plan.launch.axes.pipeline, chunks_of(plan.training.pipeline_schedule)
    if ranks * chunks > layers:
        needed, most = ranks * chunks, layers // chunks
        code, flag = "more-stages-than-layers", "--num_processes"
        return [problem(code, flag, ranks, chunks=chunks, needed=needed, layers=layers, most=most)]
    return []


def _refused_flags(plan: AnyPlan) -> Iterator[tuple[str, object, str]]:
    """Flag, value and reason."""
    training, values, is_sharded = plan.training, plan.configuration, plan.launch.axes.is_sharded
    if training.fp16:
        yield "fp16", True, "all stages would have to agree on the scale of the loss"
    if training.torch_compile:
        yield "torch_compile", True, "a stage runs a part of what is compiled"
    if values.get("activation_offloading"):
        yield "activation_offloading", True, "a stage computes several micro-batches before its backward passes"
    if training.reduce_dtype != "float32":
        yield "reduce_dtype", training.reduce_dtype, "copies of a stage sum their gradients in their own type"
    if "lomo" in str(training.optim):
        yield "optim", training.optim, "it steps in the backward pass, before the norm over all stages is known"
    if is_sharded and training.pipeline_schedule == INTERLEAVED:
        yield "pipeline_schedule", INTERLEAVED, "FSDP2 inside stages takes one stage a process"
    if is_sharded and plan.model.method == "qlora":
        yield "method", "qlora", "FSDP2 inside stages does not split 4-bit weights"
    if is_sharded and not runs_optimizer(replace(plan.launch, strategy="fsdp2"), str(training.optim)):
        yield "optim", training.optim, "FSDP2 inside stages splits its states otherwise"
    for name in {"embed_tokens", "lm_head"} & set(plan.model.modules_to_save):
        yield "modules_to_save", name, "first and last stage may share it"

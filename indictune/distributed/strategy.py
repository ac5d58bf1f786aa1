"""What a strategy file gives a run, which settings a strategy cannot run, and whose state a launch can resume."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from indictune.config.plan import AnyPlan, Launch, RunPlan
from indictune.distributed import zero
from indictune.distributed.fsdp import is_fsdp_1, note_of_fsdp_1, use_fsdp_2
from indictune.distributed.launch import engine_of, hand_over, splits_model, starts_one_of_several
from indictune.distributed.upstream import bitsandbytes_optimizers
from indictune.distributed.zero import FileValue
from indictune.errors import Problem, problem
from indictune.tasks.protocol import Data, Training

_PRECISIONS = {"bf16": {"bf16": True, "fp16": False}, "fp16": {"fp16": True, "bf16": False}}
_WRAP = "TRANSFORMER_BASED_WRAP"
_SAVES_WHOLE = "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"
_DERIVED = "gradient_accumulation_steps"  # follows from the sizes of batches, and is never taken from a file


def take_values(plan: RunPlan[Data, Training]) -> RunPlan[Data, Training]:
    """The plan with the values of its strategy file that neither recipe nor flags give.

    `recipe.yaml` records them as given: another strategy file must not change the run.
    """
    given, taken = dict(plan.recipe.values), dict[str, Any]()
    for each in _values(plan):
        said = given | taken
        if _DERIVED in each.fields or any(said.get(name, value) != value for name, value in each.fields.items()):
            continue
        unsaid = {name: value for name, value in each.fields.items() if name not in said}
        taken |= {name: value for name, value in unsaid.items() if getattr(plan.training, name) != value}
    recipe = replace(plan.recipe, values=given | taken)
    return replace(plan, recipe=recipe, launch=replace(plan.launch, from_file=taken)).derive()


def taken_values(plan: AnyPlan) -> str:
    """The flags that would give what the plan has from its strategy file."""
    return " ".join(f"--{name} {_shown(value)}" for name, value in plan.launch.from_file.items())


def notes_on_file(plan: AnyPlan) -> list[str]:
    """What the user has to know: values of the strategy file that do not count, and what another strategy runs."""
    found = []
    if starts_one_of_several(plan.environ):
        found.append("`distributed_type: NO` starts one process, whatever num_processes says.")
    if is_fsdp_1(plan.environ):
        found.append(note_of_fsdp_1(plan.environ))
    if plan.launch.deepspeed is not None and not engine_of(plan.launch.strategy).startswith("zero"):
        found.append("The DeepSpeed file has ZeRO stage 0, which shards nothing. DDP runs it.")
    if plan.launch.axes.pipeline == 1 and "pipeline_schedule" in plan.recipe.values:
        found.append("Ignoring --pipeline_schedule: this run has no pipeline.")
    if plan.launch.world_size == 1 and splits_model(plan.environ):
        found.append("The strategy file splits the model, and there is one process. It has the whole model.")
    if plan.training.reduce_dtype != "float32" and plan.launch.data_size == 1:
        found.append(f"Ignoring --reduce_dtype {plan.training.reduce_dtype}: no gradients are summed over processes.")
    return found + ignored_values(plan)


def ignored_values(plan: AnyPlan) -> list[str]:
    """One sentence on the values of the strategy file that do not count, with what counts instead; none if all do."""
    known, found = plan.recipe.values.keys() | plan.derived.keys(), []
    for key, value, fields in _values(plan):
        ours = {name: getattr(plan.training, name) for name in fields if name in known}
        counts = [f"--{name} {_shown(own)} counts" for name, own in ours.items() if own != fields[name]]
        if counts and _DERIVED in ours:
            counts = [f"{ours[_DERIVED]} follows from --global_batch_size {plan.training.global_batch_size}"]
        found += [(key, value, instead) for instead in counts[:1]]
    if (policy := plan.environ.get("FSDP_AUTO_WRAP_POLICY", _WRAP)) != _WRAP:
        found.append(("fsdp_auto_wrap_policy", policy, "the layers that the model repeats are wrapped"))
    if engine_of(plan.launch.strategy) == "zero3" and plan.environ.get(_SAVES_WHOLE) == "false":
        found.append(("zero3_save_16bit_model", False, zero.IS_SAVED_WHOLE))
    if plan.launch.deepspeed is not None:
        found += zero.unusable(plan.launch.deepspeed, bool(plan.training.fp16))
    shown = "; ".join(f"{key} {_shown(value)} ({instead})" for key, value, instead in found)
    return [f"Ignoring values of the strategy file: {shown}."] if found else []


def hide_file_values(launch: Launch, environ: MutableMapping[str, str]) -> dict[str, Any]:
    """Make libraries read the values that the plan has, and not those of the strategy file.

    Returns:
        Training arguments.
    """
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"):
        if name in environ:
            environ[name] = "no"
    # With a DeepSpeed file, accelerate (1.15) refuses an accelerate config that gives more than its path.
    for name in ("GRADIENT_ACCUMULATION_STEPS", "GRADIENT_CLIPPING", "CONFIG_DS_FIELDS"):
        environ.pop(f"ACCELERATE_{name}", None)
    use_fsdp_2(environ)
    hand_over(launch.axes, launch.world_size, environ)
    if not engine_of(launch.strategy).startswith("zero"):
        environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        return {"deepspeed": None}
    environ[_SAVES_WHOLE] = "true"
    if launch.deepspeed_source is None or launch.deepspeed is None:
        return {"deepspeed": None}
    return {"deepspeed": zero.values_left_to_flags(launch.deepspeed)}


def _values(plan: AnyPlan) -> Iterator[FileValue]:
    environ = plan.environ
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision in _PRECISIONS:
        yield FileValue("mixed_precision", precision, _PRECISIONS[precision])
    if environ.get("FSDP_ACTIVATION_CHECKPOINTING") == "true":
        yield FileValue("fsdp_activation_checkpointing", True, {"gradient_checkpointing": True})
    backend = environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend != "no":
        mode = environ.get("ACCELERATE_DYNAMO_MODE", "default")
        modes = {} if mode == "default" else {"torch_compile_mode": mode}
        fields: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": backend}
        yield FileValue("dynamo_backend", backend, fields | modes)
    if plan.launch.deepspeed is not None:
        yield from zero.values_in(plan.launch.deepspeed)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


STORAGE = "bfloat16"  # type in which `models.adapters.nf4_config` stores packed weights


def check_weights(plan: AnyPlan, quantisation: Mapping[str, Any]) -> list[Problem]:
    """Refuse a method or weights that the strategy cannot train.

    `quantisation` is that of the checkpoint's own weights, empty for none. FSDP2 shards 4-bit weights only if they are
    stored in the type of the other weights.
    """
    launch, model, found = plan.launch, plan.model, []
    is_stored_otherwise = quantisation.get("bnb_4bit_quant_storage", STORAGE) != STORAGE
    unshardable = {
        "zero3": model.method == "qlora" or bool(quantisation),
        "fsdp2": quantisation.get("load_in_8bit") or (quantisation.get("load_in_4bit") and is_stored_otherwise),
    }
    if unshardable.get(engine_of(launch.strategy)):
        name = model.model_name_or_path
        found.append(problem("quantised-weights-sharded", "--model_name_or_path", name, strategy=launch.strategy))
    if engine_of(launch.strategy) == "fsdp2" and "lm_head" in model.modules_to_save:
        found.append(problem("lm-head-under-fsdp2", "--modules_to_save", "lm_head"))
    if model.device_map is not None and launch.world_size > 1:
        found.append(
            problem("device-map-with-processes", "--device_map", model.device_map, world_size=launch.world_size)
        )
    return found


def default_optimizer(launch: Launch, method: str, has_gpu: bool) -> str | None:
    """The optimizer if `--optim` is not given; None leaves it to the Trainer.

    QLoRA's own is AdamW with paged 8-bit states: those of at least 100,000 numbers move to the CPU when the GPU's
    memory runs out (bitsandbytes 0.50, `get_state_buffer`). bitsandbytes pages only with a GPU, and DeepSpeed brings
    its own optimizer.
    """
    fits = launch.strategy in ("single", "ddp")
    return "paged_adamw_8bit" if method == "qlora" and has_gpu and fits else None


def check_strategy(plan: AnyPlan) -> list[Problem]:
    """Refuse settings that the strategy does not have: of the optimizer, communication, saving and bad steps.

    accelerate would replace another optimizer than AdamW with DeepSpeed's CPU Adam if its states are offloaded.
    """
    launch, training, method, found = plan.launch, plan.training, plan.model.method, list[Problem]()
    optim, engine = str(training.optim), engine_of(launch.strategy)
    if not runs_optimizer(launch, optim):
        found.append(problem("optimizer-cannot-be-sharded", "--optim", optim, strategy=launch.strategy))
    if engine.startswith("zero") and launch.strategy.endswith("_offload") and "adamw" not in optim.lower():
        found.append(problem("offload-needs-adamw", "--optim", optim, strategy=launch.strategy))
    if training.reduce_dtype != "float32" and engine == "fsdp2" and method != "full":
        other = f"--method {method} under {launch.strategy}"
        found.append(problem("no-effect", "--reduce_dtype", training.reduce_dtype, other=other))
    steps = plan.derived.get("gradient_accumulation_steps")
    if training.ddp_static_graph and steps not in (None, 1):
        found.append(problem("static-graph-with-accumulation", "--ddp_static_graph", "true", steps=steps))
    splits = engine in ("fsdp2", "tp") or launch.axes.pipeline > 1
    has_shards = splits and launch.world_size > 1 and method == "full"
    where = f"{launch.strategy} on {launch.world_size} process(es) with --method {method}"
    if training.async_save and not has_shards:
        found.append(problem("async-save-without-shards", "--async_save", "true", where=where))
    if training.push_to_hub and training.hub_strategy == "every_save" and has_shards:
        found.append(problem("push-of-shards", "--hub_strategy", "every_save", where=where))
    if training.on_nonfinite not in ("stop", *leaves_bad_steps_out(launch.strategy)):
        found.append(problem("skip-under-deepspeed", "--on_nonfinite", training.on_nonfinite))
    return found


def runs_optimizer(launch: Launch, optim: str) -> bool:
    """Whether the strategy can run an optimizer.

    Under FSDP2, torch cannot shard the custom operators of bitsandbytes' optimizers (bitsandbytes 0.50, torch 2.13).
    Adafactor mixes sharded and full tensors there ("mixed torch.Tensor and DTensor"). Adagrad makes its states before
    they are sharded: FSDP2 cannot save them ("KeyError"), and DeepSpeed (0.19.8) fails at the first step
    ("IndexError").
    """
    if engine_of(launch.strategy) in ("fsdp2", "tp"):
        return optim not in (*bitsandbytes_optimizers(), "adafactor", "adagrad")
    return not (engine_of(launch.strategy).startswith("zero") and optim == "adagrad")


def leaves_bad_steps_out(strategy: str) -> tuple[str, ...]:
    """The values of `--on_nonfinite` by which a strategy leaves out bad steps.

    DeepSpeed steps within the backward pass, and skips a step if the norm of the gradients is NaN or infinite. See
    `step` in `zero/stage_1_and_2.py` and `zero/stage3.py` (0.19.8). Under bf16, ZeRO-1 and ZeRO-2 do not skip it if
    `check_grad_overflow` is off. The loss is ignored; it may be infinite while its gradient is finite.
    """
    return ("rollback",) if strategy.startswith("zero") else ("skip", "rollback")


def forget_pages(optimizer: object) -> None:
    """Mark loaded states as not paged.

    The mark of bitsandbytes (0.50) is in its checkpoint too, and is loaded on several GPUs (transformers 5.23,
    `_load_optimizer_and_scheduler`). The next step would ask CUDA to move pages that do not exist.
    """
    if not isinstance(optimizer, Optimizer):  # DeepSpeed's
        return
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                vars(value).pop("is_paged", None)


# Each of these resumes the checkpoints of the others, on any number of processes. ZeRO's states cannot be converted:
# DeepSpeed's universal checkpoints were 8e-4 off in loss after 20 steps (0.19.8).
_INTERCHANGEABLE = frozenset({"single", "ddp", "fsdp2", "tp"})

# A pattern of flags that say how a run is distributed, which changes no step.
FLAGS_OF_STRATEGIES = "(ddp|fsdp)(_.*)?|pipeline_schedule"


# The files of a checkpoint in which DeepSpeed (0.19.8) keeps the parts of matrices, one for each rank of a group.
_PART = re.compile(r"mp_rank_(\d+)_model_states")


def parts_of_matrices(files: Iterable[str]) -> int:
    """Into how many parts DeepSpeed split the matrices of a checkpoint, by the names of its files; 1 if it did not."""
    found = [int(part[1]) for part in map(_PART.search, files) if part]
    return max(found, default=0) + 1


def can_resume(strategy: str, world_size: int, launch: Launch, parts: int = 1) -> bool:
    """Whether `launch` can load weights and optimizer states that `world_size` processes of `strategy` wrote.

    `parts` is `parts_of_matrices` of the checkpoint.
    """
    family = engine_of(strategy)
    if {family, engine_of(launch.strategy)} <= _INTERCHANGEABLE:
        return True
    return (family, world_size, parts) == (engine_of(launch.strategy), launch.world_size, launch.axes.tensor)


def not_carried_over(strategy: str, world_size: int, launch: Launch, optim: str | None, parts: int = 1) -> str | None:
    """The states that `launch` cannot take over, as for `can_resume`; None where it takes all.

    `optim` is the `--optim` that wrote them; None if it is not known.
    """
    if not can_resume(strategy, world_size, launch, parts):
        return "ZeRO's states"
    families = {engine_of(strategy), engine_of(launch.strategy)}
    is_split_anew = bool(families & {"fsdp2", "tp"}) and len(families) > 1
    if is_split_anew and optim is not None and (optim == "adafactor" or optim.endswith(("4bit", "8bit"))):
        return f"the states of --optim {optim}, which are not split as weights are,"
    return None

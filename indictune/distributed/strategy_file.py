"""Which values of a strategy file count: those that neither recipe nor flags give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, TypeVar

from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import AnyPlan, Launch, RowArguments, RunPlan, unresolved
from indictune.distributed import fsdp, zero
from indictune.distributed.launch import engine_of, hand_over, splits_model, starts_one_of_several
from indictune.distributed.zero import FileValue

Data = TypeVar("Data", bound=RowArguments)
Training = TypeVar("Training", bound=IndicTrainingArguments)

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
    return replace(
        plan,
        recipe=recipe,
        training=unresolved(type(plan.training), recipe.values | dict(plan.derived)),
        launch=replace(plan.launch, from_file=taken),
    )


def taken_values(plan: AnyPlan) -> str:
    """The flags that would give what the plan has from its strategy file."""
    return " ".join(f"--{name} {_shown(value)}" for name, value in plan.launch.from_file.items())


def notes(plan: AnyPlan) -> list[str]:
    """What the user has to know: values of the strategy file that do not count, and what another strategy runs."""
    found = []
    if starts_one_of_several(plan.environ):
        found.append("`distributed_type: NO` starts one process, whatever num_processes says.")
    if fsdp.is_version_1(plan.environ):
        found.append(fsdp.note_of_version_1(plan.environ))
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
        if not any(own != fields[name] for name, own in ours.items()):
            continue
        counts = [f"--{name} {_shown(own)} counts" for name, own in ours.items() if own != fields[name]]
        if _DERIVED in ours:
            counts = [f"{ours[_DERIVED]} follows from --global_batch_size {plan.training.global_batch_size}"]
        found.append((key, value, counts[0]))
    if (policy := plan.environ.get("FSDP_AUTO_WRAP_POLICY", _WRAP)) != _WRAP:
        found.append(("fsdp_auto_wrap_policy", policy, "the layers that the model repeats are wrapped"))
    if engine_of(plan.launch.strategy) == "zero3" and plan.environ.get(_SAVES_WHOLE) == "false":
        found.append(("zero3_save_16bit_model", False, zero.IS_SAVED_WHOLE))
    found += zero.unusable(plan.launch.deepspeed or {}, bool(plan.training.fp16))
    shown = "; ".join(f"{key} {_shown(value)} ({instead})" for key, value, instead in found)
    return [f"Ignoring values of the strategy file: {shown}."] if found else []


def leave_to_plan(launch: Launch, environ: MutableMapping[str, str]) -> dict[str, Any]:
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
    fsdp.use_version_2(environ)
    hand_over(launch.axes, launch.world_size, environ)
    if not engine_of(launch.strategy).startswith("zero"):
        environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        return {"deepspeed": None}
    environ[_SAVES_WHOLE] = "true"
    if launch.deepspeed_source is None or launch.deepspeed is None:
        return {"deepspeed": None}
    return {"deepspeed": zero.left_to_flags(launch.deepspeed)}


def _values(plan: AnyPlan) -> Iterator[FileValue]:
    """The values of the accelerate config and the DeepSpeed file that flags can give too."""
    yield from _values_of_accelerate(plan.environ)
    yield from zero.values_in(plan.launch.deepspeed or {})


def _values_of_accelerate(environ: Mapping[str, str]) -> Iterator[FileValue]:
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


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

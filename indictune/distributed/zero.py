"""ZeRO: what a DeepSpeed file says that flags say too, what it says alone, and DeepSpeed's CPU Adam."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.cpp_extension import get_default_build_root

from indictune.config.plan import Launch
from indictune.files import locked

logger = logging.getLogger(__name__)

# Values of --reduce_dtype, and DeepSpeed's words for them.
DEEPSPEED_NAMES = {"float32": "fp32", "bfloat16": "bf16"}
# Key in the DeepSpeed file -> the training argument that says the same.
OVERLAP = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "train_batch_size": "global_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
}
_BETAS = "optimizer.params.betas"
_TYPES = {"bf16.enabled": ("bf16", "fp16"), "fp16.enabled": ("fp16", "bf16")}
_SUMS = "communication_data_type"

# Blocks that flags replace: DeepSpeed's own optimizer and schedule would make another model than other strategies do.
_BLOCKS = {"optimizer": "optim", "scheduler": "lr_scheduler_type"}
_TYPES_OF_BLOCKS = {
    "optimizer": {"adam": "adamw_torch_fused", "adamw": "adamw_torch_fused"},  # DeepSpeed's Adam is AdamW by default
    "scheduler": {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"},
}
# Values in those blocks that the flags have anyway.
_AS_FLAGS = {
    "optimizer.params.adam_w_mode": True,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_type": "linear",
}

# `torch.compile` in older files; DeepSpeed 0.19.8 refuses these keys ("Extra inputs are not permitted").
_COMPILE = ("disable", "enabled", "backend", "kwargs")

# Values that a run needs, with the reason.
_NEEDED = {
    "zero_optimization.compute_grad_norm": (True, "the check for NaN needs the norm"),
    # With a fixed scale, DeepSpeed skips every step whose gradients overflow, without a warning.
    "fp16.loss_scale": (0, "DeepSpeed searches the scale"),
}

# Whether the model that stage 3 saves is whole.
_GATHER = "stage3_gather_16bit_weights_on_model_save"
_GATHERS = (_GATHER, "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
# Values of stage 3 for which transformers finds a number if they are "auto". DeepSpeed (0.19.8) takes both names.
_SIZES_OF_STAGE_3 = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
}
_OF_STAGE_3 = _SIZES_OF_STAGE_3 | dict.fromkeys(_GATHERS, _GATHER)
IS_SAVED_WHOLE = "the model is saved whole"
# Keys of which transformers (5.23, `HfTrainerDeepSpeedConfig`) finds the value if it is "auto".
_FILLED = {*OVERLAP, *_TYPES, _SUMS}
_FILLED_OF_ZERO = {"reduce_bucket_size", *_SIZES_OF_STAGE_3, *_SIZES_OF_STAGE_3.values()}

# Other keys that change the steps and are not in a checkpoint's states.
_CHANGE_THE_STEPS = ("prescale_gradients", "gradient_predivide_factor")

# Keys that split a row over ranks, with the values that do not.
_SPLIT_ROWS = {"sequence_parallel_size": (1,)}
_SPLIT_MATRICES = {"tensor_parallel.autotp_size": (0, 1)}  # ZeRO-3 would split their parts again
# How AutoTP splits; `Parallelism` says it.
_PLANS_OF_MATRICES = ("partition_config", "preset_model", "vocab_parallel_lm_head")


class FileValue(NamedTuple):
    """A value of a strategy file that flags can give too."""

    key: str  # in the file
    value: Any  # in the file
    fields: Mapping[str, Any]  # training arguments that say the same, with their values


def values_in(config: Mapping[str, Any]) -> Iterator[FileValue]:
    """The values of a DeepSpeed file that flags can give too, apart from "auto"."""
    for key, name in OVERLAP.items():
        if isinstance(value := _look_up(config, key), int | float):
            yield FileValue(key, value, {name: value})
    if isinstance(betas := _look_up(config, _BETAS), list):
        yield FileValue(_BETAS, betas, dict(zip(("adam_beta1", "adam_beta2"), betas, strict=False)))
    for key, (name, other) in _TYPES.items():
        if isinstance(value := _look_up(config, key), bool):
            yield FileValue(key, value, {name: value} | ({other: False} if value else {}))
    own_names = {name: own for own, name in DEEPSPEED_NAMES.items()}
    if (value := config.get(_SUMS)) in own_names:
        yield FileValue(_SUMS, value, {"reduce_dtype": own_names[value]})
    for block, flag in _BLOCKS.items():
        if own := _own_type(config, block):
            yield FileValue(f"{block}.type", _look_up(config, f"{block}.type"), {flag: own})
    if _look_up(config, "compile.disable") is False or _look_up(config, "compile.enabled") is True:
        backend = _look_up(config, "compile.backend") or "inductor"
        yield FileValue("compile.backend", backend, {"torch_compile": True, "torch_compile_backend": backend})


def unusable(config: Mapping[str, Any], fp16: bool) -> list[tuple[str, Any, str]]:
    """Key, value and reason of the values in a DeepSpeed file that no run can use. Others replace them."""
    found = [
        (key, value, reason)
        for key, (needed, reason) in _NEEDED.items()
        if (value := _look_up(config, key)) not in (None, "auto", needed) and (fp16 or not key.startswith("fp16"))
    ]
    if config.get(_SUMS) not in (None, "auto", *DEEPSPEED_NAMES.values()):
        found.append((_SUMS, config[_SUMS], "--reduce_dtype counts"))
    gathers = [(f"zero_optimization.{name}", _look_up(config, f"zero_optimization.{name}")) for name in _GATHERS]
    found += [(key, value, IS_SAVED_WHOLE) for key, value in gathers if value is False and _is_stage_3(config)]
    if _splits_matrices(config):
        plans = [f"tensor_parallel.{name}" for name in _PLANS_OF_MATRICES if config["tensor_parallel"].get(name)]
        found += [(key, _look_up(config, key), "the plan of the model's type counts") for key in plans]
    return [*found, *(each for block in _BLOCKS for each in _without_flag(config, block))]


def _without_flag(config: Mapping[str, Any], block: str) -> Iterator[tuple[str, Any, str]]:
    """Key, value and reason of the values of an optimizer or a schedule that no flag gives."""
    of_flags = (*OVERLAP, _BETAS, *([f"{block}.type"] if _own_type(config, block) else []))
    for key, value in _values(block, config.get(block) or {}).items():
        if key not in of_flags and value not in (None, "auto", _AS_FLAGS.get(key)):
            is_of_run = key.endswith("total_num_steps")
            yield key, value, "the steps of the run count" if is_of_run else f"--{_BLOCKS[block]} counts"


def unsupported_deepspeed_keys(config: Mapping[str, Any]) -> list[str]:
    """`key: value` of each setting that splits rows in other ways than a run here, or that nobody fills in."""
    refused = _SPLIT_ROWS | (_SPLIT_MATRICES if _is_stage_3(config) else {})
    found = [(key, _look_up(config, key)) for key in refused]
    split = [f"{key}: {value}" for key, value in found if isinstance(value, int) and value not in refused[key]]
    open_ends = [key for name in config for key, value in _values(name, config[name]).items() if value == "auto"]
    of_zero = _FILLED_OF_ZERO | {*(_GATHERS if _is_stage_3(config) else ())}  # `values_left_to_flags` fills these
    filled = _FILLED | {f"zero_optimization.{name}" for name in of_zero}
    return split + [f"{key}: auto" for key in open_ends if key not in filled and key.partition(".")[0] not in _BLOCKS]


def values_left_to_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed file with "auto" wherever a flag says the value: transformers fills it in.

    The Trainer makes optimizer and schedule, and compiles. The saved model is whole.
    """
    changed = {key: value for key, value in copy.deepcopy(dict(config)).items() if key not in _BLOCKS}
    # DeepSpeed needs a size of the batch, and clips nothing if it is not told.
    changed |= {key: "auto" for key in OVERLAP if "." not in key}
    for key in _TYPES:
        name, _, enabled = key.partition(".")
        block = changed.get(name)
        changed[name] = {**(block if isinstance(block, dict) else {}), enabled: "auto"}
    for key, (needed, _) in _NEEDED.items():
        name, _, inner = key.partition(".")
        if isinstance(block := changed.get(name), dict) and inner in block:
            block[inner] = needed
    if isinstance(block := changed.get("compile"), dict):
        changed["compile"] = {key: value for key, value in block.items() if key not in _COMPILE}
    if _is_stage_3(changed):
        zero = {_OF_STAGE_3.get(key, key): value for key, value in changed["zero_optimization"].items()}
        changed["zero_optimization"] = {**zero, _GATHER: True}
    elif _splits_matrices(changed):
        changed["zero_optimization"] = {**changed["zero_optimization"], _GATHER: True}
        block = changed["tensor_parallel"]
        changed["tensor_parallel"] = {name: value for name, value in block.items() if name not in _PLANS_OF_MATRICES}
    return changed


def settings_of_steps(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the file that change the steps and that no flag sets, by dotted key."""
    return {key: config[key] for key in _CHANGE_THE_STEPS if config.get(key) is not None}


def _values(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {key: inner for part, each in value.items() for key, inner in _values(f"{name}.{part}", each).items()}


def _own_type(config: Mapping[str, Any], block: str) -> str | None:
    """The value of a flag for the optimizer or the schedule of a file; None if there is none."""
    return _TYPES_OF_BLOCKS[block].get(str(_look_up(config, f"{block}.type")).lower())


def _splits_matrices(config: Mapping[str, Any]) -> bool:
    return bool((_look_up(config, "tensor_parallel.autotp_size") or 0) > 1)


def _is_stage_3(config: Mapping[str, Any]) -> bool:
    return bool(_look_up(config, "zero_optimization.stage") == 3)


def _look_up(config: Mapping[str, Any], dotted_key: str) -> Any:
    value: Any = config
    for part in dotted_key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def needs_cpu_adam(launch: Launch) -> bool:
    """Whether a DeepSpeed configuration offloads the optimizer."""
    zero = (launch.deepspeed or {}).get("zero_optimization") or {}
    return bool((zero.get("offload_optimizer") or {}).get("device", "none") != "none")


def complete_states(engine: Any) -> None:
    """Complete the optimizer after its states were loaded.

    DeepSpeed (0.19.8) replaces the optimizer's settings by saved ones. Those of torch's AdamW, which ran if the states
    were not offloaded before, lack `bias_correction` ("KeyError" in the first step). It also keeps the powers of the
    betas as a product (`cpu_adam.h`, `IncrementStep`), which no checkpoint holds. Computed by `pow`, they and so the
    weights differ in the last bit. Steps on an empty weight multiply them again.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # slow

    adam = engine.optimizer.optimizer
    if not isinstance(adam, DeepSpeedCPUAdam):
        return
    for group in adam.param_groups:
        for name, value in adam.defaults.items():
            group.setdefault(name, value)
    for state in adam.state.values():
        state["step"] = int(state["step"])  # torch's AdamW counts in a tensor
    count_again(adam, max((state["step"] for state in adam.state.values()), default=0))


def count_again(adam: Any, steps: int) -> None:
    """Bring the betas' powers of a `DeepSpeedCPUAdam` to those after `steps` steps."""
    nothing = [torch.zeros(1) for _ in ("weight", "gradient", "mean", "variance")]
    for step in range(1, steps + 1):
        for group in adam.param_groups:
            settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
            adam.ds_opt_adam.adam_update(adam.opt_id, step, *settings, *nothing)


def load_operators(launch: Launch) -> None:
    """Load what DeepSpeed compiles for a launch, under a lock that ends with its process.

    torch (2.13, `FileBaton.wait`) waits without end for the lock of a build that was killed. Environments that share a
    folder compile by turns, so each gets its own, unless TORCH_EXTENSIONS_DIR names one.
    """
    from deepspeed.accelerator import get_accelerator

    of_environment = hashlib.sha256(f"{sys.prefix} {sys.version} {torch.__version__}".encode()).hexdigest()[:12]
    own = Path(get_default_build_root()) / f"indictune-{of_environment}"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or own)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(root)
    root.mkdir(parents=True, exist_ok=True)
    names = {"CPUAdamBuilder": needs_cpu_adam(launch), "ShareMemCommBuilder": get_accelerator().device_name() == "cpu"}
    made = [get_accelerator().create_op_builder(name) for name, is_needed in names.items() if is_needed]
    builders = [each for each in made if each is not None and each.is_compatible(verbose=False)]
    if new := [each.name for each in builders if not (root / each.name / f"{each.name}.so").exists()]:
        logger.warning("DeepSpeed compiles %s, once for this environment: one to two minutes each.", " and ".join(new))
    with locked(root, "DeepSpeed's operators"):
        for builder in builders:
            (root / builder.name / "lock").unlink(missing_ok=True)
            builder.load(verbose=False)

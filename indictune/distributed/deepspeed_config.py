"""Read a DeepSpeed file: what it says that flags say too, and what it says alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from indictune.distributed.communication import DEEPSPEED_NAMES

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
_TOTAL = "scheduler.params.total_num_steps"

# Values that a run needs, with the reason.
_NEEDED = {
    "zero_optimization.compute_grad_norm": (True, "the check for NaN needs the norm"),
    # With a fixed scale, DeepSpeed skips every step whose gradients overflow, without a warning.
    "fp16.loss_scale": (0, "DeepSpeed searches the scale"),
}

# Other keys that change the steps and are not in a checkpoint's states (0.19.8, `get_optimizer_configuration`).
_CHANGE_THE_STEPS = (
    *("scheduler", "optimizer.type", "optimizer.params.adam_w_mode"),
    *("optimizer.params.torch_adam", "optimizer.params.fp32_optimizer_states"),
    *("prescale_gradients", "gradient_predivide_factor"),
)

_NONE = "(none)"


class FileValue(NamedTuple):
    """A value of a strategy file that flags can give too.

    Attributes:
        key: in the file.
        value: in the file.
        fields: training arguments that say the same, with their values.
    """

    key: str
    value: Any
    fields: Mapping[str, Any]


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


def unusable(config: Mapping[str, Any], fp16: bool) -> list[tuple[str, Any, str]]:
    """Key, value and reason of the values in a DeepSpeed file that no run can use. Others replace them."""
    found = [
        (key, value, reason)
        for key, (needed, reason) in _NEEDED.items()
        if (value := _look_up(config, key)) not in (None, "auto", needed) and (fp16 or not key.startswith("fp16"))
    ]
    if isinstance(value := _look_up(config, _TOTAL), int):
        found.append((_TOTAL, value, "the steps of the run count"))
    if config.get(_SUMS) not in (None, "auto", *DEEPSPEED_NAMES.values()):
        found.append((_SUMS, config[_SUMS], "--reduce_dtype counts"))
    return found


def left_to_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed file with "auto" wherever a flag or the run says the value: transformers fills it in."""
    changed = copy.deepcopy(dict(config))
    for key in (*OVERLAP, *_TYPES, _BETAS, _TOTAL):
        _replace(changed, key, "auto")
    for key, (needed, _) in _NEEDED.items():
        _replace(changed, key, needed)
    return changed


def settings_of_steps(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the file that change the steps and that no flag sets, by dotted key."""
    found = {key: value for name in _CHANGE_THE_STEPS for key, value in _values(name, _look_up(config, name)).items()}
    of_flags = (*OVERLAP, _TOTAL)
    return {key: value for key, value in found.items() if value not in (None, "auto") and key not in of_flags}


def _values(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {key: inner for part, each in value.items() for key, inner in _values(f"{name}.{part}", each).items()}


def other_states(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Keys whose state in a checkpoint is incompatible, with the value `before` and `now`, of `settings_of_steps`.

    If the file names no schedule or no optimizer, the Trainer makes one, with its state in another place and shape.
    Seen: "FileNotFoundError", "NoneType" and a layout that "does not match" (0.19.8).
    """
    names = ("optimizer.type", "scheduler.type")
    pairs = [(name, str(before.get(name, _NONE)), str(now.get(name, _NONE))) for name in names]
    return [(name, was, is_now) for name, was, is_now in pairs if was.lower() != is_now.lower()]


def leaves_bad_steps_out(strategy: str) -> tuple[str, ...]:
    """The values of `--on_nonfinite` by which a strategy leaves out bad steps.

    DeepSpeed steps within the backward pass, and skips a step if the norm of the gradients is NaN or infinite. See
    `step` in `zero/stage_1_and_2.py` and `zero/stage3.py` (0.19.8). Under bf16, ZeRO-1 and ZeRO-2 do not skip it if
    `check_grad_overflow` is off. The loss is ignored; it may be infinite while its gradient is finite.
    """
    return ("rollback",) if strategy.startswith("zero") else ("skip", "rollback")


def _look_up(config: Mapping[str, Any], dotted_key: str) -> Any:
    value: Any = config
    for part in dotted_key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _replace(config: dict[str, Any], dotted_key: str, value: Any) -> None:
    """Replace a value that is there."""
    parent, _, name = dotted_key.rpartition(".")
    holder = _look_up(config, parent) if parent else config
    if isinstance(holder, dict) and name in holder:
        holder[name] = value

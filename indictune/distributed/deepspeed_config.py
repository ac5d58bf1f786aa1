"""Compare a DeepSpeed file with the flags, and with the file that a checkpoint was written with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from indictune.config.plan import AnyPlan
from indictune.distributed.communication import DEEPSPEED_NAMES
from indictune.errors import Problem, problem

# Key in the DeepSpeed file -> the training argument that must be equal.
OVERLAP = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "train_batch_size": "global_batch_size",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}

# Other keys that change the steps and are not in a checkpoint's states (0.19.8, `get_optimizer_configuration`).
_CHANGE_THE_STEPS = (
    *("scheduler", "optimizer.type", "optimizer.params.adam_w_mode"),
    *("optimizer.params.torch_adam", "optimizer.params.fp32_optimizer_states"),
    *("prescale_gradients", "gradient_predivide_factor", "communication_data_type"),
)

_NONE = "(none)"


def check_deepspeed_file(plan: AnyPlan) -> list[Problem]:
    """Refuse values of the file that are not "auto" and contradict the flags or what follows from them."""
    config, training = plan.launch.deepspeed or {}, plan.training
    wanted: dict[str, tuple[str, Any]] = {key: (f"--{name}", getattr(training, name)) for key, name in OVERLAP.items()}
    wanted["optimizer.params.betas"] = "--adam_beta1 --adam_beta2", [training.adam_beta1, training.adam_beta2]
    wanted["communication_data_type"] = "--reduce_dtype", DEEPSPEED_NAMES[training.reduce_dtype]
    wanted["zero_optimization.compute_grad_norm"] = "the value for the NaN check", True
    if training.fp16:
        # With a fixed scale, DeepSpeed skips every step whose gradients overflow, without a warning.
        wanted["fp16.loss_scale"] = "a loss scale that DeepSpeed searches", 0
    steps = plan.derived.get("gradient_accumulation_steps")
    if steps is not None:
        wanted["gradient_accumulation_steps"] = "the accumulation of --global_batch_size", steps
    given = {key: _look_up(config, key) for key in wanted}
    return [
        problem("deepspeed-file-contradicts", "--deepspeed", key=key, in_file=given[key], flag_name=name, wanted=value)
        for key, (name, value) in wanted.items()
        if given[key] not in (None, "auto", value)
    ]


def settings_of_steps(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the file that change the steps and that no flag sets, by dotted key."""
    found = {key: value for name in _CHANGE_THE_STEPS for key, value in _values(name, _look_up(config, name)).items()}
    return {key: value for key, value in found.items() if value not in (None, "auto") and key not in OVERLAP}


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

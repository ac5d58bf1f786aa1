"""What a DeepSpeed file says, and where it contradicts the flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from indictune.config.plan import AnyPlan
from indictune.errors import Problem, problem

# Key in the DeepSpeed file, and the training argument that must not say something else.
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

# Other keys that change the steps. The rest concerns memory and speed, is part of the checkpoint's states, or is
# refused. These parameters of the optimizer are not in its states (0.19.8, `get_optimizer_configuration`).
_CHANGE_THE_STEPS = (
    *("scheduler", "optimizer.type", "optimizer.params.adam_w_mode"),
    *("optimizer.params.torch_adam", "optimizer.params.fp32_optimizer_states"),
    *("prescale_gradients", "gradient_predivide_factor", "communication_data_type"),
)

# They count steps, and take over each other's state (0.19.8, `runtime/lr_schedules.py`). A file may name torch's too.
_OWN_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_NONE = "(none)"


def check_deepspeed_file(plan: AnyPlan) -> list[Problem]:
    """Compare the values of the file that are not "auto" with the flags and with what follows from them."""
    config, training = plan.launch.deepspeed or {}, plan.training
    pairs: list[tuple[str, str, Any]] = [(key, f"--{name}", getattr(training, name)) for key, name in OVERLAP.items()]
    betas = [training.adam_beta1, training.adam_beta2]
    pairs.append(("optimizer.params.betas", "--adam_beta1 --adam_beta2", betas))
    steps = plan.derived.get("gradient_accumulation_steps")
    if steps is not None:
        pairs.append(("gradient_accumulation_steps", "the accumulation of --global_batch_size", steps))
    found = []
    for key, flag, wanted in pairs:
        in_file = _look_up(config, key)
        if in_file not in (None, "auto") and in_file != wanted:
            found.append(
                problem(
                    "deepspeed-file-contradicts",
                    "--deepspeed",
                    key=key,
                    in_file=in_file,
                    flag_name=flag,
                    wanted=wanted,
                )
            )
    if _look_up(config, "zero_optimization.compute_grad_norm") is False:
        found.append(problem("deepspeed-without-gradient-norm", "--deepspeed"))
    scale = _look_up(config, "fp16.loss_scale")
    if training.fp16 and scale not in (None, 0):
        found.append(problem("deepspeed-fixed-loss-scale", "--deepspeed", scale))
    return found


def settings_of_steps(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the file that change the steps, by dotted key, without those that follow from flags."""
    found = {key: value for name in _CHANGE_THE_STEPS for key, value in _values(name, _look_up(config, name)).items()}
    return {key: value for key, value in found.items() if value not in (None, "auto") and key not in OVERLAP}


def _values(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {key: inner for part, each in value.items() for key, inner in _values(f"{name}.{part}", each).items()}


def other_states(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Keys whose states another file cannot take over, each with both values.

    Where the file names no schedule, or no optimizer, the Trainer makes one, whose state has another place and shape.
    Seen: "FileNotFoundError", "NoneType" and a layout that "does not match" (0.19.8).

    Args:
        before: `settings_of_steps` of the file that wrote the states.
        now: of the other file.
    """
    names = ("optimizer.type", "scheduler.type")
    pairs = [(name, str(before.get(name, _NONE)), str(now.get(name, _NONE))) for name in names]
    return [
        (name, was, is_now)
        for name, was, is_now in pairs
        if _kind_of_optimizer(was) != _kind_of_optimizer(is_now) and not {was, is_now} <= set(_OWN_SCHEDULES)
    ]


def _kind_of_optimizer(name: str) -> str:
    """As DeepSpeed (0.19.8) reads the name: Adam and AdamW are one optimizer, which `adam_w_mode` switches."""
    return "adam" if name.lower() == "adamw" else name.lower()


def leaves_bad_steps_out(strategy: str) -> tuple[str, ...]:
    """The values of `--on_nonfinite` by which a strategy leaves bad steps out.

    DeepSpeed takes a step within the backward pass, and leaves it out where the norm of the gradients is NaN or
    infinite (0.19.8, `step` in `zero/stage_1_and_2.py` and `zero/stage3.py`), but not under bf16 where ZeRO-1 or
    ZeRO-2 has `check_grad_overflow` off. It looks at no loss, which may be infinite where its gradient is finite.
    """
    return ("rollback",) if strategy.startswith("zero") else ("skip", "rollback")


def has_found_no_scale(error: Exception) -> bool:
    """Whether DeepSpeed ended a run under fp16 because no loss scale makes the gradient finite.

    It raises within a step, on all ranks (0.19.8, `DynamicLossScaler.update_scale`).
    """
    return type(error) is Exception and "loss scale already at minimum" in str(error)


def _look_up(config: Mapping[str, Any], dotted_key: str) -> Any:
    value: Any = config
    for part in dotted_key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value

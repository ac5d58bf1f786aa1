"""Where a DeepSpeed file and the flags say different things, and what DeepSpeed cannot do."""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from typing import Any

from indictune.errors import UserError

# Key in the DeepSpeed file, and the field of the training arguments that must not say something else.
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

# What else decides the steps. The rest is of memory and speed, is in the states of a checkpoint, or is refused. Of the
# optimizer's parameters these are not among its states, as the others are (0.19.8, `get_optimizer_configuration`).
_OF_THE_STEPS = (
    *("scheduler", "optimizer.type", "optimizer.params.adam_w_mode"),
    *("optimizer.params.torch_adam", "optimizer.params.fp32_optimizer_states"),
    *("prescale_gradients", "gradient_predivide_factor", "communication_data_type"),
)

# They count steps, and take each other's state over (0.19.8, `runtime/lr_schedules.py`). A file may name torch's too.
_OWN_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_NONE = "(none)"


def check_deepspeed(
    config: Mapping[str, Any], planned: Callable[[str], Any], accumulation_steps: int | None = None
) -> None:
    """Compare the values of the file that are not "auto" with what the flags will be.

    Args:
        config: content of the DeepSpeed file.
        planned: the value that a field of the training arguments will have.
        accumulation_steps: micro-batches a process and optimizer step, where that is known already.

    Raises:
        UserError: all contradictions, each with both values; or the file leaves out what a run needs.
    """
    pairs = [(key, f"--{field}", planned(field)) for key, field in OVERLAP.items()]
    betas = [planned("adam_beta1"), planned("adam_beta2")]
    pairs.append(("optimizer.params.betas", "--adam_beta1 --adam_beta2", betas))
    if accumulation_steps is not None:
        pairs.append(("gradient_accumulation_steps", "the accumulation of --global_batch_size", accumulation_steps))
    problems = []
    for key, flag, wanted in pairs:
        given = _look_up(config, key)
        if given not in (None, "auto") and given != wanted:
            problems.append(
                f'--deepspeed: the file says {key} = {given}, and {flag} is {wanted}. Write "auto" in the file, or '
                "make them equal."
            )
    if _look_up(config, "zero_optimization.compute_grad_norm") is False:
        problems.append(
            "--deepspeed: the file says zero_optimization.compute_grad_norm = false, and a NaN is known by the norm "
            "of the gradients. Take the line out."
        )
    scale = _look_up(config, "fp16.loss_scale")
    if planned("fp16") and scale not in (None, 0):
        problems.append(
            f"--deepspeed: the file says fp16.loss_scale = {scale}; DeepSpeed leaves each step out whose gradients "
            "it makes infinite, be it all of them, without a word. Write 0: it looks for a scale."
        )
    if problems:
        raise UserError(problems)


def settings_of_steps(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the file that decide the steps, by dotted key, but for those that follow from flags."""
    found = {key: value for name in _OF_THE_STEPS for key, value in _values(name, _look_up(config, name)).items()}
    return {key: value for key, value in found.items() if value not in (None, "auto") and key not in OVERLAP}


def _values(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    return {key: inner for part, each in value.items() for key, inner in _values(f"{name}.{part}", each).items()}


def other_states(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What has a state of another kind in another file: its key and both values.

    Where the file names no schedule, or no optimizer, the Trainer makes one, whose state has another place and another
    shape: seen are "FileNotFoundError", "NoneType" and a layout that "does not match" (0.19.8).

    Args:
        before: what `settings_of_steps` gave of the one.
        now: of the other.
    """
    names = ("optimizer.type", "scheduler.type")
    pairs = [(name, str(before.get(name, _NONE)), str(now.get(name, _NONE))) for name in names]
    return [
        (name, was, is_now)
        for name, was, is_now in pairs
        if _kind_of_optimizer(was) != _kind_of_optimizer(is_now) and not {was, is_now} <= set(_OWN_SCHEDULES)
    ]


def _kind_of_optimizer(name: str) -> str:
    """As DeepSpeed (0.19.8) reads its name: it makes one optimizer of Adam and AdamW, by `adam_w_mode`."""
    return "adam" if name.lower() == "adamw" else name.lower()


def check_offloaded_optimizer(strategy: str, optim: str) -> None:
    """Refuse an optimizer that would be replaced in silence: accelerate puts DeepSpeed's Adam in its place.

    Args:
        strategy: of the launch.
        optim: `--optim`.

    Raises:
        UserError: optimizer states are offloaded, and the optimizer is not AdamW.
    """
    if strategy.startswith("zero") and strategy.endswith("_offload") and "adamw" not in optim.lower():
        raise UserError(
            f"--optim {optim}: under {strategy} DeepSpeed runs its own AdamW on the CPU instead. Leave --optim out, "
            "or take a strategy without offload."
        )


def check_folders(strategy: str, folders: Mapping[str, str | None]) -> None:
    """Refuse folders whose checkpoints could be saved and never gone on from.

    What loads them looks for their files by `glob`, which takes the folder's name for a pattern (transformers 5.23,
    `deepspeed_load_checkpoint`; DeepSpeed 0.19.8, `_get_all_ckpt_names`).

    Args:
        strategy: of the launch.
        folders: by the flags that name them; None where one names none.

    Raises:
        UserError: the run is ZeRO's, and a name holds `*`, `?` or `[`.
    """
    problems = [
        f"{flag} {folder}: DeepSpeed, which {strategy} runs on, finds no checkpoint below a folder with *, ? or [ in "
        "its name; name one without them (a folder that is there can be renamed)."
        for flag, folder in folders.items()
        if folder is not None and glob.escape(folder) != folder
    ]
    if problems and strategy.startswith("zero"):
        raise UserError(problems)


def leaves_bad_steps_out(strategy: str) -> tuple[str, ...]:
    """The values of `--on_nonfinite` by which a strategy leaves bad steps out.

    DeepSpeed takes a step within the backward pass, and leaves it out where the norm of the gradients is NaN or
    infinite (0.19.8, `step` in `zero/stage_1_and_2.py` and `zero/stage3.py`), but not under bf16 where ZeRO-1 or
    ZeRO-2 has `check_grad_overflow` off. It looks at no loss, which may be infinite where its gradient is finite.
    """
    return ("rollback",) if strategy.startswith("zero") else ("skip", "rollback")


def has_found_no_scale(error: Exception) -> bool:
    """Whether an exception is the one by which DeepSpeed ends a run under fp16 whose loss has no scale that makes its
    gradient finite, within a step and on all ranks (0.19.8, `DynamicLossScaler.update_scale`)."""
    return type(error) is Exception and "loss scale already at minimum" in str(error)


def check_bad_steps(strategy: str, on_nonfinite: str) -> None:
    """Refuse to leave bad steps out where it cannot be done.

    Raises:
        UserError: DeepSpeed decides which step is left out, and all bad ones were to be.
    """
    if on_nonfinite not in ("stop", *leaves_bad_steps_out(strategy)):
        raise UserError(
            "--on_nonfinite skip: DeepSpeed decides itself, by the gradients alone, whether a step is left out, and "
            "has taken one whose loss alone is NaN or infinite before that is seen; give rollback or stop."
        )


def _look_up(config: Mapping[str, Any], dotted_key: str) -> Any:
    value: Any = config
    for part in dotted_key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value

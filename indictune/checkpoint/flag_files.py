"""What files that flags name say of the steps: they may be edited between two starts of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indictune.data import class_weights
from indictune.distributed import deepspeed_config
from indictune.files import write_json

NAME = "flag_files.json"

Content = Mapping[str, Mapping[str, Any]]  # by flag, without dashes, and by name in its file


def read(configuration: Mapping[str, Any], in_deepspeed: Mapping[str, Any] | None) -> Content:
    """What the files of a run say.

    Args:
        configuration: of the run, as for `recipe.yaml`.
        in_deepspeed: content of its DeepSpeed file, empty where it has none; None without DeepSpeed.

    Raises:
        UserError: a file cannot be read any more.
    """
    found: dict[str, Mapping[str, Any]] = {}
    weights = configuration.get("class_weights")
    if weights not in (None, class_weights.BALANCED):
        found["class_weights"] = class_weights.read_file(weights)
    if in_deepspeed is not None:
        found["deepspeed"] = deepspeed_config.settings_of_steps(in_deepspeed)
    return found


def write(output_dir: Path, content: Content) -> None:
    """Note it beside `recipe.yaml`, for the checkpoints to come.

    Raises:
        OSError: the disk does not take it.
    """
    if content:
        write_json(output_dir / NAME, content)
    else:
        (output_dir / NAME).unlink(missing_ok=True)


def differences(checkpoint: Path, now: Content) -> list[str]:
    """What other files said when a checkpoint was written, value by value; a flag that was not given then, or is not
    now, is not compared.

    Args:
        checkpoint: to go on from.
        now: what they say.
    """
    before = _content(checkpoint)
    pairs = [(flag, before[flag], now[flag]) for flag in sorted(before.keys() & now.keys())]
    return [
        f"--{flag}: {name} {was.get(name, '(none)')}, now {is_now.get(name, '(none)')}"
        for flag, was, is_now in pairs
        for name in sorted(was.keys() | is_now.keys())
        if was.get(name) != is_now.get(name)
    ]


def other_states(checkpoint: Path, in_deepspeed: Mapping[str, Any]) -> list[str]:
    """Why the optimizer, or the schedule, of a run's DeepSpeed file cannot take over a checkpoint's state, in a
    sentence each.

    Args:
        checkpoint: to go on from, of such a run.
        in_deepspeed: content of the file.
    """
    before = _content(checkpoint).get("deepspeed")
    if before is None:  # an earlier version wrote it
        return []
    return [
        f"--deepspeed: {name} {was}, now {is_now}: {checkpoint.name} holds a state of the first, which the other "
        "cannot take over; make the file what it was, or start afresh in another --output_dir."
        for name, was, is_now in deepspeed_config.other_states(
            before, deepspeed_config.settings_of_steps(in_deepspeed)
        )
    ]


def _content(checkpoint: Path) -> Content:
    """What files said when a checkpoint was written; empty where it does not tell (`settings.settings_of`)."""
    try:
        return dict(json.loads((checkpoint / NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}

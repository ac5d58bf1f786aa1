"""Record the content of files that flags name: they may be edited between two starts of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indictune.data import class_weights
from indictune.distributed import deepspeed_config
from indictune.files import write_json

NAME = "flag_files.json"

Content = dict[str, Any]  # by flag, without dashes, and by name in its file


def read(configuration: Mapping[str, Any], deepspeed: Mapping[str, Any] | None) -> Content:
    """The values in the files of a run that change its steps.

    Args:
        configuration: of the run, as for `recipe.yaml`.
        deepspeed: content of its DeepSpeed file, empty if it has none; None without DeepSpeed.

    Raises:
        UserError: a file cannot be read.
    """
    found: Content = {}
    weights = configuration.get("class_weights")
    if weights not in (None, class_weights.BALANCED):
        found["class_weights"] = class_weights.read_file(weights)
    if deepspeed is not None:
        found["deepspeed"] = deepspeed_config.settings_of_steps(deepspeed)
    return found


def write(output_dir: Path, content: Content) -> None:
    """Write the values next to `recipe.yaml`, for the checkpoints to come.

    Raises:
        OSError: the file cannot be written.
    """
    if content:
        write_json(output_dir / NAME, content)
    else:
        (output_dir / NAME).unlink(missing_ok=True)


def recorded(folder: Path) -> Content:
    """The values when a checkpoint was written; empty if it has none, or they cannot be read."""
    try:
        return dict(json.loads((folder / NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}

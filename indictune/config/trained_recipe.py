"""Read the recipe of the run that made a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from indictune.config.recipe import recorded_values
from indictune.credentials import NOT_YAML, without_its_text
from indictune.errors import UserError


def configuration_of(model: Path) -> dict[str, Any]:
    """The complete configuration in a model folder's `recipe.yaml`, without empty values; empty if it has none.

    Raises:
        UserError: `unreadable`.
    """
    trained = model / "recipe.yaml"
    try:
        if not trained.exists():
            return {}
        configuration = recorded_values(yaml.safe_load(trained.read_text(encoding="utf-8")))
    except (OSError, *NOT_YAML) as error:
        reason = error if isinstance(error, OSError) else without_its_text(error)
        raise UserError("unreadable", "--model", f"{model}: its recipe.yaml", reason=reason) from None
    return {name: value for name, value in configuration.items() if value is not None}

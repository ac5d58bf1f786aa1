"""Check attention and module names against the model's shapes, before any weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from indictune.config.arguments import ModelArguments
from indictune.errors import Problems, UserError
from indictune.models.adapters import ALL_LINEAR, check_names
from indictune.models.load_errors import explained, first_line

# Packages to install for transformers' names. Its messages (5.23) do not name them.
_PACKAGES = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}


def check_shapes(kind: type[Any], args: ModelArguments, config: PreTrainedConfig, untouched: Sequence[str]) -> None:
    """Check the attention and the names of an adapter's modules.

    Args:
        kind: transformers' Auto class for the task.
        args: name the attention and the modules.
        config: of the model; it is not changed.
        untouched: modules without LoRA matrices.

    Raises:
        UserError: all problems of both, or `model-unreadable`.
    """
    problems = Problems()
    names_modules = args.lora_target_modules != [ALL_LINEAR] or args.modules_to_save
    if args.method != "full" and names_modules:
        with problems.collecting():
            with explained(args, Exception):
                shapes = _shapes(kind, args, config, None)
            check_names(shapes, args, untouched)
    if args.attn_implementation is not None:
        with problems.collecting():
            _check_attention(kind, args, config)
    problems.raise_any()


def _check_attention(kind: type[Any], args: ModelArguments, config: PreTrainedConfig) -> None:
    """Ask transformers for the model with this attention: it depends on the model and on installed packages.

    Raises:
        UserError: `attention-not-available`, or `model-unreadable` if the model fails with every attention.
    """
    name = args.attn_implementation
    try:
        _shapes(kind, args, config, name)
    except Exception as error:
        with explained(args, Exception):  # a configuration that fails with every attention
            _shapes(kind, args, config, None)
        package = f" The package is {_PACKAGES[name]}." if isinstance(error, ImportError) and name in _PACKAGES else ""
        details = {"model": args.model_name_or_path, "reason": first_line(error), "package": package}
        raise UserError("attention-not-available", "--attn_implementation", name, **details) from error


def _shapes(kind: type[Any], args: ModelArguments, config: PreTrainedConfig, attention: str | None) -> PreTrainedModel:
    """The model on the device `meta`, from a copy of the configuration, because transformers changes it."""
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(
            deepcopy(config), trust_remote_code=args.trust_remote_code, attn_implementation=attention
        )
    return model

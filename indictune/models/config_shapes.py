"""Check attention and module names against the model's shapes, before any weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from indictune.config.arguments import ModelArguments
from indictune.errors import Problem, UserError, problem
from indictune.models.adapters import ALL_LINEAR
from indictune.models.load_errors import explained, first_line


def check_shapes(kind: type[Any], args: ModelArguments, config: PreTrainedConfig, untouched: Sequence[str]) -> None:
    """Check the attention and the names of an adapter's modules.

    Args:
        kind: transformers' Auto class for the task.
        args: name the attention and the modules.
        config: of the model; it is not changed.
        untouched: modules without LoRA matrices.

    Raises:
        UserError: `attention-not-available` or `no-such-module`, with all problems; or `model-unreadable` if the model
            fails with every attention.
    """
    names_modules = args.method != "full" and (args.lora_target_modules != [ALL_LINEAR] or args.modules_to_save)
    if not names_modules and args.attn_implementation is None:
        return
    with explained(args, Exception):
        model = _model(kind, args, config, None)
    problems = _name_problems(model, args, untouched) if names_modules else []
    try:
        _model(kind, args, config, args.attn_implementation)
    except Exception as error:  # an attention needs packages and support by the model
        details = {"model": args.model_name_or_path, "reason": first_line(error)}
        problems.append(
            problem("attention-not-available", "--attn_implementation", args.attn_implementation, **details)
        )
    if problems:
        raise UserError(problems=problems)


def _model(kind: type[Any], args: ModelArguments, config: PreTrainedConfig, attention: str | None) -> PreTrainedModel:
    """The model on the device `meta`, from a copy of the configuration, because transformers changes it."""
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(
            deepcopy(config), trust_remote_code=args.trust_remote_code, attn_implementation=attention
        )
    return model


def _name_problems(model: PreTrainedModel, args: ModelArguments, untouched: Sequence[str]) -> list[Problem]:
    """Names without a match, which peft ignores if another name matches."""
    modules = [name for name, _ in model.named_modules()]
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    targets = [name for name in linear if not name.startswith((*args.modules_to_save, *untouched))]
    wanted = [name for name in args.lora_target_modules if name != ALL_LINEAR]
    problems = _unmatched("--lora_target_modules", wanted, targets)
    problems += _unmatched("--modules_to_save", args.modules_to_save, modules)
    return problems


def _unmatched(flag: str, names: Sequence[str], modules: Sequence[str]) -> list[Problem]:
    """A problem if a name is no module's name, nor the end of one."""
    unmatched = [name for name in names if not any(f".{each}".endswith(f".{name}") for each in modules)]
    known = ", ".join(sorted({each.rpartition(".")[2] for each in modules if each and not each[-1].isdigit()}))
    return [problem("no-such-module", flag, " ".join(unmatched), known=known)] if unmatched else []

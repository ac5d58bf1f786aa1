"""Whether the optimizer and the schedule of the learning rate can be made: both are made for one weight."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import Trainer, get_scheduler
from transformers.training_args import ParallelMode, _convert_str_dict

from indictune.config.plan import AnyPlan
from indictune.errors import Problem, problem


def check_optimizer(plan: AnyPlan) -> list[Problem]:
    """Refuse an optimizer or a schedule that cannot be made."""
    if not plan.training.learning_rate >= 0:  # `check_values` refuses it
        return []
    return [*_try_optimizer(plan), *_try_schedule(plan)]


def _try_optimizer(plan: AnyPlan) -> list[Problem]:
    optim, settings_given = plan.training.optim, plan.training.optim_args
    args: Any = SimpleNamespace(**vars(plan.training), parallel_mode=ParallelMode.NOT_PARALLEL)
    if args.optim_target_modules is not None:
        args.optim_target_modules = "all-linear"  # the named modules are not in this model
    model: Any = nn.Sequential(nn.Linear(1, 1))
    try:
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if not {"params", "model", "optimizer_dict"} & settings.keys():  # such an optimizer chooses its weights
            kind(model.parameters(), **settings)
    except Exception as error:
        given = f" --optim_args {settings_given}" if settings_given else ""
        return [problem("optimizer-cannot-be-made", "--optim", f"{optim}{given}", reason=_reason(error))]
    return []


def _try_schedule(plan: AnyPlan) -> list[Problem]:
    name, given = plan.training.lr_scheduler_type, plan.training.lr_scheduler_kwargs
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), plan.training.learning_rate)
    try:
        settings = _convert_str_dict(json.loads(given)) if isinstance(given, str) else given
        get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=1, scheduler_specific_kwargs=settings)
    except Exception as error:
        shown = f"{name} --lr_scheduler_kwargs {given}" if given else str(name)
        return [problem("schedule-cannot-be-made", "--lr_scheduler_type", shown, reason=_reason(error))]
    return []


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().rstrip('.')}"

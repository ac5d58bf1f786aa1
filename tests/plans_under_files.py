"""The plan of a run under a strategy file, and its problems."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from transformers import BertConfig, PreTrainedConfig

from indictune.config.arguments import ModelArguments
from indictune.config.plan import AnyPlan
from indictune.config.recipe import read_recipe
from indictune.errors import Problem
from indictune.preflight.checks import preflight
from indictune.preflight.values import make_plan
from indictune.tasks.classification import Classification
from tests.launch_environment import RANK_1_OF_2, launched


class Tiny(Classification):
    """Of a model that no file has."""

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return BertConfig()


def planned(file: Path, *flags: str) -> tuple[AnyPlan, list[Problem]]:
    """The plan of one of two processes under an accelerate config, and all its problems."""
    return planned_by(launched(file), *flags)


def planned_with_deepspeed(file: Path, *flags: str) -> tuple[AnyPlan, list[Problem]]:
    """The plan of one of two processes of torchrun with a DeepSpeed file, and all its problems."""
    return planned_by({**os.environ, **RANK_1_OF_2}, "--deepspeed", str(file), *flags)


def planned_by(environ: Mapping[str, str], *flags: str) -> tuple[AnyPlan, list[Problem]]:
    """The plan of a process, and all its problems."""
    task = Tiny()
    argv = ["--output_dir", "out", "--dataset_name", "builtin:tweets", *flags]
    plan, problems = make_plan(read_recipe(argv, task.arguments()), environ, task)
    return plan, problems + preflight(plan, task)

"""Plans of runs, without a launcher and without files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from indictune.config.arguments import (
    DataArguments,
    IndicTrainingArguments,
    ModelArguments,
    SentimentTrainingArguments,
)
from indictune.config.plan import AnyPlan, Launch, RunPlan, unresolved
from indictune.config.recipe import Recipe
from indictune.errors import Problem, Problems

STRATEGIES = ("single", "ddp", "fsdp2", "fsdp2_offload", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")


def plan_of(
    training: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    launch: Launch | None = None,
    arguments: type[IndicTrainingArguments] = SentimentTrainingArguments,
    output_dir: str = "out",
    gpus: int = 0,
    environ: Mapping[str, str] | None = None,
    steps: int | None = None,
) -> AnyPlan:
    """A plan with the given values and the defaults; `steps` of accumulation follow from other values."""
    values = {**(training or {}), "output_dir": output_dir}
    plan: RunPlan[DataArguments, IndicTrainingArguments] = RunPlan(
        recipe=Recipe(values, Problems()),
        model=unresolved(ModelArguments, {"model_name_or_path": "some/model", **(model or {})}),
        data=unresolved(DataArguments, {}),
        training=unresolved(arguments, values),
        launch=launch or Launch("single"),
        gpus=gpus,
        environ=environ or {},
    )
    return plan if steps is None else plan.derive(gradient_accumulation_steps=steps)


def codes_of(check: Callable[[AnyPlan], list[Problem]], plan: AnyPlan) -> list[tuple[str, str]]:
    """Code and flag of each problem that a check finds."""
    return codes(check(plan))


def codes(problems: Iterable[Problem]) -> list[tuple[str, str]]:
    """Code and flag of each problem."""
    return [(each.code, each.flag) for each in problems]

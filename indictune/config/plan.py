"""The frozen plan of a run: what the user asked for, and what follows from launch, machine and recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from transformers import PreTrainedConfig

from indictune.config.arguments import IndicTrainingArguments, ModelArguments
from indictune.config.recipe import Recipe, default_of
from indictune.upstream import commit_of

Arguments = TypeVar("Arguments")


class RowArguments(Protocol):
    """What every task's flags of rows have."""

    @property
    def max_length(self) -> int | str:
        """Most tokens of a row, or `auto`."""


Data = TypeVar("Data", bound=RowArguments, covariant=True)
Training = TypeVar("Training", bound=IndicTrainingArguments, covariant=True)


@dataclass(frozen=True)
class Axes:
    """Over how many processes a run splits what. What they leave of the processes splits the batch.

    Rank numbers count the tensor axis first, then context, data and pipeline.

    Attributes:
        pipeline: stages, each with some of the layers.
        tensor: parts of each matrix.
        context: parts of each row.
        replicas: of a model that FSDP2 shards; the data axis has that many times its shards.
        is_sharded: whether FSDP2 shards the weights over the data axis.
    """

    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    replicas: int = 1
    is_sharded: bool = False

    @property
    def model_ranks(self) -> int:
        """Processes that work on the same rows."""
        return self.pipeline * self.context * self.tensor


@dataclass(frozen=True)
class Launch:
    """What the launcher asked of one process.

    Attributes:
        strategy: `single`, or the name of a file in `accelerate_configs/` without its ending, such as `ddp`.
        deepspeed: content of the DeepSpeed file, or the like values of an accelerate config; None without DeepSpeed.
        deepspeed_source: path of that file, or its text.
        from_file: fields that neither recipe nor flags give, with the values of the strategy file.
        is_known: False where the environment could not be read; then the strategy is a placeholder.
        axes: what is split over the processes.
    """

    strategy: str
    world_size: int = 1
    local_world_size: int = 1
    rank: int = 0
    deepspeed: Mapping[str, Any] | None = None
    deepspeed_source: str | None = None
    from_file: Mapping[str, Any] = field(default_factory=dict)
    is_known: bool = True
    axes: Axes = Axes()

    @property
    def is_one_node(self) -> bool:
        """Whether all processes run on this node."""
        return self.local_world_size == self.world_size

    @property
    def data_size(self) -> int:
        """Processes, or groups of processes, that each have their own rows."""
        return self.world_size // self.axes.model_ranks

    @property
    def data_rank(self) -> int:
        """The number of this process among `data_size`."""
        return self.rank // (self.axes.context * self.axes.tensor) % self.data_size

    @property
    def measures_rows(self) -> bool:
        """Whether this process speaks for those that work on its rows: the first of those with the last layers."""
        inner = self.axes.context * self.axes.tensor
        return self.rank % inner == 0 and self.rank >= self.world_size - inner * self.data_size


SINGLE = Launch("single")


@dataclass(frozen=True)
class RunPlan(Generic[Data, Training]):
    """Everything that is known of a run before a row is read.

    Attributes:
        training: the training arguments with given and derived values. Read fields only: `__post_init__`, which would
            start the process group, has not run.
        gpus: that this process sees.
        environ: environment variables of this process.
        model_config: configuration of the model; None where it could not be read.
        derived: values that follow from launch, machine and rows, by field.
        head: end of the class names of the task's models, such as `ForCausalLM`.
    """

    recipe: Recipe
    model: ModelArguments
    data: Data
    training: Training
    launch: Launch = SINGLE
    gpus: int = field(default_factory=torch.cuda.device_count)
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    model_config: PreTrainedConfig | None = field(default=None, repr=False)
    derived: Mapping[str, Any] = field(default_factory=dict)
    head: str = ""

    @property
    def output_dir(self) -> Path:
        """The folder of the run."""
        return Path(self.training.output_dir or ".")

    @property
    def sequence_limit(self) -> int:
        """Most tokens that the model reads at once. Before `--max_length auto` is found: its positions, or 512."""
        if isinstance(self.data.max_length, int):
            return self.data.max_length
        return int(self.model_values.get("max_position_embeddings") or 512)

    @property
    def configuration(self) -> dict[str, Any]:
        """Every field of the run with its given or derived value."""
        return vars(self.training) | vars(self.data) | vars(self.model)

    @property
    def known_config(self) -> PreTrainedConfig:
        """The configuration of the model, once a check has refused the plan without one."""
        assert self.model_config is not None
        return self.model_config

    @property
    def model_values(self) -> dict[str, Any]:
        """The model's configuration as in `config.json`, and its `_commit_hash` on the Hub; empty if it is unknown."""
        config = self.model_config
        return {} if config is None else config.to_dict() | {"_commit_hash": commit_of(config)}

    def derive(self, **values: Any) -> RunPlan[Data, Training]:
        """The plan with values that follow from others."""
        derived = {**self.derived, **values}
        training = unresolved(type(self.training), self.recipe.values | derived)
        return replace(self, training=training, derived=derived)

    def with_max_length(self, max_length: int | None) -> RunPlan[Data, Training]:
        """The plan with the `--max_length` that was found in the rows; None for the one given."""
        if max_length in (None, self.data.max_length):
            return self
        return replace(self, data=replace(self.data, max_length=max_length))  # type: ignore[type-var]


AnyPlan = RunPlan[RowArguments, IndicTrainingArguments]


def unresolved(arguments: type[Arguments], values: Mapping[str, Any]) -> Arguments:
    """An instance with the given values or the defaults. Its `__post_init__` does not run, so nothing is checked."""
    instance = object.__new__(arguments)
    for each in fields(arguments):  # type: ignore[arg-type]
        is_given = each.init and each.name in values
        object.__setattr__(instance, each.name, values[each.name] if is_given else default_of(each))
    return instance

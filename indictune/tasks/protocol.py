"""What a task is: how its rows are read and tokenised, which model learns them, and what is minimised and measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from indictune.config.arguments import IndicTrainingArguments, ModelArguments
from indictune.config.plan import RowArguments, RunPlan
from indictune.config.shared_arguments import EvaluationArguments
from indictune.data.collation import Row
from indictune.data.languages import scripts_of
from indictune.errors import Problem, Problems
from indictune.evaluation.breakdown import Breakdown, RowFacts, block_of
from indictune.models.load import Model, load_trained
from indictune.tasks.loss import SharedLoss

if TYPE_CHECKING:
    from datasets import Dataset

    from indictune.data.chat.messages import Message
    from indictune.data.health.row_health import RowHealth

Batch = dict[str, torch.Tensor]
Collator = Callable[[list[Row]], dict[str, Any]]
Results = Sequence[np.ndarray]  # of `Objective.measure`, each [rows, ...] in the dataset's order
Scripts = Sequence[str] | None  # of each row, as of `scripts_of`; None if unknown


def row_facts(dataset: Dataset, scripts: Scripts) -> RowFacts:
    """The languages, scripts and lengths of the rows of an evaluation."""
    return RowFacts(dataset["language"][:], scripts, np.asarray(dataset["length"][:]))


class Objective(ABC):
    """How a model of one task is trained and scored."""

    kind: type[Any]  # transformers' Auto class of the model
    dtype = torch.float32  # of the weights of a saved model, unless they are quantised
    METRICS: tuple[str, ...] = ()  # scores of all rows and of each language, in `metrics.json` and in tables
    loss: SharedLoss | None = None  # of a micro-batch; None if the trainer has its own
    keeps_scores: bool = False  # whether `measure` keeps all that `predictions` and `breakdown` need

    def prepare(self, model: nn.Module, padded: bool) -> None:  # noqa: B027, a chat's trainer has prepared its model
        """Let a model read the batches of the collator, before its trainer has it."""

    @abstractmethod
    def collator(self, evaluating: bool) -> Collator:
        """Makes a micro-batch of rows. For evaluation it adds `row_numbers`, int64 [rows]."""

    @abstractmethod
    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        """What an evaluation keeps of each row of a micro-batch, each [rows] or [rows, ...]."""

    def known(self, dataset: Dataset, measured: Results) -> Results:
        """What else each row is scored by, [rows] or [rows, ...] each: of all rows at once, unlike scores."""
        return ()

    def fit(self, dataset: Dataset, results: Results) -> None:  # noqa: B027, most tasks fit nothing
        """Fit what the validation rows decide, such as a threshold, before they are scored; see `breakdown`."""

    @abstractmethod
    def breakdown(self, dataset: Dataset, results: Results, scripts: Scripts = None, draws: int = 0) -> Breakdown:
        """The scores of an evaluation, which all others are taken from; `draws` is 0 for no intervals."""

    def predictions(self, dataset: Dataset, results: Results) -> Iterator[dict[str, Any]]:
        """What the model makes of each row, for `predictions.jsonl`. By default nothing."""
        return iter(())

    def compared(self, dataset: Dataset, results: Results | None) -> tuple[list[Any], list[Any]] | None:
        """What `--metrics` compares: predictions (the right answers without results), and right answers; or None."""
        return None

    def metrics(self, found: Breakdown) -> dict[str, Any]:
        """The block of `metrics.json` of an evaluation."""
        return block_of(found, lambda group: {name: group.scores[name].value for name in self.METRICS})

    def flatten(self, block: dict[str, Any]) -> dict[str, float]:
        """The numbers of a block that the Trainer logs and compares checkpoints by."""
        return {name: block[name] for name in ("loss", *self.METRICS)}

    def load(self, folder: Path, trusts_code: bool, device_map: str | None = None) -> Model:
        """The saved model; a `device_map` of "cpu" keeps it there."""
        return load_trained(folder, trusts_code, device_map, self.kind, self.dtype)

    def finish_tokenizer(self, folder: Path, max_length: int) -> None:  # noqa: B027, most tasks have nothing to do
        """Prepare the tokenizer saved in a folder for programs without this package."""

    def fitted(self) -> dict[str, Any]:
        """Entries for the `config.json` of the saved model, fitted on the validation rows."""
        return {}


Rows = TypeVar("Rows")
Data = TypeVar("Data", bound=RowArguments)
Training = TypeVar("Training", bound=IndicTrainingArguments)
EvaluationPlan = RunPlan[EvaluationArguments, IndicTrainingArguments]  # of `indictune evaluate`


@dataclass(frozen=True)
class Origins:
    """The `file:line` of each row of a split, by its number, and the texts, which can be read many times."""

    location: Callable[[int], str]
    texts: Iterable[str]


def joined_messages(messages: Iterable[Message]) -> str:
    """The texts of messages, joined by line breaks."""
    return "\n".join(message["content"] for message in messages)


@dataclass(frozen=True)
class Samples:
    """Conversations whose last answer the model writes itself."""

    split: str  # that they come from
    chats: Sequence[list[Message]]  # with the right answers
    rows: Dataset | None  # of the split's dataset; None for training rows, which are not scored
    template: str
    max_new_tokens: int

    def facts(self) -> RowFacts:
        """The languages, scripts and lengths of the rows."""
        assert self.rows is not None
        return row_facts(self.rows, scripts_of(map(joined_messages, self.chats), self.rows["language"][:]))


@dataclass(frozen=True)
class TestTokens:
    """The tokenised rows of a file for a saved model, notes for the user, and conversations that it answers."""

    rows: Dataset
    notes: Sequence[str] = ()
    origins: Origins | None = None
    samples: Samples | None = None


@dataclass(frozen=True)
class Inputs:
    """What rows are read from."""

    tokenizer: Tokenizer | None  # None if it was refused
    sources: Mapping[str, Any] | None  # of the rows, by split; None if they were refused
    checkpoint: Path | None = None  # that the run resumes from, as far as this node's disk shows it


@dataclass(frozen=True)
class Tokens:
    """The tokenised rows of each split: columns `input_ids`, `labels`, `length`, `language`, among others."""

    train: Dataset
    validation: Dataset | None
    test: Dataset | None
    row_location: Callable[[int], str]  # the `file:line` of a training row, given by its number
    folder: Path | None = None  # of the cached rows, with those that were left out; None without a cache
    notes: Sequence[str] = ()
    summary: str = ""  # a table for the user
    max_length: int | None = None  # most tokens that a text was cut to, or of a window; None: as the flag says
    origins: Mapping[str, Origins] = field(default_factory=dict)  # of each split, as far as the task knows them
    scores: Sequence[str] = ()  # `group_scores` of the task
    labels: Sequence[str] = ()  # that have scores of their own: labels, or kinds of entity
    health: RowHealth | None = None  # None if the task does not measure it
    samples: Samples | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)  # more of the training rows, for `metrics.json`


class Task(ABC, Generic[Rows, Data, Training]):
    """One kind of learning."""

    # The dataclasses of its flags: of the model, of the rows and of the training.
    arguments: tuple[type[ModelArguments], type[Data], type[Training]]
    lower_is_better: tuple[str, ...] = ("loss",)  # beginnings of metrics of which the lowest is the best
    takes_long_texts: bool = False  # whether `--long_text` has a meaning
    fits_max_length: bool = False  # whether `--max_length auto` has one
    packages: tuple[str, ...] = ()  # of the extra `train` that its trainer needs
    writes_answers: bool = False  # whether `--num_sample_generations` has a meaning
    name: str  # as `indictune prepare --task` takes it
    scores: tuple[str, ...]  # metrics that can compare checkpoints, the default first
    head: str  # end of the class names of its models, such as `ForTokenClassification`

    @abstractmethod
    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        """The configuration of the model; a `UserError` if it cannot be read, or is no model for this task."""

    @abstractmethod
    def check(self, plan: RunPlan[Data, Training]) -> list[Problem]:
        """Problems of the plan that only this task has. The plan has a model configuration."""

    def with_first_rows(self, plan: RunPlan[Data, Training]) -> RunPlan[Data, Training]:
        """The plan with values that follow from the first training rows."""
        return plan

    def metrics(self, plan: RunPlan[Data, Training]) -> tuple[str, ...]:
        """The metrics that can compare the checkpoints of this run."""
        return self.scores

    def group_scores(self, plan: RunPlan[Data, Training]) -> tuple[str, ...]:
        """The scores that each language, script and range of lengths has, the main one first. By default none."""
        return ()

    def label_scores(self, plan: RunPlan[Data, Training]) -> tuple[str, ...]:
        """The scores that each label has. By default none."""
        return ()

    def compares(self, plan: RunPlan[Any, Training]) -> str | None:
        """Which of `INVENTED` is like the rows that `--metrics` gets; None if it cannot be used."""
        return None

    @abstractmethod
    def open(self, plan: RunPlan[Data, Training], problems: Problems) -> Inputs:
        """Read the tokenizer, and find where the rows come from. Problems are added to `problems`."""

    @abstractmethod
    def read(self, plan: RunPlan[Data, Training], inputs: Inputs, problems: Problems) -> Rows | None:
        """Read, clean and check the rows; after a problem only the first ones. None if refused."""

    @abstractmethod
    def tokenise(self, plan: RunPlan[Data, Training], rows: Rows) -> Tokens:
        """Token ids of all rows."""

    def pads(self, plan: RunPlan[Data, Training]) -> bool:
        """Whether rows of a training micro-batch are padded; else they are joined."""
        return True

    @abstractmethod
    def load_model(self, plan: RunPlan[Data, Training], args: Training, rows: Rows, reads_weights: bool) -> Model:
        """The model, ready to train. `args` are completed; `reads_weights` is False if another rank sends them."""

    @abstractmethod
    def objective(
        self, args: Training, config: PreTrainedConfig, tokenizer: Tokenizer, padded: bool, rows: Rows | None
    ) -> Objective:
        """What the trainer minimises and measures; `rows` are None for a saved model, which is only evaluated."""

    def can_evaluate(self, config: Mapping[str, Any]) -> bool:
        """Whether a saved model is of this task, by the content of its `config.json`."""
        return any(str(name).endswith(self.head) for name in config.get("architectures") or [])

    @abstractmethod
    def tokenise_test(self, plan: EvaluationPlan, tokenizer: Tokenizer | None, problems: Problems) -> TestTokens:
        """The token ids of `--test_file` for a saved model. All `problems` are raised before anything is tokenised."""

"""Reward models: a model with one output learns which of two answers is the better one (Bradley-Terry)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from indictune.config.arguments import ModelArguments
from indictune.config.chat_arguments import AlignedModelArguments, RewardPairArguments, RewardTrainingArguments
from indictune.data.collation import IGNORED_LABEL, Row
from indictune.errors import Problem, problems_of
from indictune.evaluation.breakdown import WORST
from indictune.models.adapters import HEAD_NAMES
from indictune.models.load import Model
from indictune.models.task_models import READING_KEY, check_shapes, load_classifier, load_classifier_config
from indictune.models.unpadded import classify_unpadded, pads
from indictune.tasks.chat import ChatRows
from indictune.tasks.loss import SharedLoss
from indictune.tasks.preferences import SCORES, Preference, Preferences, scores_of_pairs
from indictune.tasks.protocol import Batch, Collator, Objective, Results


class BradleyTerryLoss(SharedLoss):
    """How unlikely the preferences are, by the model of Bradley and Terry (1952), in nats.

    Ouyang et al., "Training language models to follow instructions with human feedback" (2022), equation 1.
    """

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of `logits` [2 * pairs, 1], the better answer of each pair first, and `labels` [pairs, 2] of `PairRows`."""
        return (self.each(logits.view(-1, 2)) * (labels[:, 1] != IGNORED_LABEL)).sum()

    @staticmethod
    def each(rewards: Tensor) -> Tensor:
        """The loss of each pair, [pairs], of the rewards of its answers, [pairs, 2]."""
        return -functional.logsigmoid(rewards[:, 0] - rewards[:, 1])


class PairRewards(Preferences):
    """A reward for each of both answers. There is no model before training to compare with."""

    kind = AutoModelForSequenceClassification
    loss = BradleyTerryLoss()

    def __init__(self, pad_token_id: int, padded: bool) -> None:
        super().__init__(pad_token_id, torch.float32, padded, [], self.loss)

    def prepare(self, model: nn.Module, padded: bool) -> None:
        if not padded:
            classify_unpadded(model)

    def collator(self, evaluating: bool) -> Collator:
        both = self.pair_rows()
        if evaluating:
            return both

        def of_model(rows: list[Row]) -> dict[str, Any]:
            batch = both(rows)
            return {name: each for name, each in batch.items() if name not in ("answer_labels", "row_numbers")}

        return of_model

    def measure(self, model: nn.Module, inputs: Batch) -> tuple[Tensor, ...]:
        """The rewards of both answers, and their tokens, [pairs, 2] each."""
        del inputs["labels"]
        counted = (inputs.pop("answer_labels")[:, 1:] != IGNORED_LABEL).float()
        tokens = self.summed(counted, inputs).view(-1, 2)
        return model(**inputs).logits.float().view(-1, 2), tokens

    def scored(self, results: Results) -> dict[str, np.ndarray]:
        rewards = torch.from_numpy(results[0]).double()
        return scores_of_pairs(BradleyTerryLoss.each(rewards), rewards)


class RewardModel(Preference):
    """A model gives answers a number, which is higher for better ones."""

    arguments = (AlignedModelArguments, RewardPairArguments, RewardTrainingArguments)  # type: ignore[assignment]
    name = "reward"
    packages = ()
    writes_answers = False
    head = "ForSequenceClassification"
    scores = (*SCORES, f"{WORST}{SCORES[1]}")

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return load_classifier_config(args)

    def check(self, plan: Any) -> list[Problem]:
        return problems_of(check_shapes, PairRewards.kind, plan.model, plan.model_config, HEAD_NAMES)

    def start_of(self, plan: Any) -> list[object]:
        return []  # it is compared with no other model

    def compares(self, plan: Any) -> None:
        return None

    def group_scores(self, plan: Any) -> tuple[str, ...]:
        return SCORES

    def pads(self, plan: Any) -> bool:
        return pads("auto", plan.model, plan.known_config)

    def objective(
        self, args: Any, config: PreTrainedConfig, tokenizer: Tokenizer, padded: bool, rows: ChatRows | None
    ) -> Objective:
        assert tokenizer.pad_token_id is not None
        return PairRewards(tokenizer.pad_token_id, padded)

    def load_model(self, plan: Any, args: Any, rows: ChatRows, reads_weights: bool) -> Model:
        model = load_classifier(plan.model, ["reward"], rows.tokenizer, "regression")
        setattr(model.config, READING_KEY, {"task": self.name})  # so that nobody reads single texts with it
        return model

    def can_evaluate(self, config: Mapping[str, Any]) -> bool:
        return bool((config.get(READING_KEY) or {}).get("task") == self.name)

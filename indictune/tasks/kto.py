"""Answers that are marked good or bad: a causal language model learns from each alone (KTO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from indictune.config.chat_arguments import AlignedModelArguments, RatedArguments, RatedTrainingArguments
from indictune.data.chat import answer_pairs
from indictune.data.collation import IGNORED_LABEL
from indictune.errors import Problem
from indictune.tasks.chat import Chat, ChatRows
from indictune.tasks.preferences import Preference, Preferences, as_scores, check_positive, of_answers
from indictune.tasks.protocol import Batch, Collator, Objective, Results

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class RatedLoss:
    """The loss of an answer that is marked good or bad.

    Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization" (2024), equation 8. The fields are
    those of `RatedTrainingArguments`.
    """

    beta: float = 0.1
    good_weight: float = 1.0
    bad_weight: float = 1.0

    def margins(self, ratios: Tensor, are_good: Tensor, divergence: Tensor) -> Tensor:
        """How far each reward is on its mark's side of the point of reference, float [rows].

        Args:
            ratios: how much more likely each answer has become, in nats, float [rows].
            are_good: bool [rows].
            divergence: the point of reference, in nats: how much more likely answers to other prompts have become.
        """
        gained = self.beta * (ratios - divergence)
        return torch.where(are_good, gained, -gained)

    def each(self, ratios: Tensor, are_good: Tensor, divergence: Tensor) -> Tensor:
        """The loss of each answer, float [rows]; arguments as of `margins`."""
        losses = 1 - self.margins(ratios, are_good, divergence).sigmoid()
        return torch.where(are_good, self.good_weight, self.bad_weight) * losses


class MarkedAnswers(Preferences):
    """Answers that are marked good or bad. An evaluation also reads an answer to another prompt with each.

    Attributes:
        divergence: of the rows of a step, in nats, as of `RatedLoss`. No gradient flows through it.
    """

    divergence: Tensor

    def collator(self, evaluating: bool) -> Collator:
        return self.pair_rows(keeps_apart=not evaluating)

    def total(self, model: nn.Module, inputs: Batch) -> Tensor:
        rows, marks = inputs.pop("row_numbers"), inputs["labels"][:, 1]
        log_probs, _ = self.measure(model, inputs)
        ratios = log_probs[:, 0] - self.reference[rows, 0]
        losses: Tensor = self.pair_loss.each(ratios, marks == 1, self.divergence)
        return (losses * (marks != IGNORED_LABEL)).sum()

    def known(self, dataset: Dataset, measured: Results) -> Results:
        reference = super().known(dataset, measured)
        if not reference:  # it is measured now
            return ()
        gained = (measured[0] - reference[0])[:, 1].mean(dtype=np.float64)
        divergence = np.full(len(dataset), max(0.0, gained))
        return [*reference, dataset.data["is_good"].to_numpy(), divergence]

    def scored(self, results: Results) -> dict[str, np.ndarray]:
        log_probs, _, reference, marks, divergence = (torch.tensor(each, dtype=torch.float64) for each in results)
        ratios, are_good = (log_probs - reference)[:, 0], marks == 1
        of_rows = ratios, are_good, divergence
        margin, loss = self.pair_loss.margins(*of_rows), self.pair_loss.each(*of_rows)
        reward = torch.where(are_good, self.pair_loss.beta * ratios, torch.nan)
        return as_scores(loss, margin, reward)

    def tokens(self, results: Results) -> dict[str, np.ndarray]:
        tokens, are_good = results[1][:, 0].astype(np.int64), results[3] == 1
        return {"good_tokens": tokens * are_good, "bad_tokens": tokens * ~are_good}


class RatedAnswers(Preference):
    """A model learns from answers that are marked good or bad."""

    arguments = (AlignedModelArguments, RatedArguments, RatedTrainingArguments)  # type: ignore[assignment]
    name = "kto"
    rows_type = answer_pairs.Rated
    tokenised = (answer_pairs.tokenised_rated, answer_pairs.RATED_TOKENS)
    texts = Chat.texts

    def check(self, plan: Any) -> list[Problem]:
        defaults = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
        return Chat.check(self, plan) + check_positive(plan.training, **defaults)

    def objective(
        self,
        args: Any,
        config: PreTrainedConfig,
        tokenizer: Tokenizer,
        padded: bool,
        rows: ChatRows | None,
    ) -> Objective:
        loss = RatedLoss(args.beta, args.desirable_weight, args.undesirable_weight)
        return MarkedAnswers(*of_answers(args, tokenizer, padded, rows), pair_loss=loss)

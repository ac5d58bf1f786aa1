"""The objective of tagged words: the tag of each, and whole entities in the scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForTokenClassification

from indictune.data.collation import IGNORED_LABEL
from indictune.evaluation.breakdown import Breakdown, break_down
from indictune.evaluation.entities import entity_metrics, entity_scores, predicted_tags
from indictune.models.classifier import class_names
from indictune.tasks.loss import ExactLoss
from indictune.tasks.objective import Batch, facts_of
from indictune.tasks.text_objectives import TextObjective

if TYPE_CHECKING:
    from datasets import Dataset


class TokenTags(TextObjective):
    """The tag of each word. Entities are compared whole, as seqeval does."""

    kind = AutoModelForTokenClassification
    METRICS = ("precision", "recall", "f1")
    loss = ExactLoss()

    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        """The predicted tag of each token that carries one [rows, tokens], and the summed loss."""
        labels = inputs.pop("labels")
        logits = model(**inputs).logits.float()
        losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(-1)
        return torch.where(labels == IGNORED_LABEL, labels, logits.argmax(-1)), losses

    def score(self, dataset: Dataset, results: Sequence[np.ndarray], is_validation: bool) -> dict[str, Any]:
        predicted, losses = results
        tags, is_read, languages = (dataset[name][:] for name in ("tags", "is_read", "language"))
        return entity_metrics(predicted, losses, tags, is_read, languages, class_names(self.config))

    def predictions(self, dataset: Dataset, results: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
        names = class_names(self.config)
        given = predicted_tags(results[0], dataset["is_read"][:], names)
        for tags, predicted in zip(dataset["tags"][:], given, strict=True):
            yield {"label": [names[tag] for tag in tags], "predicted": predicted}

    def breakdown(
        self, dataset: Dataset, results: Sequence[np.ndarray], scripts: Sequence[str] | None
    ) -> Breakdown | None:
        names = class_names(self.config)
        scored = entity_scores(results[0], dataset["tags"][:], dataset["is_read"][:], names)
        return break_down("entities", facts_of(dataset, scripts), scored, names)

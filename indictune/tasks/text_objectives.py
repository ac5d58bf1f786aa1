"""Objectives of models that give each text one result: a label, a number, or several labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedTokenizerBase

from indictune.data.collation import JoinRows, PadToLongest
from indictune.evaluation.breakdown import Breakdown, Group, break_down
from indictune.evaluation.calibration import (
    calibration_of,
    expected_calibration_error,
    fit_temperature,
    reliability,
)
from indictune.evaluation.confusion import Confusion, group_of_confusion
from indictune.evaluation.console_tables import per_label_table, scores_table
from indictune.evaluation.metrics import classification_metrics, flatten_for_trainer
from indictune.evaluation.multi_label import best_threshold, multi_label_metrics
from indictune.evaluation.regression import regression_metrics
from indictune.evaluation.sums import numbers, several_labels
from indictune.models.classifier import TEMPERATURE, class_names
from indictune.models.load import Model
from indictune.models.unpadded import uncounted_token
from indictune.tasks.loss import ExactLoss, MultiLabelLoss, RegressionLoss, mean_of_windows, row_losses
from indictune.tasks.objective import Batch, Collator, Objective, row_facts

if TYPE_CHECKING:
    from datasets import Dataset

MAX_SCORES = 20  # labels of a row in predictions.jsonl, the likeliest
_DIGITS = 6  # of their scores


class TextObjective(Objective):
    """A text gets one result.

    Args:
        config: of the model.
        tokenizer: of the model, which is saved with the padding side that the model reads.
        padded: whether rows of a training micro-batch are padded; else they are joined.

    Attributes:
        kind: transformers' Auto class of the model.
        METRICS: scores of a language and of all rows.
    """

    kind: type[Any] = AutoModelForSequenceClassification
    METRICS: tuple[str, ...] = ()

    def __init__(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, padded: bool = True) -> None:
        self.config = config
        self.padded = padded
        self._tokenizer = tokenizer
        # Models read a row's first token and count positions from it, or look for the last token that is no padding.
        if config.model_type != "xlnet":
            tokenizer.padding_side = "right"
        self._padding = (tokenizer.pad_token_id, tokenizer.padding_side)

    def collator(self, evaluating: bool) -> Collator:
        if not (self.padded or evaluating):
            return JoinRows(uncounted_token(self.config), labels_of_tokens=False)
        return PadToLongest(*self._padding, with_row_numbers=evaluating)

    def flatten(self, block: dict[str, Any]) -> dict[str, float]:
        return {name: block[name] for name in ("loss", *self.METRICS)}

    def tables(self, block: dict[str, Any]) -> str:
        return scores_table(block, self.METRICS)

    def finish_tokenizer(self, folder: Path, max_length: int) -> None:
        if self.kind is AutoModelForSequenceClassification:  # words that are tagged are not cleaned
            from indictune.models.serving_tokenizer import serve_as_trained

            serve_as_trained(folder, self._tokenizer, self.config, max_length)

    def load(self, folder: Path, trusts_code: bool, trusts_checkpoint: bool, device_map: str | None = None) -> Model:
        from indictune.models.trained import load_trained

        return load_trained(folder, trusts_code, trusts_checkpoint, device_map, self.kind)


def read_texts(model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [rows, ...] and the labels of the texts of a batch; the logits of a row's windows are averaged."""
    labels, windows = inputs.pop("labels"), inputs.pop("windows", None)
    logits: torch.Tensor = model(**inputs).logits
    return (logits if windows is None else mean_of_windows(logits, windows)), labels


class SingleLabel(TextObjective):
    """One of several labels."""

    def __init__(
        self,
        config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        padded: bool = True,
        loss: ExactLoss | None = None,
    ) -> None:
        super().__init__(config, tokenizer, padded)
        self.loss = loss or ExactLoss()
        self.temperature: float | None = getattr(config, TEMPERATURE, None)
        self._class_names = class_names(config)

    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        """The predicted label, the loss, and the log probability of that label, or of all of them [rows, labels]."""
        logits, labels = read_texts(model, inputs)
        scores = logits.float().log_softmax(-1)
        return logits.argmax(-1), row_losses(logits, labels), scores if self.keeps_scores else scores.amax(-1)

    def score(self, dataset: Dataset, results: Sequence[np.ndarray], is_validation: bool) -> dict[str, Any]:
        predicted, losses, scores = results
        references = np.asarray(dataset["labels"][:])
        if self.keeps_scores and is_validation:
            self.temperature = fit_temperature(scores, references)
        block = classification_metrics(
            predictions=predicted,
            references=references,
            losses=losses,
            languages=dataset["language"][:],
            label_names=self._class_names,
        )
        best = scores.max(1) if self.keeps_scores else scores
        return block | {"ece": expected_calibration_error(reliability(np.exp(best), predicted == references))}

    def predictions(self, dataset: Dataset, results: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
        names = self._class_names
        best = np.sort(np.argsort(-results[2], axis=1, kind="stable")[:, :MAX_SCORES], axis=1)
        scores = np.exp(np.take_along_axis(results[2], best, 1).astype(np.float64)).round(_DIGITS)
        columns = dataset["labels"][:], results[0].tolist(), best.tolist(), scores.tolist()
        for label, predicted, of_labels, values in zip(*columns, strict=True):
            by_label = {names[at]: value for at, value in zip(of_labels, values, strict=True)}
            yield {"label": names[label], "predicted": names[predicted], "scores": by_label}

    def breakdown(
        self, dataset: Dataset, results: Sequence[np.ndarray], scripts: Sequence[str] | None
    ) -> Breakdown | None:
        predicted, _, logs = results
        references, names = np.asarray(dataset["labels"][:]), self._class_names

        def group(rows: np.ndarray) -> Group:
            return group_of_confusion(Confusion.of_rows(references[rows], predicted[rows], len(names)), names)

        is_right = predicted == references
        calibration = calibration_of(logs, is_right, self.temperature) if logs.ndim == 2 else None  # not in training
        return break_down("single_label", row_facts(dataset, scripts), group, names, calibration)

    def flatten(self, block: dict[str, Any]) -> dict[str, float]:
        return flatten_for_trainer(block) | {"ece": block["ece"]}

    def tables(self, block: dict[str, Any]) -> str:
        return f"{scores_table(block, ('accuracy', 'macro_f1'))}\n\n{per_label_table(block)}"

    def fitted(self) -> dict[str, Any]:
        """The temperature that is best on the validation rows."""
        return {} if self.temperature is None else {TEMPERATURE: self.temperature}


class Regression(TextObjective):
    """A number."""

    METRICS = ("pearson", "spearman", "mae")

    def __init__(
        self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, padded: bool = True, kind: str = "mse"
    ) -> None:
        super().__init__(config, tokenizer, padded)
        self.loss: RegressionLoss = RegressionLoss(kind)

    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        """The predicted number and the loss."""
        logits, labels = read_texts(model, inputs)
        return logits[:, 0].float(), self.loss.each(logits, labels)

    def score(self, dataset: Dataset, results: Sequence[np.ndarray], is_validation: bool) -> dict[str, Any]:
        predicted, losses = results
        return regression_metrics(predicted, np.asarray(dataset["labels"][:]), losses, dataset["language"][:])

    def predictions(self, dataset: Dataset, results: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
        for label, predicted in zip(dataset["labels"][:], results[0].tolist(), strict=True):
            yield {"label": label, "predicted": predicted}

    def breakdown(
        self, dataset: Dataset, results: Sequence[np.ndarray], scripts: Sequence[str] | None
    ) -> Breakdown | None:
        scored = numbers(results[0], np.asarray(dataset["labels"][:]))
        return break_down("regression", row_facts(dataset, scripts), scored)


class MultiLabel(TextObjective):
    """Any number of labels. A label is given where its probability reaches the threshold."""

    METRICS = ("micro_f1", "macro_f1")

    def __init__(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, padded: bool = True) -> None:
        super().__init__(config, tokenizer, padded)
        self.loss: MultiLabelLoss = MultiLabelLoss()
        self.threshold: float = getattr(config, "threshold", 0.5)
        self._class_names = class_names(config)

    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        """The probability of each label [rows, labels], and the loss."""
        logits, labels = read_texts(model, inputs)
        return logits.float().sigmoid(), self.loss.each(logits, labels)

    def score(self, dataset: Dataset, results: Sequence[np.ndarray], is_validation: bool) -> dict[str, Any]:
        probabilities, losses = results
        references = np.asarray(dataset["labels"][:], dtype=np.int64)
        if is_validation:
            self.threshold = best_threshold(probabilities, references)
        languages = dataset["language"][:]
        return multi_label_metrics(probabilities, references, losses, languages, self._class_names, self.threshold)

    def predictions(self, dataset: Dataset, results: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
        names = self._class_names
        for labels, scores in zip(dataset["labels"][:], results[0].tolist(), strict=True):
            given = [name for name, is_given in zip(names, labels, strict=True) if is_given]
            predicted = [name for name, score in zip(names, scores, strict=True) if score >= self.threshold]
            yield {"label": given, "predicted": predicted, "scores": dict(zip(names, scores, strict=True))}

    def breakdown(
        self, dataset: Dataset, results: Sequence[np.ndarray], scripts: Sequence[str] | None
    ) -> Breakdown | None:
        scored = several_labels(results[0] >= self.threshold, np.asarray(dataset["labels"][:]), self._class_names)
        return break_down("multi_label", row_facts(dataset, scripts), scored, self._class_names)

    def tables(self, block: dict[str, Any]) -> str:
        return f"{super().tables(block)}\n\n{per_label_table(block)}"

    def fitted(self) -> dict[str, Any]:
        """The threshold that is best on the validation rows."""
        return {"threshold": self.threshold}

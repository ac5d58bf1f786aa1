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
from indictune.evaluation.breakdown import WORST, Breakdown, break_down, label_block, mean_loss, without_markup
from indictune.evaluation.scorers import best_threshold, numbers, one_label, several_labels
from indictune.evaluation.uncertainty import calibration_of, fit_temperature
from indictune.models.load import Model
from indictune.models.task_models import TEMPERATURE, class_names
from indictune.models.unpadded import uncounted_token
from indictune.tasks.loss import ExactLoss, MultiLabelLoss, RegressionLoss, mean_of_windows, row_losses
from indictune.tasks.protocol import Batch, Collator, Objective, row_facts

if TYPE_CHECKING:
    from datasets import Dataset

MAX_SCORES = 20  # labels of a row in predictions.jsonl, the likeliest
_DIGITS = 6  # of their scores


class TextObjective(Objective):
    """A text gets one result.

    Args:
        tokenizer: of the model, which is saved with the padding side that the model reads.
        padded: whether rows of a training micro-batch are padded; else they are joined.
    """

    kind: type[Any] = AutoModelForSequenceClassification

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

    def finish_tokenizer(self, folder: Path, max_length: int) -> None:
        if self.kind is AutoModelForSequenceClassification:  # words that are tagged are not cleaned
            from indictune.models.serving_model import serve_as_trained

            serve_as_trained(folder, self._tokenizer, self.config, max_length)

    def load(self, folder: Path, trusts_code: bool, trusts_checkpoint: bool, device_map: str | None = None) -> Model:
        from indictune.models.finished_model import load_trained

        return load_trained(folder, trusts_code, trusts_checkpoint, device_map, self.kind)


def read_texts(model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [rows, ...] and the labels of the texts of a batch; the logits of a row's windows are averaged."""
    labels, windows = inputs.pop("labels"), inputs.pop("windows", None)
    logits: torch.Tensor = model(**inputs).logits
    return (logits if windows is None else mean_of_windows(logits, windows)), labels


class SingleLabel(TextObjective):
    """One of several labels."""

    METRICS = ("accuracy", "macro_f1")

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

    def fit(self, dataset: Dataset, results: Sequence[np.ndarray]) -> None:
        if self.keeps_scores:
            self.temperature = fit_temperature(results[2], np.asarray(dataset["labels"][:]))

    def predictions(self, dataset: Dataset, results: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
        names = self._class_names
        best = np.sort(np.argsort(-results[2], axis=1, kind="stable")[:, :MAX_SCORES], axis=1)
        scores = np.exp(np.take_along_axis(results[2], best, 1).astype(np.float64)).round(_DIGITS)
        columns = dataset["labels"][:], results[0].tolist(), best.tolist(), scores.tolist()
        for label, predicted, of_labels, values in zip(*columns, strict=True):
            by_label = {names[at]: value for at, value in zip(of_labels, values, strict=True)}
            yield {"label": names[label], "predicted": names[predicted], "scores": by_label}

    def breakdown(
        self, dataset: Dataset, results: Sequence[np.ndarray], scripts: Sequence[str] | None = None, draws: int = 0
    ) -> Breakdown:
        predicted, losses, logs = results
        references, names = np.asarray(dataset["labels"][:]), self._class_names
        scorer, facts = one_label(references, predicted, names), row_facts(dataset, scripts)
        calibration = calibration_of(logs, predicted == references, self.temperature)
        return break_down("single_label", facts, scorer, names, calibration, loss=mean_loss(losses), draws=draws)

    def metrics(self, found: Breakdown) -> dict[str, Any]:
        assert found.calibration is not None
        worst = {f"{WORST}{found.score}": found.by["language"][found.worst_language].scores[found.score].value}
        labels = {"per_label": label_block(found.overall.per_label)}
        return super().metrics(found) | worst | labels | {"ece": found.calibration.ece}

    def flatten(self, block: dict[str, Any]) -> dict[str, float]:
        languages, labels = block["per_language"].items(), block["per_label"].items()
        more = {name: block[name] for name in ("worst_language_macro_f1", "ece")}
        more |= {f"macro_f1_{without_markup(language)}": row["macro_f1"] for language, row in languages}
        return super().flatten(block) | more | {f"f1_{without_markup(label)}": row["f1"] for label, row in labels}

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

    def predictions(self, dataset: Dataset, results: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
        for label, predicted in zip(dataset["labels"][:], results[0].tolist(), strict=True):
            yield {"label": label, "predicted": predicted}

    def breakdown(
        self, dataset: Dataset, results: Sequence[np.ndarray], scripts: Sequence[str] | None = None, draws: int = 0
    ) -> Breakdown:
        predicted, losses = results
        scorer, facts = numbers(predicted, np.asarray(dataset["labels"][:])), row_facts(dataset, scripts)
        return break_down("regression", facts, scorer, loss=mean_loss(losses), draws=draws)


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

    def fit(self, dataset: Dataset, results: Sequence[np.ndarray]) -> None:
        self.threshold = best_threshold(results[0], np.asarray(dataset["labels"][:], dtype=np.int64))

    def predictions(self, dataset: Dataset, results: Sequence[np.ndarray]) -> Iterator[dict[str, Any]]:
        names = self._class_names
        for labels, scores in zip(dataset["labels"][:], results[0].tolist(), strict=True):
            given = [name for name, is_given in zip(names, labels, strict=True) if is_given]
            predicted = [name for name, score in zip(names, scores, strict=True) if score >= self.threshold]
            yield {"label": given, "predicted": predicted, "scores": dict(zip(names, scores, strict=True))}

    def breakdown(
        self, dataset: Dataset, results: Sequence[np.ndarray], scripts: Sequence[str] | None = None, draws: int = 0
    ) -> Breakdown:
        probabilities, losses = results
        references, names = np.asarray(dataset["labels"][:]), self._class_names
        scorer, facts = several_labels(probabilities >= self.threshold, references, names), row_facts(dataset, scripts)
        return break_down("multi_label", facts, scorer, names, loss=mean_loss(losses), draws=draws)

    def metrics(self, found: Breakdown) -> dict[str, Any]:
        more = {"threshold": self.threshold, "per_label": label_block(found.overall.per_label)}
        return super().metrics(found) | more

    def fitted(self) -> dict[str, Any]:
        """The threshold that is best on the validation rows."""
        return {"threshold": self.threshold}

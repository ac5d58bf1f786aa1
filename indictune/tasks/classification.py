"""Classification of short texts, such as the sentiment of tweets: a text gets a label, a number, or several labels."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from indictune.config.arguments import DataArguments, ModelArguments
from indictune.config.arguments import SentimentTrainingArguments as Args
from indictune.config.plan import RunPlan
from indictune.data.bad_rows import keep_rejected
from indictune.data.cache import StoredRows
from indictune.data.collation import JoinRows, PadToLongest
from indictune.data.health.findings import warning_notes
from indictune.data.health.row_health import check_unknown, measure, measured_once
from indictune.data.labels import MULTI_LABEL, REGRESSION, as_tensor, class_weights, given_weights, label_counts
from indictune.data.load_rows import load_splits, load_test_rows
from indictune.data.read.row_sources import gives_lists_of_labels, text_sources
from indictune.data.row_choice import Splits, mixture_of, split_of
from indictune.data.text.pairs import read_pairs
from indictune.data.text.tokenisation import tokenise_splits, tokenizer_parts, usual_length, with_soft_labels
from indictune.errors import Problem, Problems, problem, problems_of
from indictune.evaluation.breakdown import RATIOS, WORST, Breakdown, break_down, label_block, mean_loss, without_markup
from indictune.evaluation.scorers import best_threshold, numbers, one_label, several_labels
from indictune.evaluation.uncertainty import calibration_of, helpful_temperature
from indictune.models.adapters import HEAD_NAMES
from indictune.models.load import Model, load_tokenizer, positions_of
from indictune.models.serving_model import serve_as_trained
from indictune.models.task_models import (
    TEMPERATURE,
    check_shapes,
    class_names,
    known_labels,
    label_order,
    load_classifier,
    load_classifier_config,
    note_reading,
    recorded_reading,
    with_vocabulary,
)
from indictune.models.unpadded import classify_unpadded, padding_notes, pads, uncounted_token
from indictune.tasks.loss import ExactLoss, MultiLabelLoss, RegressionLoss, SharedLoss, SoftLabelLoss, read_texts
from indictune.tasks.protocol import (
    Batch,
    Collator,
    EvaluationPlan,
    Inputs,
    Objective,
    Origins,
    Results,
    Scripts,
    Task,
    TestTokens,
    Tokens,
    row_facts,
)

if TYPE_CHECKING:
    from datasets import Dataset

MAX_SCORES = 20  # labels of a row in predictions.jsonl, the likeliest
_DIGITS = 6  # of their scores


class TextObjective(Objective):
    """A text gets one result.

    Args:
        tokenizer: of the model, which is saved with the padding side that the model reads.
        padded: whether rows of a training micro-batch are padded; else they are joined.
        loss: None for that of the class.
    """

    kind: type[Any] = AutoModelForSequenceClassification

    def __init__(
        self, config: PreTrainedConfig, tokenizer: Tokenizer, padded: bool = True, loss: SharedLoss | None = None
    ) -> None:
        self.config = config
        self.padded = padded
        self.loss = loss or copy(self.loss)  # a window or a device is set on it
        self._tokenizer = tokenizer
        # Models read a row's first token and count positions from it, or look for the last token that is no padding.
        if config.model_type != "xlnet":
            tokenizer.padding_side = "right"
        self._padding = (tokenizer.pad_token_id, tokenizer.padding_side)

    @cached_property
    def names(self) -> list[str]:
        """The label of each class id, in the order of the ids."""
        return class_names(self.config)

    def prepare(self, model: nn.Module, padded: bool) -> None:
        if not padded:
            classify_unpadded(model)

    def collator(self, evaluating: bool) -> Collator:
        if not (self.padded or evaluating):
            return JoinRows(uncounted_token(self.config), labels_of_tokens=False)
        return PadToLongest(*self._padding, with_row_numbers=evaluating)

    def compared(self, dataset: Dataset, results: Results | None) -> tuple[list[Any], list[Any]] | None:
        return dataset["labels"][:] if results is None else results[0].tolist(), dataset["labels"][:]

    def finish_tokenizer(self, folder: Path, max_length: int) -> None:
        if self.kind is AutoModelForSequenceClassification:  # words that are tagged are not cleaned
            tokenizer, pairs = self._tokenizer, "text_pair_column" in recorded_reading(self.config)
            serve_as_trained(folder, tokenizer, self.config, max_length, pairs)


class SingleLabel(TextObjective):
    """One of several labels."""

    METRICS = ("accuracy", "macro_f1")
    loss = ExactLoss()

    @cached_property
    def temperature(self) -> float | None:
        found: float | None = getattr(self.config, TEMPERATURE, None)
        return found

    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        """The predicted label, the loss, and the log probability of that label, or of all of them [rows, labels]."""
        logits, labels = read_texts(model, inputs)
        scores = logits.float().log_softmax(-1)
        return logits.argmax(-1), ExactLoss.each(logits, labels), scores if self.keeps_scores else scores.amax(-1)

    def fit(self, dataset: Dataset, results: Results) -> None:
        if self.keeps_scores:
            self.temperature = helpful_temperature(results[2], np.asarray(dataset["labels"][:]))

    def predictions(self, dataset: Dataset, results: Results) -> Iterator[dict[str, Any]]:
        best = np.sort(np.argsort(-results[2], axis=1, kind="stable")[:, :MAX_SCORES], axis=1)
        scores = np.exp(np.take_along_axis(results[2], best, 1).astype(np.float64)).round(_DIGITS)
        columns = dataset["labels"][:], results[0].tolist(), best.tolist(), scores.tolist()
        for label, predicted, of_labels, values in zip(*columns, strict=True):
            by_label = {self.names[at]: value for at, value in zip(of_labels, values, strict=True)}
            yield {"label": self.names[label], "predicted": self.names[predicted], "scores": by_label}

    def breakdown(self, dataset: Dataset, results: Results, scripts: Scripts = None, draws: int = 0) -> Breakdown:
        predicted, losses, logs = results
        references, facts = np.asarray(dataset["labels"][:]), row_facts(dataset, scripts)
        scorer = one_label(references, predicted, self.names)
        sure = calibration_of(logs, predicted == references, self.temperature)
        return break_down("single_label", facts, scorer, self.names, sure, loss=mean_loss(losses), draws=draws)

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
        return {} if self.temperature is None else {TEMPERATURE: self.temperature}


class Regression(TextObjective):
    """A number."""

    METRICS = ("pearson", "spearman", "mae")
    loss: RegressionLoss = RegressionLoss("mse")

    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        """The predicted number and the loss."""
        logits, labels = read_texts(model, inputs)
        return logits[:, 0].float(), self.loss.each(logits, labels)

    def predictions(self, dataset: Dataset, results: Results) -> Iterator[dict[str, Any]]:
        for label, predicted in zip(dataset["labels"][:], results[0].tolist(), strict=True):
            yield {"label": label, "predicted": predicted}

    def breakdown(self, dataset: Dataset, results: Results, scripts: Scripts = None, draws: int = 0) -> Breakdown:
        predicted, losses = results
        scorer, facts = numbers(predicted, np.asarray(dataset["labels"][:])), row_facts(dataset, scripts)
        return break_down("regression", facts, scorer, loss=mean_loss(losses), draws=draws)


class MultiLabel(TextObjective):
    """Any number of labels. A label is given where its probability reaches the threshold."""

    METRICS = ("micro_f1", "macro_f1")
    loss: MultiLabelLoss = MultiLabelLoss()

    @cached_property
    def threshold(self) -> float:
        return float(getattr(self.config, "threshold", 0.5))

    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        """The probability of each label [rows, labels], and the loss."""
        logits, labels = read_texts(model, inputs)
        return logits.float().sigmoid(), self.loss.each(logits, labels)

    def fit(self, dataset: Dataset, results: Results) -> None:
        self.threshold = best_threshold(results[0], np.asarray(dataset["labels"][:], dtype=np.int64))

    def predictions(self, dataset: Dataset, results: Results) -> Iterator[dict[str, Any]]:
        names = self.names
        for labels, scores in zip(dataset["labels"][:], results[0].tolist(), strict=True):
            given = [name for name, is_given in zip(names, labels, strict=True) if is_given]
            predicted = [name for name, score in zip(names, scores, strict=True) if score >= self.threshold]
            yield {"label": given, "predicted": predicted, "scores": dict(zip(names, scores, strict=True))}

    def compared(self, dataset: Dataset, results: Results | None) -> tuple[list[Any], list[Any]]:
        right = np.asarray(dataset["labels"][:]) > 0
        given = right if results is None else results[0] >= self.threshold
        return given.astype(int).tolist(), right.astype(int).tolist()

    def breakdown(self, dataset: Dataset, results: Results, scripts: Scripts = None, draws: int = 0) -> Breakdown:
        probabilities, losses = results
        facts, given = row_facts(dataset, scripts), probabilities >= self.threshold
        scorer = several_labels(given, np.asarray(dataset["labels"][:]), self.names)
        return break_down("multi_label", facts, scorer, self.names, loss=mean_loss(losses), draws=draws)

    def metrics(self, found: Breakdown) -> dict[str, Any]:
        more = {"threshold": self.threshold, "per_label": label_block(found.overall.per_label)}
        return super().metrics(found) | more

    def fitted(self) -> dict[str, Any]:
        return {"threshold": self.threshold}


Plan = RunPlan[DataArguments, Args]

# Of the modes that are not one label a text: the scores of each group of rows, the default first.
METRICS = {REGRESSION: ("pearson", "spearman", "mae"), MULTI_LABEL: ("micro_f1", "precision", "recall", "macro_f1")}
ONE_OF_MANY = ("macro_f1", "macro_precision", "macro_recall", "accuracy")


@dataclass(frozen=True)
class ClassifiedRows:
    """The rows of a run, the model whose tokenizer reads them, the labels by class id, and weights if unequal."""

    splits: Splits[StoredRows]
    model: ModelArguments
    tokenizer: Tokenizer
    labels: list[str]
    weights: dict[str, float] | None


class Classification(Task[ClassifiedRows, DataArguments, Args]):
    """A text gets one label, several labels, or a number: `--problem_type`."""

    arguments = (ModelArguments, DataArguments, Args)
    name = "classification"
    takes_long_texts = fits_max_length = True
    lower_is_better = ("loss", "mae", "ece")
    head = "ForSequenceClassification"
    scores = (*ONE_OF_MANY, "loss", "worst_language_macro_f1", "ece")

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return load_classifier_config(args)

    def check(self, plan: Plan) -> list[Problem]:
        kind = AutoModelForSequenceClassification
        found = problems_of(check_shapes, kind, plan.model, plan.model_config, HEAD_NAMES)
        training, mode, soft = plan.training, plan.data.problem_type, plan.training.soft_label_column
        found += problems_of(self.pads, plan) if training.padding_free == "on" else []
        if soft is not None and not known_labels(plan.model_config):
            found.append(problem("soft-labels-unnamed", "--soft_label_column", soft))
        if soft is None and (temperature := training.soft_label_temperature) != 2:
            found.append(problem("no-effect", "--soft_label_temperature", temperature, other="no --soft_label_column"))
        given = {"--regression_loss": training.regression_loss != "mse" and mode != REGRESSION}
        given["--soft_label_column"] = soft is not None and mode in METRICS
        if mode in METRICS or soft is not None:
            given["--baseline"] = training.baseline and "baseline" in plan.recipe.values
            given["--class_weights"] = training.class_weights is not None
            given["--label_smoothing_factor"] = training.label_smoothing_factor != 0
        given["--max_conflict_share"] = mode == REGRESSION and plan.data.max_conflict_share is not None
        given["--keep_label_spellings"] = mode == REGRESSION and plan.data.keep_label_spellings
        given["--label_column"] = mode != MULTI_LABEL and not isinstance(plan.data.label_column, str)
        values = {**vars(training), **vars(plan.data), "baseline": "true", "label_column": plan.data.label_columns}
        other = f"--problem_type {mode}" if mode in METRICS or soft is None else f"--soft_label_column {soft}"
        useless = [flag for flag, is_given in given.items() if is_given]
        return found + [problem("no-effect", flag, values[flag.removeprefix("--")], other=other) for flag in useless]

    def with_first_rows(self, plan: Plan) -> Plan:
        if plan.data.problem_type is not None or not gives_lists_of_labels(plan.data):
            return plan
        return replace(plan, data=replace(plan.data, problem_type=MULTI_LABEL))

    def metrics(self, plan: Plan) -> tuple[str, ...]:
        scores = METRICS.get(str(plan.data.problem_type))
        return (*scores, "loss", f"{WORST}{scores[0]}") if scores else self.scores

    def group_scores(self, plan: Plan) -> tuple[str, ...]:
        return METRICS.get(str(plan.data.problem_type), ONE_OF_MANY)

    def label_scores(self, plan: Plan) -> tuple[str, ...]:
        return () if plan.data.problem_type == REGRESSION else RATIOS

    def compares(self, plan: Plan | EvaluationPlan) -> str:
        return plan.data.problem_type or "single_label_classification"

    def open(self, plan: Plan, problems: Problems) -> Inputs:
        tokenizer = problems.attempt(load_tokenizer, plan.model)
        if tokenizer is not None and plan.data.text_pair_column is not None:
            problems.attempt(read_pairs, tokenizer, plan.model_config)
        problems.attempt(given_weights, plan.training.class_weights)
        return Inputs(tokenizer, problems.attempt(text_sources, plan.data, problems))

    def read(self, plan: Plan, inputs: Inputs, problems: Problems) -> ClassifiedRows | None:
        if inputs.sources is None:
            return None
        with problems.collecting():
            known = [] if plan.training.soft_label_column is None else known_labels(plan.model_config)
            splits = load_splits(plan.data, problems, inputs.sources, split_of(plan), mixture_of(plan), known)
            given = None if plan.data.problem_type in METRICS else plan.training.class_weights
            weights = class_weights(given, label_counts(splits.rows["train"]), splits.labels)
            labels = splits.labels if plan.model_config is None else label_order(plan.model_config, splits.labels)
            if (read := inputs.tokenizer) is not None:
                train = splits.rows["train"]
                model, tokenizer = with_vocabulary(plan.model, read, train.words, inputs.checkpoint)
                if plan.data.text_pair_column is not None:
                    read_pairs(tokenizer, plan.model_config)
                check_unknown(train, tokenizer, plan)
                if plan.data.problem_type is not None and "problem_type" not in plan.recipe.values:
                    column = f"{plan.data.label_columns}: several labels a row"
                    note = f"{train.source}: column {column}; taking --problem_type {plan.data.problem_type}."
                    splits = replace(splits, notes=[*splits.notes, note])
                return ClassifiedRows(splits, model, tokenizer, labels, weights)
        return None

    def tokenise(self, plan: Plan, rows: ClassifiedRows) -> Tokens:
        splits, train, max_length = rows.splits, rows.splits.rows["train"], plan.data.max_length
        if isinstance(max_length, str):
            max_length = usual_length(train.table["text"], rows.tokenizer, positions_of(plan.model_config))
        mode, long_text = plan.data.problem_type, plan.data.long_text
        datasets = tokenise_splits(splits, rows.tokenizer, rows.labels, max_length, mode, long_text)
        if (column := plan.training.soft_label_column) is not None:
            datasets["train"] = with_soft_labels(datasets["train"], train, column, len(rows.labels))
        of_health = [splits.folder.name, tokenizer_parts(rows.tokenizer), max_length, mode, long_text]
        cut = sys.maxsize if long_text == "window" else max_length
        health = measured_once(of_health, lambda: measure(splits.rows, rows.tokenizer, cut, splits.findings, mode))
        notes = list(dict.fromkeys([*splits.notes, *warning_notes(health.findings)]))
        origins = {split: Origins(each.location, each.texts) for split, each in splits.rows.items()}
        made = datasets["train"], datasets.get("validation"), datasets.get("test")
        parts = *made, train.location, splits.folder, notes
        tokens = Tokens(*parts, max_length=max_length, origins=origins, health=health)
        return replace(tokens, scores=self.group_scores(plan), labels=rows.labels if self.label_scores(plan) else ())

    def pads(self, plan: Plan) -> bool:
        return pads(plan.training.padding_free, plan.model, plan.known_config)

    def load_model(self, plan: Plan, args: Args, rows: ClassifiedRows, reads_weights: bool) -> Model:
        model = load_classifier(rows.model, rows.labels, rows.tokenizer, plan.data.problem_type)
        for fitted in (TEMPERATURE, "threshold"):  # of the model that the training starts from
            vars(model.config).pop(fitted, None)
        note_reading(model.config, plan.data)
        return model

    def objective(
        self, args: Args, config: PreTrainedConfig, tokenizer: Tokenizer, padded: bool, rows: ClassifiedRows | None
    ) -> Objective:
        kind: type[TextObjective] = SingleLabel
        weights = None if rows is None else as_tensor(rows.weights, rows.labels)
        loss: SharedLoss = ExactLoss(weights, args.label_smoothing_factor)
        if config.problem_type == REGRESSION:
            kind, loss = Regression, RegressionLoss(args.regression_loss)
        elif config.problem_type == MULTI_LABEL:
            kind, loss = MultiLabel, MultiLabelLoss()
        elif args.soft_label_column is not None:
            loss = SoftLabelLoss(args.soft_label_temperature)
        loss.of_windows = recorded_reading(config).get("long_text") == "window"
        return kind(config, tokenizer, padded, loss)

    def tokenise_test(self, plan: EvaluationPlan, tokenizer: Tokenizer | None, problems: Problems) -> TestTokens:
        asked, config = plan.data, plan.model_config
        mode = None if config is None else config.problem_type
        labels = None if config is None else problems.attempt(class_names, config)
        test = problems.attempt(load_test_rows, asked.test_file, asked, labels, problems, mode)
        problems.raise_any()
        assert config is not None
        assert labels is not None
        assert tokenizer is not None
        assert test is not None
        if asked.text_pair_column is not None:
            read_pairs(tokenizer, config, "--model")
        keep_rejected(test.folder, plan.output_dir, plan.launch.rank)
        dataset = tokenise_splits(test, tokenizer, labels, asked.max_length, mode, asked.long_text)["test"]
        origins = Origins(test.rows["test"].location, test.rows["test"].texts)
        return TestTokens(dataset, [*test.notes, *padding_notes(config, trains=False)], origins)

"""Classification of short texts, such as the sentiment of tweets."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace

from transformers import AutoModelForSequenceClassification, PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from indictune.config.arguments import DataArguments, ModelArguments
from indictune.config.arguments import SentimentTrainingArguments as Args
from indictune.config.plan import RunPlan
from indictune.data.bad_rows import keep_rejected
from indictune.data.cache import StoredRows
from indictune.data.health.findings import warning_notes
from indictune.data.health.row_health import RowHealth, check_unknown, measure, measured_once
from indictune.data.labels import MULTI_LABEL, REGRESSION, as_tensor, class_weights, given_weights, label_counts
from indictune.data.load_rows import load_splits, load_test_rows
from indictune.data.read.row_sources import SPLITS, gives_lists_of_labels, text_sources
from indictune.data.row_choice import Splits, mixture_of, split_of
from indictune.data.text.tokenisation import tokenise_splits, tokenizer_parts, usual_length
from indictune.errors import Problem, Problems, problem, problems_of
from indictune.evaluation.breakdown import RATIOS, WORST
from indictune.models.adapters import HEAD_NAMES
from indictune.models.config_shapes import check_shapes
from indictune.models.load import Model, load_tokenizer, positions_of
from indictune.models.task_models import (
    TEMPERATURE,
    class_names,
    label_order,
    load_classifier,
    load_classifier_config,
    note_reading,
    recorded_reading,
)
from indictune.models.unpadded import padding_notes, pads
from indictune.tasks.loss import ExactLoss
from indictune.tasks.protocol import EvaluationPlan, Inputs, Objective, Origins, Task, TestTokens, Tokens
from indictune.tasks.text_objectives import MultiLabel, Regression, SingleLabel

logger = logging.getLogger(__name__)

Plan = RunPlan[DataArguments, Args]

# Of the modes that are not one label a text: the scores of each group of rows, the default first.
METRICS = {REGRESSION: ("pearson", "spearman", "mae"), MULTI_LABEL: ("micro_f1", "precision", "recall", "macro_f1")}
ONE_OF_MANY = ("macro_f1", "macro_precision", "macro_recall", "accuracy")


@dataclass(frozen=True)
class ClassifiedRows:
    """The rows of a run, the model whose tokenizer reads them, the labels in the order of the class ids, and their
    weights in the loss, None if equal."""

    splits: Splits[StoredRows]
    model: ModelArguments
    tokenizer: Tokenizer
    labels: list[str]
    weights: dict[str, float] | None


class Classification(Task[ClassifiedRows, DataArguments, Args]):
    """A text gets one label, several labels, or a number: `--problem_type`."""

    model_arguments = ModelArguments
    data_arguments = DataArguments
    training_arguments = Args
    name = "classification"
    takes_long_texts = True
    lower_is_better = ("loss", "mae", "ece")
    head = "ForSequenceClassification"
    scores = (*ONE_OF_MANY, "loss", "worst_language_macro_f1", "ece")

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return load_classifier_config(args)

    def check(self, plan: Plan) -> list[Problem]:
        assert plan.model_config is not None
        kind = AutoModelForSequenceClassification
        found = problems_of(check_shapes, kind, plan.model, plan.model_config, HEAD_NAMES)
        if plan.training.padding_free == "on":
            found += problems_of(self.pads, plan)
        training, mode = plan.training, plan.data.problem_type
        given = {"--regression_loss": training.regression_loss != "mse" and mode != REGRESSION}
        if mode in METRICS:
            given["--baseline"] = training.baseline and "baseline" in plan.recipe.values
            given["--class_weights"] = training.class_weights is not None
            given["--label_smoothing_factor"] = training.label_smoothing_factor != 0
        given["--max_conflict_share"] = mode == REGRESSION and plan.data.max_conflict_share is not None
        values, other = vars(training) | vars(plan.data) | {"baseline": "true"}, f"--problem_type {mode}"
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

    def open(self, plan: Plan, problems: Problems) -> Inputs:
        tokenizer = problems.attempt(load_tokenizer, plan.model)
        problems.attempt(given_weights, plan.training.class_weights)
        return Inputs(tokenizer, problems.attempt(text_sources, plan.data, problems))

    def read(self, plan: Plan, inputs: Inputs, problems: Problems) -> ClassifiedRows | None:
        if inputs.sources is None:
            return None
        with problems.collecting():
            splits = load_splits(plan.data, problems, inputs.sources, split_of(plan), mixture_of(plan))
            given = None if plan.data.problem_type in METRICS else plan.training.class_weights
            weights = class_weights(given, label_counts(splits.rows["train"]), splits.labels)
            labels = splits.labels if plan.model_config is None else label_order(plan.model_config, splits.labels)
            if inputs.tokenizer is not None:
                train = splits.rows["train"]
                model, tokenizer = plan.model, inputs.tokenizer
                if model.vocabulary_from_train is not None:
                    from indictune.models.task_models import with_vocabulary

                    model, tokenizer = with_vocabulary(model, tokenizer, train.texts, inputs.checkpoint)
                check_unknown(train, tokenizer, plan)
                splits = replace(splits, notes=[*splits.notes, *_notes_of_type(plan)])
                return ClassifiedRows(splits, model, tokenizer, labels, weights)
        return None

    def tokenise(self, plan: Plan, rows: ClassifiedRows) -> Tokens:
        splits, max_length = rows.splits, plan.data.max_length
        if isinstance(max_length, str):
            limit = None if plan.model_config is None else positions_of(plan.model_config)
            max_length = usual_length(splits.rows["train"].table["text"], rows.tokenizer, limit)
            of_rows, of_model = "the 99th percentile of the training rows", "all that the model has positions for"
            reason = of_model if max_length == limit else of_rows
            logger.info("--max_length auto: %d tokens, %s", max_length, reason)
        settings = max_length, plan.data.problem_type, plan.data.long_text
        datasets = tokenise_splits(splits, rows.tokenizer, rows.labels, *settings)
        train, validation, test = (datasets.get(split) for split in SPLITS)
        assert train is not None
        health = _health(plan, rows, max_length)
        notes = list(dict.fromkeys([*splits.notes, *warning_notes(health.findings)]))
        origins = {split: Origins(each.location, each.texts) for split, each in splits.rows.items()}
        parts = train, validation, test, splits.rows["train"].location, splits.folder, notes
        tokens = Tokens(*parts, max_length=max_length, origins=origins, health=health)
        return replace(tokens, scores=self.group_scores(plan), labels=rows.labels if self.label_scores(plan) else ())

    def pads(self, plan: Plan) -> bool:
        assert plan.model_config is not None
        return pads(plan.training.padding_free, plan.model, plan.model_config)

    def load_model(self, plan: Plan, args: Args, rows: ClassifiedRows, reads_weights: bool) -> Model:
        model = load_classifier(rows.model, rows.labels, rows.tokenizer, plan.data.problem_type)
        vars(model.config).pop(TEMPERATURE, None)  # of the model that the training starts from
        note_reading(model.config, plan.data.long_text, int(plan.data.max_length))
        return model

    def objective(
        self, args: Args, config: PreTrainedConfig, tokenizer: Tokenizer, padded: bool, rows: ClassifiedRows | None
    ) -> Objective:
        made: SingleLabel | Regression | MultiLabel
        if config.problem_type == REGRESSION:
            made = Regression(config, tokenizer, padded, args.regression_loss)
        elif config.problem_type == MULTI_LABEL:
            made = MultiLabel(config, tokenizer, padded)
        else:
            weights = None if rows is None else as_tensor(rows.weights, rows.labels)
            made = SingleLabel(config, tokenizer, padded, ExactLoss(weights, args.label_smoothing_factor))
        assert made.loss is not None
        made.loss.of_windows = recorded_reading(config).get("long_text") == "window"
        return made

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
        keep_rejected(test.folder, plan.output_dir, plan.launch.rank)
        dataset = tokenise_splits(test, tokenizer, labels, asked.max_length, mode, asked.long_text)["test"]
        origins = Origins(test.rows["test"].location, test.rows["test"].texts)
        return TestTokens(dataset, [*test.notes, *padding_notes(config, trains=False)], origins)


def _health(plan: Plan, rows: ClassifiedRows, max_length: int) -> RowHealth:
    data, splits = plan.data, rows.splits.rows
    parts = [rows.splits.folder.name, tokenizer_parts(rows.tokenizer), max_length, data.long_text, data.problem_type]
    cut = sys.maxsize if data.long_text == "window" else max_length
    return measured_once(parts, lambda: measure(splits, rows.tokenizer, cut, rows.splits.findings, data.problem_type))


def _notes_of_type(plan: Plan) -> list[str]:
    if plan.data.problem_type is None or "problem_type" in plan.recipe.values:
        return []
    column = f"column {plan.data.label_column} has several labels a row"
    return [f"{plan.data.train_file}: {column}: taking --problem_type {plan.data.problem_type}."]

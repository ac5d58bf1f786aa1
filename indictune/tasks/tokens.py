"""Token classification, such as named entities: each word of a sentence gets a tag (B-PER, I-PER, O, ...)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from torch.nn import functional
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification, PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from indictune.config.arguments import DataArguments, ModelArguments, TextArguments
from indictune.config.arguments import IndicTrainingArguments as Args
from indictune.config.plan import RunPlan
from indictune.data.collation import IGNORED_LABEL
from indictune.data.languages import language_of
from indictune.data.row_sources import SPLITS
from indictune.errors import Problem, Problems, UserError, problem
from indictune.evaluation.entities import entity_metrics
from indictune.models.classifier import class_names, load_classifier
from indictune.models.load import Model, load_config, load_tokenizer
from indictune.tasks.loss import ExactLoss
from indictune.tasks.objective import Batch
from indictune.tasks.protocol import EvaluationPlan, Inputs, Task, TestTokens, Tokens
from indictune.tasks.text_objectives import TextObjective

Plan = RunPlan[DataArguments, Args]
Tagged = tuple[str, list[str], list[str]]  # where a sentence stands (`file:line`), its words, and their tags


class TaggedRows(NamedTuple):
    """Sentences by split, the tags in the order of the class ids, and the tokenizer of the model."""

    splits: dict[str, list[Tagged]]
    tags: list[str]
    tokenizer: Tokenizer


class TokenClassification(Task[TaggedRows, DataArguments, Args]):
    """Each word gets a tag, which its first token carries."""

    head = "ForTokenClassification"
    name = "tokens"
    scores = ("f1", "loss", "precision", "recall")
    data_arguments = DataArguments
    training_arguments = Args

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return load_config(args, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, "classifier of tokens")

    def check(self, plan: Plan) -> list[Problem]:
        refused = {"--method": plan.model.method != "full", "--dataset_name": plan.data.dataset_name is not None}
        return [problem("not-of-this-task", flag) for flag, is_given in refused.items() if is_given]

    def open(self, plan: Plan, problems: Problems) -> Inputs:
        named = {split: file for split in SPLITS if (file := getattr(plan.data, f"{split}_file")) is not None}
        return Inputs(problems.attempt(load_tokenizer, plan.model), named)

    def read(
        self, plan: Plan | EvaluationPlan, inputs: Inputs, problems: Problems, tags: list[str] | None = None
    ) -> TaggedRows | None:
        files = (inputs.sources or {}).items()
        splits = {split: problems.attempt(_sentences, file, split, plan.data) or [] for split, file in files}
        known = tags or sorted({tag for _, _, row in splits.get("train", []) for tag in row})
        sentences = [each for found in splits.values() for each in found]
        unseen = {tag: where for where, _, row in sentences for tag in row if known and tag not in known}
        problems.extend(problem("tag-unseen", where, tag) for tag, where in unseen.items())
        return None if inputs.tokenizer is None else TaggedRows(splits, known, inputs.tokenizer)

    def tokenise(self, plan: Plan, rows: TaggedRows) -> Tokens:
        made = {split: _tokenised(split, rows, plan.data.max_length) for split in rows.splits}
        return Tokens(made["train"], made.get("validation"), made.get("test"), lambda n: rows.splits["train"][n][0])

    def load_model(self, plan: Plan, args: Args, rows: TaggedRows, reads_weights: bool) -> Model:
        config = self.read_config(plan.model)
        return load_classifier(plan.model, rows.tags, rows.tokenizer, None, config, TokenTags.kind)

    def objective(
        self, args: Args, config: PreTrainedConfig, tokenizer: Tokenizer, padded: bool, rows: TaggedRows | None
    ) -> TokenTags:
        return TokenTags(config, tokenizer, padded)

    def tokenise_test(self, plan: EvaluationPlan, tokenizer: Tokenizer | None, problems: Problems) -> TestTokens:
        tags = None if plan.model_config is None else class_names(plan.model_config)
        rows = self.read(plan, Inputs(tokenizer, {"test": plan.data.test_file}), problems, tags)
        problems.raise_any()
        assert rows is not None
        return _tokenised("test", rows, plan.data.max_length), []


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
        tags, languages, (predicted, losses) = dataset["labels"][:], dataset["language"][:], results
        return entity_metrics(predicted, losses, tags, languages, class_names(self.config))


def _sentences(file: str, split: str, args: TextArguments) -> list[Tagged]:
    """The sentences of a file; refused where one has another number of tags than words."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        rows = list(_from_conll(lines))
        if Path(file).suffix.startswith(".json"):
            parsed = enumerate(map(json.loads, lines), 1)
            rows = [(number, row[args.text_column], row[args.label_column]) for number, row in parsed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("unreadable", f"--{split}_file", file, reason=error) from None
    wrong = [number for number, words, tags in rows if not words or len(words) != len(tags)]
    if wrong or not rows:
        raise UserError("tags-do-not-match", f"--{split}_file", f"{file}:{(wrong or [1])[0]}")
    return [(f"{file}:{number}", words, tags) for number, words, tags in rows]


def _from_conll(lines: list[str]) -> Iterator[tuple[int, list[str], list[str]]]:
    """First line, words and tags of each sentence."""
    numbered = [(number, line.split()) for number, line in enumerate(lines, 1)]
    for is_sentence, found in groupby(numbered, lambda each: each[1][:1] not in ([], ["-DOCSTART-"])):
        if is_sentence:
            numbers, words = zip(*found, strict=True)
            yield numbers[0], [each[0] for each in words], [each[-1] for each in words if each[1:]]


def _tokenised(split: str, rows: TaggedRows, max_length: int) -> Dataset:
    """Columns `input_ids`, `labels` (one a token), `length` and `language`."""
    words, labels = [each for _, each, _ in rows.splits[split]], []
    encoded = rows.tokenizer(words, is_split_into_words=True, truncation=True, max_length=max_length)
    for number, (_, _, tags) in enumerate(rows.splits[split]):
        begun = [None if word == before else word for before, word in pairwise([None, *encoded.word_ids(number)])]
        labels.append([IGNORED_LABEL if word is None else rows.tags.index(tags[word]) for word in begun])
    columns = {"input_ids": encoded["input_ids"], "labels": labels, "length": list(map(len, labels))}
    return Dataset.from_dict(columns | {"language": [language_of(" ".join(each)) for each in words]})

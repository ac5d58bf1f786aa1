"""Token classification, such as named entities: each word of a sentence gets a tag (B-PER, I-PER, O, ...)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from torch.nn import functional
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification, PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from indictune.config.arguments import DataArguments, IndicTrainingArguments, ModelArguments
from indictune.config.plan import RunPlan
from indictune.data.collation import IGNORED_LABEL
from indictune.data.languages import language_of
from indictune.data.row_sources import SPLITS
from indictune.errors import Problem, Problems, UserError, problem
from indictune.evaluation.entities import entity_metrics
from indictune.models.classifier import class_names
from indictune.models.dropout import set_config_dropout
from indictune.models.load import Model, check_vocabulary, load_config, load_tokenizer, read_weights, set_padding
from indictune.tasks.loss import ExactLoss
from indictune.tasks.objective import Batch
from indictune.tasks.protocol import Inputs, Task, Tokens
from indictune.tasks.text_objectives import TextObjective

Plan = RunPlan[DataArguments, IndicTrainingArguments]
Tagged = tuple[str, list[str], list[str]]  # where a sentence stands (`file:line`), its words, and their tags


class TaggedRows(NamedTuple):
    """Sentences by split, the tags in the order of the class ids, and the tokenizer of the model."""

    splits: dict[str, list[Tagged]]
    tags: list[str]
    tokenizer: Tokenizer


class TokenClassification(Task[TaggedRows, DataArguments, IndicTrainingArguments]):
    """Each word gets a tag, which its first token carries."""

    data_arguments = DataArguments
    training_arguments = IndicTrainingArguments

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return load_config(args, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, "classifier of tokens")

    def check(self, plan: Plan) -> list[Problem]:
        refused = {"--method": plan.model.method != "full", "--dataset_name": plan.data.dataset_name is not None}
        return [problem("not-of-this-task", flag) for flag, is_given in refused.items() if is_given]

    def metrics(self, plan: Plan) -> tuple[str, ...]:
        return "f1", "loss", "precision", "recall"

    def open(self, plan: Plan, problems: Problems) -> Inputs:
        named = {split: file for split in SPLITS if (file := getattr(plan.data, f"{split}_file")) is not None}
        return Inputs(problems.attempt(load_tokenizer, plan.model), named)

    def read(self, plan: Plan, inputs: Inputs, problems: Problems) -> TaggedRows | None:
        named = (inputs.sources or {}).items()
        splits = {split: problems.attempt(_sentences, file, split, plan.data) or [] for split, file in named}
        tags = sorted({tag for _, _, row in splits.get("train", []) for tag in row})
        unseen = {tag: where for found in splits.values() for where, _, row in found for tag in row if tag not in tags}
        problems.extend(problem("tag-unseen", where, tag) for tag, where in unseen.items())
        return None if inputs.tokenizer is None else TaggedRows(splits, tags, inputs.tokenizer)

    def tokenise(self, plan: Plan, rows: TaggedRows) -> Tokens:
        made = {name: _tokenised(found, rows, plan.data.max_length) for name, found in rows.splits.items()}
        location = [where for where, _, _ in rows.splits["train"]].__getitem__
        return Tokens(made["train"], made.get("validation"), made.get("test"), location)

    def load_model(self, plan: Plan, args: IndicTrainingArguments, rows: TaggedRows, reads_weights: bool) -> Model:
        config = self.read_config(plan.model)
        config.id2label, config.label2id = dict(enumerate(rows.tags)), {tag: i for i, tag in enumerate(rows.tags)}
        if plan.model.dropout is not None:
            set_config_dropout(config, plan.model.dropout)
        model, _ = read_weights(AutoModelForTokenClassification, plan.model, config, None, torch.float32)
        check_vocabulary(plan.model, model, rows.tokenizer)
        set_padding(model, rows.tokenizer)
        return model

    def objective(self, args: IndicTrainingArguments, model: Model, rows: TaggedRows, padded: bool) -> TokenTags:
        return TokenTags(model.config, rows.tokenizer, padded)


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


def _sentences(file: str, split: str, args: DataArguments) -> list[Tagged]:
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
    sentence: list[tuple[int, list[str]]] = []
    for number, line in enumerate([*lines, ""], 1):
        if line.strip() and not line.startswith("-DOCSTART-"):
            sentence.append((number, line.split()))
        elif sentence:
            yield sentence[0][0], [each[0] for _, each in sentence], [each[-1] for _, each in sentence if each[1:]]
            sentence = []


def _tokenised(sentences: list[Tagged], rows: TaggedRows, max_length: int) -> Dataset:
    """Columns `input_ids`, `labels` (one a token), `length` and `language`."""
    words = [each for _, each, _ in sentences]
    encoded = rows.tokenizer(words, is_split_into_words=True, truncation=True, max_length=max_length)
    labels = [np.full(len(ids), IGNORED_LABEL) for ids in encoded["input_ids"]]
    for number, (_, _, tags) in enumerate(sentences):
        first = {word: place for place, word in reversed([*enumerate(encoded.word_ids(number))]) if word is not None}
        for word, place in first.items():
            labels[number][place] = rows.tags.index(tags[word])
    columns = {"input_ids": encoded["input_ids"], "labels": labels, "length": list(map(len, labels))}
    return Dataset.from_dict(columns | {"language": [language_of(" ".join(each)) for each in words]})

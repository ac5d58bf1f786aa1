"""Token classification, such as named entities: each word of a sentence gets a tag (B-PER, I-PER, O, ...)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification, PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from indictune.config.arguments import DataArguments, ModelArguments
from indictune.config.arguments import IndicTrainingArguments as Args
from indictune.config.plan import RunPlan
from indictune.data.collation import IGNORED_LABEL
from indictune.data.health.encodings import findings_of_split
from indictune.data.health.findings import warning_notes
from indictune.data.health.row_health import check_unknown, measure
from indictune.data.sentences import BUILTIN, Sentences, divided, files_by_split, read_sentences, tag_balance
from indictune.data.text.tokenisation import check_lengths
from indictune.errors import Problem, Problems, problem
from indictune.evaluation.breakdown import RATIOS, Breakdown, break_down, label_block, mean_loss
from indictune.evaluation.scorers import entities, entity_kinds, predicted_tags
from indictune.models.load import Model, load_config, load_tokenizer
from indictune.models.task_models import class_names, label_order, load_classifier
from indictune.tasks.classification import TextObjective
from indictune.tasks.loss import ExactLoss
from indictune.tasks.protocol import (
    Batch,
    EvaluationPlan,
    Inputs,
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

    def predictions(self, dataset: Dataset, results: Results) -> Iterator[dict[str, Any]]:
        given = predicted_tags(results[0], dataset["is_read"][:], self.names)
        for tags, predicted in zip(dataset["tags"][:], given, strict=True):
            yield {"label": [self.names[tag] for tag in tags], "predicted": predicted}

    def breakdown(self, dataset: Dataset, results: Results, scripts: Scripts = None, draws: int = 0) -> Breakdown:
        (predicted, losses), is_read = results, dataset["is_read"][:]
        scorer = entities(predicted, dataset["tags"][:], is_read, self.names)
        loss = mean_loss(losses, max(1, sum(map(sum, is_read))))
        return break_down("entities", row_facts(dataset, scripts), scorer, self.names, loss=loss, draws=draws)

    def metrics(self, found: Breakdown) -> dict[str, Any]:
        seen = {kind: each for kind, each in found.overall.per_label.items() if each.support or each.predicted}
        return super().metrics(found) | found.overall.counts | {"per_entity": label_block(seen)}


Plan = RunPlan[DataArguments, Args]
ENTITY_SCORES = ("f1", "precision", "recall")


@dataclass(frozen=True)
class TaggedRows:
    """Sentences by split, the tags in the order of the class ids, and the tokenizer of the model."""

    splits: dict[str, Sentences]
    tags: list[str]
    tokenizer: Tokenizer


class TokenClassification(Task[TaggedRows, DataArguments, Args]):
    """Each word gets a tag, which its first token carries."""

    head = "ForTokenClassification"
    name = "tokens"
    scores = (*ENTITY_SCORES, "loss", "worst_language_f1")
    arguments = (ModelArguments, DataArguments, Args)

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return load_config(args, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, "classifier of tokens")

    def check(self, plan: Plan) -> list[Problem]:
        data = plan.data
        is_foreign = data.dataset_name not in (None, BUILTIN)
        refused: dict[str, Any] = {"--method": plan.model.method != "full", "--dataset_name": is_foreign}
        refused |= {"--bad_rows": data.bad_rows != "stop", "--drop_leaked_rows": data.drop_leaked_rows}
        refused |= {"--problem_type": data.problem_type, "--vocabulary_from_train": plan.model.vocabulary_from_train}
        refused |= {"--train_files": data.train_files, "--language_sampling_alpha": data.language_sampling_alpha != 1}
        refused |= {"--max_conflict_share": data.max_conflict_share is not None, "--label_map": data.label_map}
        refused |= {"--keep_label_spellings": data.keep_label_spellings, "--text_pair_column": data.text_pair_column}
        return [problem("not-of-this-task", flag) for flag, is_given in refused.items() if is_given]

    def open(self, plan: Plan, problems: Problems) -> Inputs:
        return Inputs(problems.attempt(load_tokenizer, plan.model), files_by_split(plan.data))

    def read(
        self, plan: Plan | EvaluationPlan, inputs: Inputs, problems: Problems, tags: list[str] | None = None
    ) -> TaggedRows | None:
        files = (inputs.sources or {}).items()
        given = {split: problems.attempt(read_sentences, named, split, plan.data) for split, named in files}
        splits = {split: sentences for split, sentences in given.items() if sentences is not None}
        known = tags or (sorted(splits["train"].tags()) if "train" in splits else [])
        if tags is None and len(known) == 1:
            problems.append(problem("one-tag", "--train_file", splits["train"].source, tag=known[0]))
        if tags is None and plan.model_config is not None:
            known = problems.attempt(label_order, plan.model_config, known) or known
        for each in splits.values() if known else ():
            unseen = {tag: each.location(number) for tag, number in each.tags().items() if tag not in known}
            problems.extend(problem("tag-unseen", where, tag) for tag, where in unseen.items())
        splits = splits if problems else divided(splits, plan)
        return None if inputs.tokenizer is None else TaggedRows(splits, known, inputs.tokenizer)

    def tokenise(self, plan: Plan, rows: TaggedRows) -> Tokens:
        made, train = _tokenised(rows, int(plan.data.max_length)), rows.splits["train"]
        check_unknown(train, rows.tokenizer, plan)
        found = [finding for each in rows.splits.values() for finding in findings_of_split(each)]
        health = measure(rows.splits, rows.tokenizer, int(plan.data.max_length), found)
        origins = {split: Origins(each.location, each.texts) for split, each in rows.splits.items()}
        held_out = made.get("validation"), made.get("test")
        balance, tag_notes = tag_balance(train)
        health, notes = replace(health, labels=balance), [*tag_notes, *warning_notes(health.findings)]
        tokens = Tokens(made["train"], *held_out, train.location, notes=notes, origins=origins, health=health)
        return replace(tokens, scores=self.group_scores(plan), labels=entity_kinds(rows.tags))

    def group_scores(self, plan: Plan) -> tuple[str, ...]:
        return ENTITY_SCORES

    def label_scores(self, plan: Plan) -> tuple[str, ...]:
        return RATIOS

    def load_model(self, plan: Plan, args: Args, rows: TaggedRows, reads_weights: bool) -> Model:
        config = self.read_config(plan.model)
        return load_classifier(plan.model, rows.tags, rows.tokenizer, None, config, TokenTags.kind)

    def objective(
        self, args: Args, config: PreTrainedConfig, tokenizer: Tokenizer, padded: bool, rows: TaggedRows | None
    ) -> TokenTags:
        return TokenTags(config, tokenizer, padded, ExactLoss(label_smoothing=args.label_smoothing_factor))

    def tokenise_test(self, plan: EvaluationPlan, tokenizer: Tokenizer | None, problems: Problems) -> TestTokens:
        given = {"--bad_rows": plan.data.bad_rows != "stop", "--label_map": plan.data.label_map}
        problems += [problem("not-of-this-task", flag) for flag, is_given in given.items() if is_given]
        tags = None if plan.model_config is None else class_names(plan.model_config)
        rows = self.read(plan, Inputs(tokenizer, {"test": plan.data.test_file}), problems, tags)
        problems.raise_any()
        assert rows is not None
        test = rows.splits["test"]
        return TestTokens(_tokenised(rows, plan.data.max_length)["test"], [], Origins(test.location, test.texts))


def _tokenised(rows: TaggedRows, max_length: int) -> dict[str, Dataset]:
    """By split: `input_ids`, `labels` (one a token), `length`, `language`, and of each word `tags` and `is_read`.

    `is_read` is False for words that `max_length` cuts off.
    """
    from datasets import Dataset  # slow to import

    ids = {tag: index for index, tag in enumerate(rows.tags)}
    datasets = {}
    for split, sentences in rows.splits.items():
        words = sentences.table["words"].to_pylist()
        tags = [[ids[tag] for tag in row] for row in sentences.table["tags"].to_pylist()]
        encoded = rows.tokenizer(words, is_split_into_words=True, truncation=True, max_length=max_length)
        labels, is_read = [], []
        for number, row in enumerate(tags):
            begun = [None if word == before else word for before, word in pairwise([None, *encoded.word_ids(number)])]
            labels.append([IGNORED_LABEL if word is None else row[word] for word in begun])
            is_read.append([word in begun for word in range(len(row))])
        columns = {"input_ids": encoded["input_ids"], "labels": labels, "length": list(map(len, labels))}
        columns |= {"tags": tags, "is_read": is_read, "language": sentences.table["language"].to_pylist()}
        datasets[split] = Dataset.from_dict(columns)
    check_lengths(rows.splits, datasets, max_length)
    return datasets

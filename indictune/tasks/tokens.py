"""Token classification, such as named entities: each word of a sentence gets a tag (B-PER, I-PER, O, ...)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification, PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from indictune.config.arguments import IndicTrainingArguments as Args
from indictune.config.arguments import ModelArguments, TaggedDataArguments
from indictune.config.plan import RunPlan
from indictune.data.collation import IGNORED_LABEL
from indictune.data.health.encodings import findings_of_split
from indictune.data.health.findings import Finding, warning_notes
from indictune.data.health.row_health import check_unknown, measure
from indictune.data.read.row_sources import file_source, sources_by_split
from indictune.data.sentences import (
    BUILTIN,
    Sentences,
    divided,
    read_sentences,
    tag_balance,
    tag_reader,
    tokenised_sentences,
    with_one_scheme,
)
from indictune.data.text.tokenisation import usual_length
from indictune.errors import Problem, Problems, problem, problems_of
from indictune.evaluation.breakdown import RATIOS, Breakdown, break_down, label_block, mean_loss
from indictune.evaluation.scorers import entities, entity_kinds, predicted_tags
from indictune.models.adapters import HEAD_NAMES
from indictune.models.load import Model, load_config, load_tokenizer, positions_of
from indictune.models.task_models import check_shapes, class_names, label_order, load_classifier
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

    def compared(self, dataset: Dataset, results: Results | None) -> tuple[list[Any], list[Any]]:
        right = [[self.names[tag] for tag in row] for row in dataset["tags"][:]]
        return right if results is None else predicted_tags(results[0], dataset["is_read"][:], self.names), right

    def predictions(self, dataset: Dataset, results: Results) -> Iterator[dict[str, Any]]:
        for predicted, right in zip(*self.compared(dataset, results), strict=True):
            yield {"label": right, "predicted": predicted}

    def breakdown(self, dataset: Dataset, results: Results, scripts: Scripts = None, draws: int = 0) -> Breakdown:
        (predicted, losses), is_read = results, dataset["is_read"][:]
        scorer = entities(predicted, dataset["tags"][:], is_read, self.names)
        loss = mean_loss(losses, max(1, sum(map(sum, is_read))))
        return break_down("entities", row_facts(dataset, scripts), scorer, self.names, loss=loss, draws=draws)

    def metrics(self, found: Breakdown) -> dict[str, Any]:
        seen = {kind: each for kind, each in found.overall.per_label.items() if each.support or each.predicted}
        return super().metrics(found) | found.overall.counts | {"per_entity": label_block(seen)}


Plan = RunPlan[TaggedDataArguments, Args]
ENTITY_SCORES = ("f1", "precision", "recall")
USUAL_PERCENTILE = 99.5  # of the tokens of sentences


@dataclass(frozen=True)
class TaggedRows:
    """Sentences by split, tags in the order of the class ids, the model's tokenizer, and how tags were written."""

    splits: dict[str, Sentences]
    tags: list[str]
    tokenizer: Tokenizer
    scheme: Finding


class TokenClassification(Task[TaggedRows, TaggedDataArguments, Args]):
    """Each word gets a tag, which its first token carries."""

    head = "ForTokenClassification"
    name = "tokens"
    fits_max_length = True
    scores = (*ENTITY_SCORES, "loss", "worst_language_f1")
    arguments = (ModelArguments, TaggedDataArguments, Args)

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return load_config(args, TokenTags.kind, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, "classifier of tokens")

    def check(self, plan: Plan) -> list[Problem]:
        data, config = plan.data, plan.model_config
        refused: dict[str, Any] = {"--bad_rows": data.bad_rows != "stop", "--drop_leaked_rows": data.drop_leaked_rows}
        refused |= {"--problem_type": data.problem_type, "--vocabulary_from_train": plan.model.vocabulary_from_train}
        refused |= {"--train_files": data.train_files, "--language_sampling_alpha": data.language_sampling_alpha != 1}
        refused |= {"--max_conflict_share": data.max_conflict_share is not None, "--label_map": data.label_map}
        refused |= {"--keep_label_spellings": data.keep_label_spellings, "--text_pair_column": data.text_pair_column}
        found = [problem("not-of-this-task", flag) for flag, is_given in refused.items() if is_given]
        return found + problems_of(check_shapes, TokenTags.kind, plan.model, config, HEAD_NAMES)

    def open(self, plan: Plan, problems: Problems) -> Inputs:
        tokenizer, read = problems.attempt(load_tokenizer, plan.model), problems.attempt(tag_reader, plan.data)
        return Inputs(tokenizer, read and problems.attempt(sources_by_split, plan.data, problems, BUILTIN, read))

    def read(
        self, plan: Plan | EvaluationPlan, inputs: Inputs, problems: Problems, tags: list[str] | None = None
    ) -> TaggedRows | None:
        given = {split: problems.attempt(read_sentences, each) for split, each in (inputs.sources or {}).items()}
        splits = {split: sentences for split, sentences in given.items() if sentences is not None}
        own = tags or ([] if plan.model_config is None else map(str, (plan.model_config.id2label or {}).values()))
        splits, scheme = with_one_scheme(splits, {*own})
        known = tags or (sorted(splits["train"].tags()) if "train" in splits else [])
        if tags is None and len(known) == 1:
            problems.append(problem("one-tag", "--train_file", splits["train"].source, tag=known[0]))
        if tags is None and plan.model_config is not None:
            known = problems.attempt(label_order, plan.model_config, known) or known
        for each in splits.values() if known else ():
            unseen = {tag: each.location(number) for tag, number in each.tags().items() if tag not in known}
            problems.extend(problem("tag-unseen", where, tag) for tag, where in unseen.items())
        splits = splits if problems else divided(splits, plan)
        return None if inputs.tokenizer is None else TaggedRows(splits, known, inputs.tokenizer, scheme)

    def tokenise(self, plan: Plan, rows: TaggedRows) -> Tokens:
        train, max_length = rows.splits["train"], plan.data.max_length
        if isinstance(max_length, str):
            limit = positions_of(plan.model_config)
            max_length = usual_length(train.table["words"], rows.tokenizer, limit, USUAL_PERCENTILE)
        made = tokenised_sentences(rows.splits, rows.tags, rows.tokenizer, max_length)
        check_unknown(train, rows.tokenizer, plan)
        found = [finding for each in rows.splits.values() for finding in findings_of_split(each)]
        health = measure(rows.splits, rows.tokenizer, max_length, [rows.scheme, *found])
        origins = {split: Origins(each.location, each.texts) for split, each in rows.splits.items()}
        held_out = made.get("validation"), made.get("test")
        health = replace(health, labels=tag_balance(train))
        notes, facts = warning_notes(health.findings), {"tags": rows.scheme.note}
        tokens = Tokens(made["train"], *held_out, train.location, notes=notes, origins=origins, health=health)
        scores, kinds = self.group_scores(plan), entity_kinds(rows.tags)
        return replace(tokens, scores=scores, labels=kinds, max_length=max_length, facts=facts)

    def compares(self, plan: Plan | EvaluationPlan) -> str:
        return "tags"

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
        asked = plan.data
        given = {"--bad_rows": asked.bad_rows != "stop", "--label_map": asked.label_map}
        problems += [problem("not-of-this-task", flag) for flag, is_given in given.items() if is_given]
        tags = None if plan.model_config is None else class_names(plan.model_config)
        sources = {}
        with problems.collecting():
            sources["test"] = file_source(asked.test_file, "--test_file", tag_reader(asked))
        rows = self.read(plan, Inputs(tokenizer, sources), problems, tags)
        problems.raise_any()
        assert rows is not None
        test = rows.splits["test"]
        made = tokenised_sentences(rows.splits, rows.tags, rows.tokenizer, asked.max_length)
        return TestTokens(made["test"], warning_notes([rows.scheme]), Origins(test.location, test.texts))

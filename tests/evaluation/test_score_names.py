"""A name that is promised before training is a name that an evaluation gives, for every task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sklearn.metrics import f1_score, recall_score
from transformers import BertConfig

from indictune.evaluation.breakdown import WRITTEN, named_scores, near_names
from indictune.preflight.values import METRIC, check_metric_of_rows
from indictune.tasks.chat import Answers, Chat
from indictune.tasks.classification import Classification, MultiLabel, Regression, SingleLabel
from indictune.tasks.protocol import Objective, Origins, Samples, Task, Tokens
from indictune.tasks.tokens import TokenClassification, TokenTags
from indictune.training.evaluation import scores_of_samples
from tests.models.tiny import words_tokenizer
from tests.plans import codes, plan_of

TEXTS = ["अच्छा", "bahut acha", "மோசம்", "romba nalla", "fine", "good"]
LANGUAGES = ["hi", "hi", "ta", "ta", "a|b", "a|b"]
SCRIPTS = ["native", "romanised", "native", "romanised", "romanised", "romanised"]
LENGTHS = [4, 20, 16, 17, 600, 3]
GROUPS = ("hi", "ta", "a_b", "native", "romanised", "length_1-16", "length_17-32", "length_over_512")
LABELS = ["bad", "good", "so so"]
REFERENCES = np.array([0, 1, 2, 0, 1, 2])
PREDICTED = np.array([0, 1, 1, 2, 1, 0])

SAMPLES = Samples(
    "validation",
    [[{"role": "assistant", "content": text}] for text in ("good", "मौसम")],
    Dataset.from_dict({"language": ["en", "hi"], "length": [3, 30]}),
    "",
    8,
)
WITHOUT_METRICS: Any = SimpleNamespace(args=SimpleNamespace(metrics=[]))
WRITTEN_GROUPS = ("en", "hi", "english", "native", "length_1-16", "length_17-32")


def config(labels: Sequence[str], problem_type: Any = None) -> BertConfig:
    return BertConfig(vocab_size=64, id2label=dict(enumerate(labels)), problem_type=problem_type)


def dataset(labels: Iterable[Any], **more: Any) -> Dataset:
    return Dataset.from_dict({"labels": list(labels), "language": LANGUAGES, "length": LENGTHS} | more)


def objective_of(kind: str) -> tuple[Objective, Dataset, list[np.ndarray]]:
    """An objective, rows, and what it may have measured of them."""
    losses = np.linspace(1, 2, 6, dtype=np.float32)
    if kind == "single":
        return SingleLabel(config(LABELS), words_tokenizer()), dataset(REFERENCES), [PREDICTED, losses, -losses]
    if kind == "regression":
        objective = Regression(config(["0"], "regression"), words_tokenizer())
        return objective, dataset(REFERENCES.astype(float)), [PREDICTED.astype(np.float32), losses]
    if kind == "multi":
        several = (np.eye(3, dtype=int)[each] for each in (REFERENCES, PREDICTED))
        rows, given = dataset(next(several).tolist()), next(several).astype(np.float32)
        return MultiLabel(config(LABELS, "multi_label_classification"), words_tokenizer()), rows, [given, losses]
    if kind == "tags":
        tags = [[each, each] for each in REFERENCES.tolist()]
        rows = dataset(tags, tags=tags, is_read=[[True, True]] * 6)
        names = ["O", "B-PER", "B-never seen"]
        return TokenTags(config(names), words_tokenizer()), rows, [np.stack([PREDICTED % 2, PREDICTED % 2], 1), losses]
    counts = np.full(6, 4)
    return Answers(0, torch.float32, True), dataset([0] * 6), [losses, counts, counts // 2]


KINDS: list[tuple[str, Task[Any, Any, Any], dict[str, Any], list[str]]] = [
    ("single", Classification(), {}, LABELS),
    ("regression", Classification(), {"problem_type": "regression"}, []),
    ("multi", Classification(), {"problem_type": "multi_label_classification"}, LABELS),
    ("tags", TokenClassification(), {}, ["PER", "never seen"]),
    ("answers", Chat(), {}, []),
]


@pytest.mark.parametrize(("kind", "task", "data", "labels"), KINDS, ids=[each[0] for each in KINDS])
def test_every_promised_name_has_a_score_and_every_score_a_name(
    kind: str, task: Task[Any, Any, Any], data: dict[str, Any], labels: list[str]
) -> None:
    objective, rows, results = objective_of(kind)
    found = objective.breakdown(rows, results, SCRIPTS)
    if kind == "answers":
        found = replace(found, written=scores_of_samples(WITHOUT_METRICS, SAMPLES, ["good", "मोसम"]))
    given = set(named_scores(found)) | set(objective.flatten(objective.metrics(found)))
    plan = plan_of(arguments=task.arguments[-1])
    vars(plan.data).update(data)
    scores = [score for score in task.group_scores(plan) if score not in WRITTEN]
    of_groups = {f"{score}_{group}" for score in scores for group in GROUPS}
    if kind == "answers":
        of_groups |= {f"{score}_{group}" for score in WRITTEN for group in WRITTEN_GROUPS}
    of_labels = {f"{score}_{label}" for score in task.label_scores(plan) for label in labels}
    of_both = {f"{score}_{group}" for score in of_labels for group in GROUPS}
    assert given == set(task.metrics(plan)) | of_groups | of_labels | of_both
    samples = SAMPLES if kind == "answers" else None
    tokens = Tokens(rows, rows, None, str, scores=scores, labels=labels, samples=samples)
    tokens = replace(tokens, origins={"validation": Origins(str, TEXTS)})
    for name in given:
        assert check_metric_of_rows(f"eval_{name}", tokens) == []
    if kind == "answers":
        assert codes(check_metric_of_rows("chrf_a_b", tokens)) == [("metric-of-unseen-language", METRIC)]
    score = scores[0]
    for name in (
        f"{score}_te",
        f"{score}_",
        f"{score}_none",
        f"{score}_a|b",
        f"{score}_length_33-64",
        f"{score}_17-32",
    ):
        assert codes(check_metric_of_rows(name, tokens)) == [("metric-of-unseen-language", METRIC)]


def test_a_name_stands_for_the_score_of_its_rows() -> None:
    objective, rows, results = objective_of("single")
    found = objective.breakdown(rows, results, SCRIPTS)
    named = named_scores(found)
    romanised = [script == "romanised" for script in SCRIPTS]
    assert named["macro_f1_romanised"] == pytest.approx(
        f1_score(REFERENCES[romanised], PREDICTED[romanised], average="macro")
    )
    assert named["macro_recall_length_17-32"] == pytest.approx(
        recall_score(REFERENCES[[1, 3]], PREDICTED[[1, 3]], average="macro", zero_division=0)
    )
    assert named["recall_so so"] == 0
    assert named["precision_good"] == pytest.approx(2 / 3)
    assert [named[f"recall_bad_{group}"] for group in ("hi", "ta", "length_1-16", "native")] == [1, 0, 1, 1]
    assert named["worst_language_macro_f1"] == min(named[f"macro_f1_{language}"] for language in ("hi", "ta", "a_b"))


def test_the_nearest_names_are_shown_first() -> None:
    assert near_names("makro_f1", ["loss", "macro_f1", "ece"]) == "macro_f1"
    assert near_names("xyz", ["loss", "ece"]) == "loss, ece"

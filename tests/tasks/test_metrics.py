"""The blocks of `metrics.json` of every task: by hand, and against scikit-learn's report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sklearn.metrics import classification_report
from transformers import BertConfig

from indictune.config.recipe import read_recipe
from indictune.data.load_rows import load_splits
from indictune.models.load import load_tokenizer
from indictune.preflight.derive import plan_of_rows
from indictune.tasks.chat import Answers
from indictune.tasks.classification import Classification, ClassifiedRows, MultiLabel, Regression, SingleLabel
from indictune.tasks.protocol import Objective
from indictune.tasks.tokens import TokenTags
from tests.first_hour.saved_models import saved_classifier
from tests.models.tiny import words_tokenizer
from tests.ranks.launching import ROOT

LABELS = ["negative", "neutral", "positive"]

# Seven tweets, five of them right. No Telugu tweet is neutral, nor called so.
#
#   language    te    hi    hi    hi    te    hi    te
#   reference   pos   neg   neg   neu   pos   pos   neg
#   prediction  neg   neg   neu   neu   pos   pos   neg
ROWS: dict[str, Any] = {
    "languages": ["te", "hi", "hi", "hi", "te", "hi", "te"],
    "references": [2, 0, 0, 1, 2, 2, 0],
    "predictions": [0, 0, 1, 1, 2, 2, 0],
    "losses": [2.0, 0.25, 1.0, 0.5, 0.375, 0.125, 0.25],
}
# The model is 0.75 sure of each: the calibration error is 0.75 - 5/7.
SURE = 0.75

#            TP  in predictions  in references   precision  recall  F1 = 2 TP / (predictions + references)
#   negative  2               3              3         2/3     2/3                               4/6 = 2/3
#   neutral   1               2              1         1/2     1                                 2/3
#   positive  2               2              3         1       2/3                               4/5
#   macro-F1 = (2/3 + 2/3 + 4/5) / 3 = 32/45; accuracy = 5/7; loss = 4.5/7
#
#   Hindi, 3 of 4 right: negative 2*1/(1+2) = 2/3, neutral 2*1/(2+1) = 2/3, positive 2*1/(1+1) = 1; macro 7/9
#   Telugu, 2 of 3 right: negative 2*1/(2+1) = 2/3, positive 2*1/(1+2) = 2/3; macro over these two 2/3
EXPECTED: dict[str, Any] = {
    "num_examples": 7,
    "loss": 4.5 / 7,
    "accuracy": 5 / 7,
    "macro_f1": 32 / 45,
    "worst_language_macro_f1": 2 / 3,
    "per_language": {
        "hi": {"accuracy": 3 / 4, "macro_f1": 7 / 9, "num_examples": 4},
        "te": {"accuracy": 2 / 3, "macro_f1": 2 / 3, "num_examples": 3},
    },
    "per_label": {
        "negative": {"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3, "support": 3},
        "neutral": {"precision": 1 / 2, "recall": 1.0, "f1": 2 / 3, "support": 1},
        "positive": {"precision": 1.0, "recall": 2 / 3, "f1": 4 / 5, "support": 3},
    },
    "ece": 0.75 - 5 / 7,
}


def leaves(tree: dict[str, Any], path: str = "") -> dict[str, float]:
    """Flatten nested dicts to `{"per_label/neutral/f1": 0.5, ...}`."""
    flat: dict[str, float] = {}
    for key, value in tree.items():
        flat |= leaves(value, f"{path}{key}/") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat


def config(labels: Sequence[str], problem_type: Any = None) -> BertConfig:
    return BertConfig(vocab_size=64, id2label=dict(enumerate(labels)), problem_type=problem_type)


def block_of_rows(objective: Objective, results: Sequence[Any], languages: Sequence[str], **columns: Any) -> Any:
    rows = Dataset.from_dict({**columns, "language": list(languages), "length": [4] * len(languages)})
    return objective.metrics(objective.breakdown(rows, [np.asarray(each) for each in results]))


def single_label(
    languages: Sequence[str],
    references: Sequence[int],
    predictions: Sequence[int],
    losses: Sequence[float] | None = None,
    labels: Sequence[str] = LABELS,
) -> Any:
    losses = [0.5] * len(languages) if losses is None else losses
    sure = np.full(len(languages), math.log(SURE))
    objective = SingleLabel(config(labels), words_tokenizer())
    return block_of_rows(objective, [predictions, losses, sure], languages, labels=list(references))


class TestOneLabel:
    def test_worked_out_by_hand(self) -> None:
        assert leaves(single_label(**ROWS)) == pytest.approx(leaves(EXPECTED), rel=1e-14)

    def test_everything_is_plain_and_sorted_for_json(self) -> None:
        block = single_label(**ROWS)
        assert {type(value) for value in leaves(block).values()} == {int, float}
        assert list(block["per_language"]) == ["hi", "te"]
        assert list(block["per_label"]) == LABELS
        assert json.loads(json.dumps(block)) == block
        assert {path for path, value in leaves(block).items() if isinstance(value, int)} == {
            "num_examples",
            *(f"per_language/{language}/num_examples" for language in ("hi", "te")),
            *(f"per_label/{label}/support" for label in LABELS),
        }

    def test_agrees_with_the_report_of_scikit_learn(self) -> None:
        labels = ["anger", "fear", "joy", "love"]
        random = np.random.default_rng(7)
        references, predictions = random.integers(0, 4, (2, 500))
        languages = random.choice(["hi", "ta", "te"], 500)
        block = single_label(languages.tolist(), references.tolist(), predictions, labels=labels)
        report = classification_report(references, predictions, target_names=labels, output_dict=True)
        assert block["accuracy"] == report["accuracy"]
        assert block["macro_f1"] == pytest.approx(report["macro avg"]["f1-score"], rel=1e-15)
        for label in labels:
            assert list(block["per_label"][label].values()) == list(report[label].values()), label
        for language in ("hi", "ta", "te"):
            mine = languages == language
            report = classification_report(references[mine], predictions[mine], output_dict=True)
            expected = {"accuracy": report["accuracy"], "macro_f1": report["macro avg"]["f1-score"]}
            assert block["per_language"][language] == pytest.approx(
                expected | {"num_examples": int(mine.sum())}, rel=1e-15
            )
        worst = min(each["macro_f1"] for each in block["per_language"].values())
        assert block["worst_language_macro_f1"] == worst

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize(("prediction", "score"), [(1, 1.0), (2, 0.0)])
    def test_one_row_without_a_warning(self, prediction: int, score: float) -> None:
        block = single_label(["ta"], [1], [prediction])
        assert (block["num_examples"], block["loss"]) == (1, 0.5)
        assert (block["accuracy"], block["macro_f1"], block["worst_language_macro_f1"]) == (score, score, score)
        assert block["per_language"] == {"ta": {"accuracy": score, "macro_f1": score, "num_examples": 1}}
        assert block["per_label"]["neutral"] == {"precision": score, "recall": score, "f1": score, "support": 1}
        # Never seen, never predicted: all zeros in the list of labels, and not part of the macro-F1 of 1.
        assert block["per_label"]["negative"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0}

    @pytest.mark.filterwarnings("error")
    def test_a_label_the_language_lacks_counts_only_once_it_is_predicted(self) -> None:
        # Two of two right: macro-F1 1. With one "neutral" predicted: negative 2*1/(1+1) = 1, positive 2*1/(1+2) = 2/3,
        # neutral 2*0/(1+0) = 0, macro (1 + 2/3 + 0) / 3 = 5/9.
        for references, predictions, macro_f1 in (([0, 2], [0, 2], 1), ([0, 2, 2], [0, 2, 1], 5 / 9)):
            block = single_label(["te"] * len(references), references, predictions)
            assert block["per_language"]["te"]["macro_f1"] == pytest.approx(macro_f1)

    def test_the_order_of_the_rows_changes_no_bit(self) -> None:
        random = np.random.default_rng(7)
        rows: dict[str, Any] = {"references": random.integers(0, 3, 1000), "predictions": random.integers(0, 3, 1000)}
        rows |= {"languages": random.choice(["hi", "ta", "te"], 1000), "losses": np.array([1e16] + [1.0] * 999)}
        one_way, other_way = ({name: each[::step].tolist() for name, each in rows.items()} for step in (1, -1))
        assert single_label(**one_way) == single_label(**other_way)

    def test_flat_view_for_the_trainer(self) -> None:
        assert SingleLabel(config(LABELS), words_tokenizer()).flatten(EXPECTED) == {
            "loss": 4.5 / 7,
            "accuracy": 5 / 7,
            "macro_f1": 32 / 45,
            "worst_language_macro_f1": 2 / 3,
            "macro_f1_hi": 7 / 9,
            "macro_f1_te": 2 / 3,
            "f1_negative": 2 / 3,
            "f1_neutral": 2 / 3,
            "f1_positive": 4 / 5,
            "ece": 0.75 - 5 / 7,
        }


def test_numbers() -> None:
    objective = Regression(config(["0"], "regression"), words_tokenizer())
    results = np.array([1.0, 2, 4, 3]), np.array([0.0, 0, 1, 25])
    block = block_of_rows(objective, results, ["hi", "hi", "ta", "ta"], labels=[1.0, 2, 3, 8])
    # Pearson is the sum of products of the distances to the means; Spearman is 1 - 6 (0 + 0 + 1 + 1) / (4 (16 - 1)).
    overall = {"num_examples": 4, "loss": 6.5, "pearson": 6 / math.sqrt(5 * 29), "spearman": 0.8, "mae": 1.5}
    tamil = block.pop("per_language")["ta"]
    assert block == pytest.approx(overall)
    assert tamil == pytest.approx({"num_examples": 2, "pearson": -1, "spearman": -1, "mae": 3})


def test_several_labels() -> None:
    objective = MultiLabel(config(["a", "b"], "multi_label_classification"), words_tokenizer())
    results = np.array([[0.9, 0.3], [0.3, 0.1], [0.1, 0.35]]), np.ones(3)
    rows = Dataset.from_dict({"labels": [[1, 1], [0, 0], [0, 1]], "language": ["hi", "hi", "ta"], "length": [4] * 3})
    objective.fit(rows, results)
    assert objective.threshold == 0.3
    block = objective.metrics(objective.breakdown(rows, results))
    names = "num_examples", "loss", "micro_f1", "macro_f1", "per_language", "threshold", "per_label"
    assert tuple(block) == names
    assert (block["micro_f1"], block["macro_f1"]) == pytest.approx((2 * 3 / (2 * 3 + 1), (2 / 3 + 1) / 2))
    assert block["per_label"]["a"] == {"precision": 0.5, "recall": 1, "f1": pytest.approx(2 / 3), "support": 1}
    # No Tamil row has the label a, and none was given it: it leaves the macro-F1 alone.
    assert block["per_language"]["ta"] == {"num_examples": 1, "micro_f1": 1, "macro_f1": 1}


def test_a_language_without_any_label_is_not_the_worst() -> None:
    objective = MultiLabel(config(["a", "b"], "multi_label_classification"), words_tokenizer())
    results = np.array([[0.9, 0.9], [0.9, 0.1], [0.1, 0.1]]), np.ones(3)
    rows = Dataset.from_dict({"labels": [[1, 0], [1, 0], [0, 0]], "language": ["hi", "te", "ta"], "length": [4] * 3})
    assert objective.breakdown(rows, results).worst_language == "hi"
    nothing = results[0] * 0, np.ones(3)
    rows = Dataset.from_dict({"labels": [[0, 0]] * 3, "language": ["hi", "te", "ta"], "length": [4] * 3})
    assert objective.breakdown(rows, nothing).overall.scores["macro_f1"].value == 0


def test_further_training_begins_with_a_threshold_of_its_own(tmp_path: Path) -> None:
    """Without validation rows, nothing fits another one."""
    first = saved_classifier(tmp_path / "first", "multi_label_classification")
    content = json.loads((first / "config.json").read_text()) | {"threshold": 0.93}
    (first / "config.json").write_text(json.dumps(content))
    flags = ["--model_name_or_path", str(first), "--train_file", str(ROOT / "tests/inputs/labels_pipe_second.csv")]
    task = Classification()
    plan, _ = plan_of_rows(read_recipe([*flags, "--validation_split", "0"], task.arguments), task)
    rows = ClassifiedRows(load_splits(plan.data), plan.model, load_tokenizer(plan.model), ["anger", "joy"], None)
    model = task.load_model(plan, plan.training, rows, True)
    assert model.config.problem_type == "multi_label_classification"
    assert task.objective(plan.training, model.config, rows.tokenizer, True, rows).fitted() == {"threshold": 0.5}


TAGS = ["B-LOC", "B-PER", "I-PER", "O"]
_ = -100  # a token that carries no tag


def entities(
    predictions: list[list[int]], losses: list[float], tags: list[list[int]], is_read: list[list[bool]] | None = None
) -> Any:
    is_read = is_read or [[True] * len(row) for row in tags]
    objective, languages = TokenTags(config(TAGS), words_tokenizer()), ["hi", "ta"][: len(tags)]
    return block_of_rows(objective, [predictions, losses], languages, tags=tags, is_read=is_read)


class TestEntities:
    def test_half_an_entity_is_a_wrong_one(self) -> None:
        # PER is cut, both LOC are found.
        found = entities([[_, 1, 3, 3, 0, _], [0, 3, _, _, _, _]], [3.0, 3.0], [[1, 2, 3, 0], [0, 3]])
        assert (found["num_examples"], found["num_tags"], found["loss"]) == (2, 6, 1.0)
        assert (found["precision"], found["recall"]) == (pytest.approx(2 / 3), pytest.approx(2 / 3))
        assert found["per_language"]["ta"] == {"num_examples": 1, "precision": 1.0, "recall": 1.0, "f1": 1.0}
        assert found["per_language"]["hi"]["f1"] == pytest.approx(0.5)
        assert found["per_entity"]["LOC"] == {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 2}
        assert found["per_entity"]["PER"]["f1"] == 0.0

    def test_a_kind_that_is_neither_there_nor_predicted_has_no_scores(self) -> None:
        found = entities([[3]], [0.5], [[3]])
        assert (found["f1"], found["per_entity"], found["loss"]) == (0.0, {}, 0.5)
        zeros = {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0}
        assert entities([[0]], [0.5], [[3]])["per_entity"] == {"LOC": zeros}

    def test_a_word_that_the_model_does_not_read_is_a_missed_entity(self) -> None:
        # The first sentence loses its end, the second its first word.
        is_read = [[True, True, False, False], [False, True]]
        found = entities([[_, 0, 3], [_, 3, _]], [3.0, 3.0], [[0, 3, 1, 2], [1, 3]], is_read)
        assert (found["precision"], found["recall"], found["f1"]) == (1.0, pytest.approx(1 / 3), 0.5)
        assert found["per_entity"]["PER"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 2}
        assert (found["num_tags"], found["loss"]) == (3, 2.0)


def answers(*rows: tuple[float, int, int], languages: Sequence[str]) -> Any:
    """Of each row: summed loss, tokens that count, tokens predicted right."""
    losses, tokens, right = zip(*rows, strict=True)
    results = np.array(losses, np.float32), np.array(tokens), np.array(right)
    return block_of_rows(Answers(0, torch.float32, True), results, languages)


class TestAnswers:
    def test_three_rows_by_hand(self) -> None:
        block = answers((2.0, 4, 3), (6.0, 2, 0), (1.0, 3, 3), languages=["te", "hi", "te"])
        # Together: (2 + 6 + 1) / 9 nats a token, 6 of 9 tokens right; Telugu: 3 / 7 and 6 of 7; Hindi: 6 / 2, 0 of 2.
        expected = {
            None: (3, 9, 1.0, math.e, 6 / 9),
            "hi": (1, 2, 3.0, math.exp(3), 0),
            "te": (2, 7, 3 / 7, math.exp(3 / 7), 6 / 7),
        }
        names = "num_examples", "num_tokens", "loss", "perplexity", "answer_token_accuracy"
        assert list(block["per_language"]) == ["hi", "te"]
        for language, values in expected.items():
            found = block if language is None else block["per_language"][language]
            assert [found[name] for name in names] == pytest.approx(values), language
        objective = Answers(0, torch.float32, True)
        assert objective.flatten(block) == {name: block[name] for name in names[2:]}

    def test_rows_without_a_token_that_counts_change_nothing_but_their_number(self) -> None:
        block = answers((2.0, 4, 1), (0.0, 0, 0), languages=["hi", "ta"])
        assert (block["num_examples"], block["num_tokens"]) == (2, 4)
        assert (block["loss"], block["answer_token_accuracy"]) == (0.5, 0.25)
        tamil = block["per_language"]["ta"]
        assert (tamil["num_examples"], tamil["num_tokens"]) == (1, 0)
        assert all(math.isnan(tamil[name]) for name in ("loss", "perplexity", "answer_token_accuracy"))

    @pytest.mark.filterwarnings("error")
    def test_a_hopeless_loss_has_an_infinite_perplexity(self) -> None:
        assert answers((1000.0, 1, 0), languages=["hi"])["perplexity"] == math.inf

    def test_sums_are_taken_in_double_precision(self) -> None:
        """In float32 16,777,216 + 1 is 16,777,216."""
        assert answers((16_777_216.0, 1, 0), (1.0, 0, 0), languages=["hi", "hi"])["loss"] == 16_777_217.0

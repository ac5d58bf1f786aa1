"""Metrics against values worked out by hand, against scikit-learn's report."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import classification_report

from indictune.evaluation.metrics import classification_metrics, flatten_for_trainer

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
}


def leaves(tree: dict[str, Any], path: str = "") -> dict[str, float]:
    """Flatten nested dicts to `{"per_label/neutral/f1": 0.5, ...}`."""
    flat: dict[str, float] = {}
    for key, value in tree.items():
        flat |= leaves(value, f"{path}{key}/") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat


def random_rows(num_rows: int, num_labels: int, languages: list[str]) -> dict[str, Any]:
    random = np.random.default_rng(7)
    return {
        "languages": [languages[number] for number in random.integers(0, len(languages), num_rows)],
        "references": random.integers(0, num_labels, num_rows),
        "predictions": random.integers(0, num_labels, num_rows),
        "losses": random.random(num_rows),
    }


def test_metrics_worked_out_by_hand() -> None:
    metrics = classification_metrics(**ROWS, label_names=LABELS)
    assert leaves(metrics) == pytest.approx(leaves(EXPECTED), rel=1e-15)


def test_everything_is_plain_and_sorted_for_json() -> None:
    numpy_rows: dict[str, Any] = {name: np.asarray(column) for name, column in ROWS.items()}
    metrics = classification_metrics(**numpy_rows, label_names=LABELS)
    assert {type(value) for value in leaves(metrics).values()} == {int, float}
    assert {type(language) for language in metrics["per_language"]} == {str}
    assert list(metrics["per_language"]) == ["hi", "te"]
    assert list(metrics["per_label"]) == LABELS
    assert json.loads(json.dumps(metrics)) == metrics
    assert {path for path, value in leaves(metrics).items() if isinstance(value, int)} == {
        "num_examples",
        *(f"per_language/{language}/num_examples" for language in ("hi", "te")),
        *(f"per_label/{label}/support" for label in LABELS),
    }


def test_agrees_with_the_report_of_scikit_learn() -> None:
    labels = ["anger", "fear", "joy", "love"]
    rows = random_rows(500, len(labels), ["hi", "ta", "te"])
    metrics = classification_metrics(**rows, label_names=labels)
    report = classification_report(rows["references"], rows["predictions"], target_names=labels, output_dict=True)
    assert metrics["accuracy"] == pytest.approx(report["accuracy"])
    assert metrics["macro_f1"] == pytest.approx(report["macro avg"]["f1-score"])
    for label in labels:
        ours = metrics["per_label"][label]
        assert list(ours.values()) == pytest.approx(list(report[label].values())), label
    for language in ("hi", "ta", "te"):
        mine = [row == language for row in rows["languages"]]
        report = classification_report(rows["references"][mine], rows["predictions"][mine], output_dict=True)
        assert metrics["per_language"][language] == pytest.approx(
            {"accuracy": report["accuracy"], "macro_f1": report["macro avg"]["f1-score"], "num_examples": sum(mine)}
        )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("prediction", "score", "neutral"),
    [
        (1, 1.0, {"precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 1}),
        (2, 0.0, {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1}),
    ],
)
def test_one_row_without_a_warning(prediction: int, score: float, neutral: dict[str, float]) -> None:
    metrics = classification_metrics(
        predictions=[prediction], references=[1], losses=[0.5], languages=["ta"], label_names=LABELS
    )
    assert (metrics["num_examples"], metrics["loss"]) == (1, 0.5)
    assert (metrics["accuracy"], metrics["macro_f1"], metrics["worst_language_macro_f1"]) == (score, score, score)
    assert metrics["per_language"] == {"ta": {"accuracy": score, "macro_f1": score, "num_examples": 1}}
    assert metrics["per_label"]["neutral"] == neutral
    # Never seen, never predicted: all zeros in the list of labels, and not part of the macro-F1 of 1.
    assert metrics["per_label"]["negative"] == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0}


@pytest.mark.filterwarnings("error")
def test_a_label_the_language_lacks_counts_only_once_it_is_predicted() -> None:
    # Two of two right: macro-F1 1. With one "neutral" predicted: negative 2*1/(1+1) = 1, positive 2*1/(1+2) = 2/3,
    # neutral 2*0/(1+0) = 0, macro (1 + 2/3 + 0) / 3 = 5/9.
    def macro_f1(predictions: list[int], references: list[int]) -> float:
        rows: dict[str, Any] = {"losses": [0.0] * len(references), "languages": ["te"] * len(references)}
        metrics = classification_metrics(predictions=predictions, references=references, **rows, label_names=LABELS)
        return float(metrics["per_language"]["te"]["macro_f1"])

    assert macro_f1([0, 2], [0, 2]) == 1.0
    assert macro_f1([0, 2, 1], [0, 2, 2]) == pytest.approx(5 / 9)


def test_the_order_of_the_rows_changes_no_bit() -> None:
    rows = random_rows(1000, 3, ["hi", "ta", "te"])
    # 1e16 + 1 is 1e16 in float64: summed from the large end all the ones are lost, from the small end none.
    rows["losses"] = np.array([1e16] + [1.0] * 999)
    reversed_rows = {name: column[::-1] for name, column in rows.items()}
    metrics = classification_metrics(**rows, label_names=LABELS)
    assert metrics == classification_metrics(**reversed_rows, label_names=LABELS)
    assert metrics["loss"] == (1e16 + 999) / 1000


def test_200k_rows_keep_float64_losses() -> None:
    # 1 + 2**-30 needs 31 bits and 200,000 times as much 48: exact in the 53 bits of float64, not in float32's 24.
    rows = random_rows(200_000, 3, ["hi", "ta", "te"])
    rows["losses"] = np.full(200_000, 1 + 2**-30)
    metrics = classification_metrics(**rows, label_names=LABELS)
    assert metrics["num_examples"] == 200_000
    assert metrics["loss"] == 1 + 2**-30


def test_float32_losses_are_summed_in_float64() -> None:
    # 2**24 + 1 is 2**24 in float32. The sum 2**24 + 3 is exact in float64.
    losses = np.array([2.0**24, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=np.float32)
    assert classification_metrics(**ROWS | {"losses": losses}, label_names=LABELS)["loss"] == (2**24 + 3) / 7


def test_a_nan_loss_is_not_hidden() -> None:
    rows = ROWS | {"losses": [float("nan")] + [0.5] * 6}
    assert np.isnan(classification_metrics(**rows, label_names=LABELS)["loss"])


def test_flat_view_for_the_trainer() -> None:
    assert flatten_for_trainer(EXPECTED) == {
        "loss": 4.5 / 7,
        "accuracy": 5 / 7,
        "macro_f1": 32 / 45,
        "worst_language_macro_f1": 2 / 3,
        "macro_f1_hi": 7 / 9,
        "macro_f1_te": 2 / 3,
        "f1_negative": 2 / 3,
        "f1_neutral": 2 / 3,
        "f1_positive": 4 / 5,
    }

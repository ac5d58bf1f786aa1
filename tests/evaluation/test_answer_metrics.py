"""Loss, perplexity and answer-token accuracy of rows that are written out here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from indictune.evaluation.answer_metrics import RowResults, answer_metrics, flatten_answers


def results(*rows: tuple[float, int, int], dtype: type[np.floating] = np.float32) -> RowResults:
    """Of each row: summed loss, tokens that count, tokens predicted rightly."""
    losses, tokens, right = zip(*rows, strict=True)
    return np.array(losses, dtype=dtype), np.array(tokens), np.array(right)


def test_three_rows_by_hand() -> None:
    metrics = answer_metrics(results((2.0, 4, 3), (6.0, 2, 0), (1.0, 3, 3)), ["te", "hi", "te"])
    # Together: (2 + 6 + 1) / 9 nats a token, 6 of 9 tokens right; Telugu: 3 / 7 and 6 of 7; Hindi: 6 / 2 and 0 of 2.
    assert metrics == {
        "num_examples": 3,
        "num_tokens": 9,
        "loss": 1.0,
        "perplexity": pytest.approx(2.718281828),
        "answer_token_accuracy": pytest.approx(0.666666667),
        "per_language": {
            "hi": {
                "num_examples": 1,
                "num_tokens": 2,
                "loss": 3.0,
                "perplexity": pytest.approx(20.085536923),
                "answer_token_accuracy": 0.0,
            },
            "te": {
                "num_examples": 2,
                "num_tokens": 7,
                "loss": pytest.approx(0.428571429),
                "perplexity": pytest.approx(1.535063009),
                "answer_token_accuracy": pytest.approx(0.857142857),
            },
        },
    }
    assert list(metrics["per_language"]) == ["hi", "te"]


def test_a_long_answer_counts_by_its_length() -> None:
    """The mean of the rows' own losses, 1 and 3, would be 2; that of their accuracies 0.5."""
    metrics = answer_metrics(results((90.0, 90, 90), (30.0, 10, 0)), ["hi", "hi"])
    assert metrics["loss"] == 1.2
    assert metrics["answer_token_accuracy"] == 0.9


def test_rows_without_a_token_that_counts_change_nothing_but_their_number() -> None:
    metrics = answer_metrics(results((2.0, 4, 1), (0.0, 0, 0)), ["hi", "ta"])
    assert (metrics["num_examples"], metrics["num_tokens"]) == (2, 4)
    assert (metrics["loss"], metrics["answer_token_accuracy"]) == (0.5, 0.25)
    tamil = metrics["per_language"]["ta"]
    assert (tamil["num_examples"], tamil["num_tokens"]) == (1, 0)
    assert all(math.isnan(tamil[name]) for name in ("loss", "perplexity", "answer_token_accuracy"))


@pytest.mark.filterwarnings("error")
def test_a_hopeless_loss_has_an_infinite_perplexity() -> None:
    assert answer_metrics(results((1000.0, 1, 0)), ["hi"])["perplexity"] == math.inf


def test_sums_are_taken_in_double_precision() -> None:
    """In float32 16,777,216 + 1 is 16,777,216."""
    metrics = answer_metrics(results((16_777_216.0, 1, 0), (1.0, 0, 0)), ["hi", "hi"])
    assert metrics["loss"] == 16_777_217.0


def test_the_trainer_gets_the_numbers_of_all_rows() -> None:
    metrics = answer_metrics(results((2.0, 4, 1), (2.0, 4, 3)), ["hi", "te"])
    assert flatten_answers(metrics) == {
        "loss": 0.5,
        "perplexity": pytest.approx(1.648721271),
        "answer_token_accuracy": 0.5,
    }

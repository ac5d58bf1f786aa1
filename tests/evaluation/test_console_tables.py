"""Tables against literal text, in scripts whose letters are wider or narrower than their number of characters."""

from __future__ import annotations

from typing import Any

from indictune.console_text import display_width
from indictune.evaluation.breakdown import metrics_tables

METRICS: dict[str, Any] = {
    "num_examples": 1_234_567,
    "loss": 0.5,
    "accuracy": 0.81234,
    "macro_f1": 0.79996,
    "worst_language_macro_f1": 0.5,
    "per_language": {
        "hi": {"accuracy": 1.0, "macro_f1": 1.0, "num_examples": 1_234_560},
        "te-latin": {"accuracy": 0.5, "macro_f1": 1 / 3, "num_examples": 7},
    },
    "per_label": {
        "नकारात्मक": {"precision": 0.5, "recall": 1.0, "f1": 2 / 3, "support": 1_234_000},
        "😊": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0},
        "neutral": {"precision": 1.0, "recall": 0.25, "f1": 0.4, "support": 567},
    },
}

PER_LANGUAGE = """\
language   examples  accuracy  macro_f1
---------------------------------------
hi        1,234,560    1.0000    1.0000
te-latin          7    0.5000    0.3333
---------------------------------------
all       1,234,567    0.8123    0.8000"""

# The Hindi word has 9 characters in 8 columns (the virama joins two letters), the emoji 1 character in 2 columns.
PER_LABEL = """\
label     precision  recall      f1    support
----------------------------------------------
नकारात्मक     0.5000  1.0000  0.6667  1,234,000
😊           0.0000  0.0000  0.0000          0
neutral      1.0000  0.2500  0.4000        567"""

ANSWERS: dict[str, Any] = {
    "num_examples": 1_234,
    "num_tokens": 98_765,
    "loss": 1.5,
    "perplexity": 4.481689,
    "answer_token_accuracy": 0.25,
    "per_language": {
        "hi": {
            "num_examples": 1_233,
            "num_tokens": 98_765,
            "loss": 1.5,
            "perplexity": 4.481689,
            "answer_token_accuracy": 0.25,
        },
        "ta": {
            "num_examples": 1,
            "num_tokens": 0,
            "loss": float("nan"),
            "perplexity": float("nan"),
            "answer_token_accuracy": float("nan"),
        },
    },
}

ANSWERS_BY_LANGUAGE = """\
language  examples  num_tokens    loss  perplexity
--------------------------------------------------
hi           1,233      98,765  1.5000      4.4817
ta               1           0     nan         nan
--------------------------------------------------
all          1,234      98,765  1.5000      4.4817"""


def test_languages_with_all_rows_together_at_the_end_and_then_labels() -> None:
    tables = metrics_tables(METRICS, ("accuracy", "macro_f1"))
    assert tables == f"{PER_LANGUAGE}\n\n{PER_LABEL}"
    # Labels in wide and combining scripts are aligned.
    assert {display_width(line) for line in tables.split("\n\n")[1].splitlines()} == {46}


def test_answers_by_language_with_all_rows_together_at_the_end() -> None:
    assert metrics_tables(ANSWERS, ("num_tokens", "loss", "perplexity")) == ANSWERS_BY_LANGUAGE


def test_a_name_wider_than_its_header_widens_the_column() -> None:
    metrics: dict[str, Any] = {"num_examples": 1, "accuracy": 0.5}
    metrics |= {"per_language": {"a-long-language-name": METRICS["per_language"]["hi"]}}
    assert {display_width(line) for line in metrics_tables(metrics, ("accuracy",)).splitlines()} == {41}

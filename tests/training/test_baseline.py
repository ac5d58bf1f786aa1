"""The baseline: which rows it takes, and what it finds in them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from indictune.config.recipe import Recipe
from indictune.data.columns import BETWEEN_TEXTS
from indictune.errors import Problems
from indictune.run import Run
from indictune.tasks.protocol import Origins, Tokens
from indictune.training import scored_rows
from indictune.training.scored_rows import add_baseline, chosen_rows, predicted_by_ngrams

GOOD, BAD = ["बहुत अच्छी फिल्म", "romba nalla padam", "great film"], ["बेकार फिल्म", "mosam padam", "bad film"]


def test_rows_are_taken_until_the_characters_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scored_rows, "MAX_CHARACTERS", 1_000)
    chosen = chosen_rows(["x" * 30] * 500)
    assert chosen.sum() == 34  # the first to pass 1,000 is the last
    assert (chosen == chosen_rows(["x" * 30] * 500)).all()
    assert 50 < np.flatnonzero(chosen).mean() < 450
    assert chosen_rows(["x" * 30] * 5).all()


def test_words_that_decide_are_found_in_every_script() -> None:
    texts, labels = (GOOD + BAD) * 10, np.array([0, 0, 0, 1, 1, 1] * 10)
    assert predicted_by_ngrams(texts, labels, GOOD + BAD).tolist() == [0, 0, 0, 1, 1, 1]


def test_the_baseline_sees_how_similar_two_texts_are() -> None:
    words = ["film", "phone", "khana", "gaadi", "ghar", "paani", "kitab", "dukan"]
    texts = [f"{a}{BETWEEN_TEXTS}{b}" for a in words for b in words for _ in range(2 + 5 * (a == b))]
    labels = [int(text.split(BETWEEN_TEXTS)[0] == text.split(BETWEEN_TEXTS)[1]) for text in texts]
    found = predicted_by_ngrams(texts, np.array(labels), texts)
    assert (found == labels).mean() > 0.95


def made(texts: list[str], labels: list[int]) -> tuple[Dataset, Origins]:
    columns = {"labels": labels, "language": ["hi", "ta", "en"] * (len(texts) // 3)}
    return Dataset.from_dict(columns), Origins(str, texts)


@pytest.mark.parametrize("rows", [6, 120])
def test_a_model_is_compared_on_the_same_split(rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = rows // 6
    train, train_origins = made((GOOD + BAD) * times, [0, 0, 0, 1, 1, 1] * times)
    test, test_origins = made((GOOD + BAD) * 10, [0, 0, 0, 1, 1, 1] * 10)
    origins = {"train": train_origins, "test": test_origins}
    run = Run(Recipe({"output_dir": str(tmp_path)}, Problems()), 0)
    add_baseline(run, Tokens(train, None, test, str, origins=origins), "test", test, np.zeros(60, np.int64))
    if rows < 100:
        assert not list(tmp_path.iterdir())
        return
    found = json.loads((tmp_path / "baseline.json").read_text())
    assert (found["split"], found["train_rows"], found["rows"]) == ("test", 120, 60)
    assert (found["overall"]["first"], found["overall"]["second"]) == pytest.approx((1, 1 / 3))
    assert set(found["by_language"]) == {"hi", "ta", "en"}
    assert "macro_f1 1.0000, the model's 0.3333" in capsys.readouterr().out

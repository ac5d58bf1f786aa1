"""The baseline: which rows it takes, and what it finds in them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset

import indictune
from indictune.cli import main
from indictune.config.plan import AnyPlan
from indictune.config.recipe import Recipe
from indictune.data.columns import BETWEEN_TEXTS
from indictune.errors import Problems
from indictune.evaluation.comparison import compare_classifiers
from indictune.models.ngrams import save_ngrams
from indictune.prediction.labelled_rows import label_texts
from indictune.report.reported_run import read_run
from indictune.run import Run
from indictune.tasks.classification import SingleLabel
from indictune.tasks.protocol import Origins, Tokens
from indictune.training import scored_rows
from indictune.training.scored_rows import Ngrams, add_baseline, chosen_rows, likely_causes
from tests.plans import plan_of

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
    assert Ngrams(texts, labels).log_probabilities(GOOD + BAD, 2).argmax(1).tolist() == [0, 0, 0, 1, 1, 1]


def test_the_baseline_sees_how_similar_two_texts_are() -> None:
    words = ["film", "phone", "khana", "gaadi", "ghar", "paani", "kitab", "dukan"]
    texts = [f"{a}{BETWEEN_TEXTS}{b}" for a in words for b in words for _ in range(2 + 5 * (a == b))]
    labels = [int(text.split(BETWEEN_TEXTS)[0] == text.split(BETWEEN_TEXTS)[1]) for text in texts]
    found = Ngrams(texts, np.array(labels)).log_probabilities(texts, 2).argmax(1)
    assert (found == labels).mean() > 0.95


def made(texts: list[str], labels: list[int]) -> tuple[Dataset, Origins]:
    columns = {"labels": labels, "language": ["hi", "ta", "en"] * (len(texts) // 3), "length": [3] * len(texts)}
    return Dataset.from_dict(columns), Origins(str, texts)


def objective() -> SingleLabel:
    tokenizer = SimpleNamespace(pad_token_id=0, padding_side="right")
    config = SimpleNamespace(model_type="bert", id2label={0: "good", 1: "bad"}, calibration_temperature=2.0)
    return SingleLabel(config, tokenizer)  # type: ignore[arg-type]


def compared(folder: Path, rows: int, predicted: list[int], **plan: object) -> None:
    """Train a baseline on so many rows, in a run whose model has predicted 60 test rows."""
    times = rows // 6
    train, train_origins = made((GOOD + BAD) * times, [0, 0, 0, 1, 1, 1] * times)
    test, test_origins = made((GOOD + BAD) * 10, [0, 0, 0, 1, 1, 1] * 10)
    origins = {"train": train_origins, "test": test_origins}
    run = Run(Recipe({"output_dir": str(folder)}, Problems()), 0)
    run.plan = plan_of(**plan)  # type: ignore[arg-type]
    tokens = Tokens(train, None, test, str, origins=origins)
    add_baseline(run, tokens, "test", test, np.array(predicted), objective(), steps=600)


@pytest.mark.parametrize("rows", [6, 120])
def test_a_model_is_compared_on_the_same_split(rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared(tmp_path, rows, [0] * 60)
    if rows < 100:
        assert not list(tmp_path.iterdir())
        return
    found = json.loads((tmp_path / "baseline.json").read_text())
    assert (found["split"], found["train_rows"], found["rows"]) == ("test", 120, 60)
    assert (found["overall"]["first"], found["overall"]["second"]) == pytest.approx((1, 1 / 3))
    assert set(found["by_language"]) == {"hi", "ta", "en"}
    assert "macro_f1 1.0000, the model's 0.3333" in capsys.readouterr().out


def test_a_baseline_that_wins_is_named_with_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared(tmp_path, 120, [0] * 60)
    said = capsys.readouterr().out
    assert f"Use it: indictune predict {tmp_path / 'baseline'} " in said
    assert "\n- Label good has 60 training rows. Add rows of it to --train_file." in said
    compared(tmp_path, 120, [0, 0, 0, 1, 1, 1] * 10)  # a tie
    said = capsys.readouterr().out
    assert "Use it" not in said
    assert "\n- Label good has 60 training rows. Add rows of it to --train_file." in said


def test_a_saved_baseline_is_a_finished_model(tmp_path: Path) -> None:
    """It gives the regression's probabilities, also to a text without a known n-gram, has a report and no export."""
    compared(tmp_path, 120, [0] * 60)
    texts = [*GOOD, *BAD, "漢字", "<start> <padding> great great"]
    rows = label_texts(tmp_path / "baseline", texts)
    learned = Ngrams((GOOD + BAD) * 20, np.array([0, 0, 0, 1, 1, 1] * 20))
    expected = np.exp(learned.log_probabilities(texts, 2))
    found = [[row["scores"]["good"], row["scores"]["bad"]] for row in rows]
    assert np.allclose(found, expected, atol=1e-5)
    assert [row["label"] for row in rows[:6]] == ["good"] * 3 + ["bad"] * 3
    assert list(tmp_path.rglob("*.bin")) == list(tmp_path.rglob("*.p*kl*")) == []
    assert main(["export", str(tmp_path / "baseline"), "--output_dir", str(tmp_path / "onnx")]) == 2
    reported = read_run(tmp_path / "baseline")
    assert reported.breakdown is not None
    assert reported.breakdown.overall.scores["macro_f1"].value == pytest.approx(1)
    assert reported.breakdown.calibration is not None
    assert reported.breakdown.calibration.temperature is None  # the trained model's is not the baseline's


def test_a_folder_of_others_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (other := tmp_path / "baseline").mkdir()
    (other / "notes.txt").touch()
    compared(tmp_path, 120, [0] * 60)
    assert [each.name for each in other.iterdir()] == ["notes.txt"]
    assert "Use it" not in capsys.readouterr().out


def test_a_saved_baseline_is_read_and_saved_by_transformers(tmp_path: Path) -> None:
    compared(tmp_path, 120, [0] * 60)
    loaded = indictune.load(tmp_path / "baseline")
    loaded.model.save_pretrained(str(tmp_path / "again"))
    loaded.tokenizer.save_pretrained(tmp_path / "again")
    again = indictune.load(tmp_path / "again")
    assert again.tokenizer(GOOD[0])["input_ids"] == loaded.tokenizer(GOOD[0])["input_ids"]


def test_a_label_that_no_learned_row_has_is_never_given(tmp_path: Path) -> None:
    learned = Ngrams(GOOD + BAD, np.array([0, 0, 0, 2, 2, 2]))
    save_ngrams(learned.vectors, learned.regression, ["good", "none", "bad"], tmp_path)
    (row,) = label_texts(tmp_path, GOOD[:1])
    assert row["scores"]["none"] == 0
    assert row["label"] == "good"


def plan(name: str, **training: object) -> AnyPlan:
    return plan_of(training, {"model_name_or_path": name})


@pytest.mark.parametrize(
    ("given", "steps", "counts", "causes"),
    [
        (plan("some/model"), 600, {"a": 100, "b": 200}, ["--model_name_or_path"]),
        (plan("builtin:tiny-indic-bert"), 600, {"a": 100}, ["--model_name_or_path ai4bharat/"]),
        (plan("some/model"), 599, {"a": 100}, ["--min_steps 600"]),
        (plan("some/model", max_steps=599), 599, {"a": 100}, ["--max_steps 600"]),
        (
            plan("some/model"),
            600,
            {"a": 100, "b": 99},
            ["Label b has 99 training rows."],
        ),
        (plan("builtin:x"), 9, {"a": 9}, ["--model_name_or_path", "--min_steps", "--train_file"]),
    ],
)
def test_the_likely_cause_names_the_flag_to_change(
    given: AnyPlan, steps: int, counts: dict[str, int], causes: list[str]
) -> None:
    right = np.array([0, 1] * 20)
    found = likely_causes(given, steps, counts, compare_classifiers(right, right, right, ["hi", "ta"] * 20))
    assert len(found) == len(causes)
    assert [cause for cause, said in zip(causes, found, strict=True) if cause not in said] == []


def test_a_model_that_loses_in_one_language_alone_hears_of_its_share() -> None:
    right, languages = np.array([0, 1] * 100), ["hi", "hi", "ta", "ta"] * 50
    in_tamil = np.array(languages) == "ta"
    found = compare_classifiers(right, right, np.where(in_tamil, 0, right), languages)
    (cause,) = likely_causes(plan("some/model"), 600, {"a": 100}, found)
    assert cause.startswith("It loses in ta alone. --language_sampling_alpha 0.5")
    found = compare_classifiers(right, right, 0 * right, languages)  # in both
    (cause,) = likely_causes(plan("some/model"), 600, {"a": 100}, found)
    assert "alone" not in cause

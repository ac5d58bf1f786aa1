"""Scores for whom: each group of rows against scikit-learn, and what a program reads back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, precision_recall_fscore_support

from indictune.evaluation.breakdown import Breakdown, Group, RowFacts, as_json, break_down, mean_loss, read_breakdowns
from indictune.evaluation.scorers import one_label
from indictune.evaluation.uncertainty import Estimate, calibration_of
from tests.evaluation.drawing import LABELS, drawn


def test_each_group_agrees_with_scikit_learn() -> None:
    references, predictions = drawn(400, 1)
    languages = np.array(["hi", "ta"])[np.arange(400) % 2]
    scripts = np.array(["native", "romanised"])[np.arange(400) // 200]
    facts = RowFacts(languages.tolist(), scripts.tolist(), np.arange(400) % 70 + 1)
    found = break_down("single_label", facts, one_label(references, predictions, LABELS), LABELS, draws=10)
    assert list(found.by["length"]) == ["1-16", "17-32", "33-64", "65-128"]
    for mask, group in (
        (np.full(400, True), found.overall),
        (languages == "ta", found.by["language"]["ta"]),
        (scripts == "romanised", found.by["script"]["romanised"]),
        (facts.lengths <= 16, found.by["length"]["1-16"]),
        (facts.lengths > 64, found.by["length"]["65-128"]),
    ):
        sides = references[mask], predictions[mask]
        macro = precision_recall_fscore_support(*sides, average="macro")
        assert group.num_examples == mask.sum()
        assert [group.scores[f"macro_{name}"].value for name in ("precision", "recall", "f1")] == pytest.approx(
            macro[:3], rel=1e-15
        )
        assert group.scores["accuracy"].value == accuracy_score(*sides)
        assert group.confusion == confusion_matrix(*sides, labels=range(3)).tolist()
        for at, columns in enumerate(zip(*precision_recall_fscore_support(*sides, labels=range(3)), strict=True)):
            label = group.per_label[LABELS[at]]
            assert (label.precision.value, label.recall.value, label.f1.value, label.support) == columns
            assert label.predicted == (sides[1] == at).sum()
    worst = min(
        ("hi", "ta"),
        key=lambda language: f1_score(
            references[languages == language], predictions[languages == language], average="macro"
        ),
    )
    assert found.worst_language == worst


def example(draws: int) -> Breakdown:
    references, predictions = drawn(50, 2)
    sure = np.log(np.full((50, 3), 1 / 3))
    facts = RowFacts(["hi", "ta"] * 25, None, np.ones(50, np.int64))
    calibration = calibration_of(sure, references == predictions, 1.5)
    scorer = one_label(references, predictions, LABELS)
    return break_down("single_label", facts, scorer, LABELS, calibration, loss=0.5, draws=draws)


def test_scores_without_intervals_are_the_same() -> None:
    def without_intervals(group: Group) -> Group:
        def alone(each: Estimate) -> Estimate:
            return Estimate(each.value, 0, 0)

        per_label = {
            label: replace(each, precision=alone(each.precision), recall=alone(each.recall), f1=alone(each.f1))
            for label, each in group.per_label.items()
        }
        return replace(group, scores={name: alone(each) for name, each in group.scores.items()}, per_label=per_label)

    plain, drawn_again = example(0), example(1_000)
    assert math.isnan(plain.overall.scores["macro_f1"].low)
    for what, values in drawn_again.by.items():
        for value, group in values.items():
            assert without_intervals(plain.by[what][value]) == without_intervals(group)
    assert without_intervals(plain.overall) == without_intervals(drawn_again.overall)


def test_a_program_reads_what_was_written(tmp_path: Path) -> None:
    found = example(10)
    content = json.loads(json.dumps(as_json({"test": found})))
    (tmp_path / "evaluation.json").write_text(json.dumps(content), encoding="utf-8")
    assert read_breakdowns(tmp_path) == {"test": found}
    del content["test"]["loss"], content["test"]["overall"]["counts"]  # as older versions wrote it
    (tmp_path / "evaluation.json").write_text(json.dumps(content), encoding="utf-8")
    assert read_breakdowns(tmp_path)["test"].overall == found.overall


def test_losses_are_summed_in_float64_whatever_their_order() -> None:
    # 1e16 + 1 is 1e16 in float64: summed from the large end all the ones are lost, from the small end none.
    losses = np.array([1e16] + [1.0] * 999)
    assert mean_loss(losses) == mean_loss(losses[::-1]) == (1e16 + 999) / 1000
    # 2**24 + 1 is 2**24 in float32.
    assert mean_loss(np.array([2.0**24, 1.0, 1.0, 1.0, 0, 0, 0], np.float32)) == (2**24 + 3) / 7
    assert mean_loss(np.full(200_000, 1 + 2**-30)) == 1 + 2**-30
    assert mean_loss(np.array([1.0, 2.0]), 6) == 0.5
    assert math.isnan(mean_loss(np.array([math.nan, 0.5])))

"""Two classifiers on the same rows, against hand-computed cases and a simulation of chance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import f1_score

from indictune.cli import main
from indictune.evaluation.comparison import compare_classifiers, difference_of, macro_f1_of, mcnemar


def test_mcnemar_by_hand() -> None:
    # Six rows differ, one of them for the first: exact 2 (1 + 6) / 64, and mid-p less 6 / 64.
    first, second = np.array([True] + [False] * 5 + [True] * 4), np.array([False] + [True] * 5 + [True] * 4)
    found = mcnemar(first, second)
    assert (found.only_first, found.only_second) == (1, 5)
    assert (found.exact_p, found.mid_p) == pytest.approx((14 / 64, 8 / 64))
    assert mcnemar(first, first).mid_p == 1
    # One each: exact 1, and mid-p less half of 2 / 4.
    assert mcnemar(np.array([True, False]), np.array([False, True])).mid_p == pytest.approx(0.75)


def of_skill(references: np.ndarray, skill: float, random: np.random.Generator) -> np.ndarray:
    return np.where(random.random(len(references)) < skill, references, random.integers(0, 3, len(references)))


def test_a_difference_agrees_with_scikit_learn() -> None:
    random = np.random.default_rng(0)
    references = random.integers(0, 3, 600)
    first, second = of_skill(references, 0.5, random), of_skill(references, 0.9, random)
    languages = np.array(["hi", "ta"])[np.arange(600) % 2]
    found = compare_classifiers(references, first, second, languages.tolist())
    for row, mask in ((found.overall, languages != ""), (found.by_language["ta"], languages == "ta")):
        scores = [f1_score(references[mask], each[mask], average="macro") for each in (first, second)]
        assert [row.first, row.second] == pytest.approx(scores)
        assert row.difference.value == pytest.approx(scores[1] - scores[0])
        assert row.is_more_than_chance
    assert found.mcnemar.mid_p < 0.001


def test_repeats_are_averaged_within_each_draw() -> None:
    random = np.random.default_rng(0)
    references = random.integers(0, 3, 400)
    first, second = (np.stack([of_skill(references, skill, random) for _ in range(3)]) for skill in (0.6, 0.7))
    found = difference_of(references, first, second, 3)
    scores = [np.mean([f1_score(references, row, average="macro") for row in each]) for each in (first, second)]
    assert [found.first, found.second] == pytest.approx(scores)
    alone = [difference_of(references, a, b, 3).difference for a, b in zip(first, second, strict=True)]
    widths = [each.high - each.low for each in alone]
    assert found.difference.high - found.difference.low < 0.9 * min(widths)  # chance of the seeds is averaged out
    twice = difference_of(references, np.stack([first[0]] * 2), second[:1], 3)
    assert twice == difference_of(references, first[0], second[0], 3)
    whole = macro_f1_of(references, first, 3)
    assert whole.value == pytest.approx(scores[0])
    assert whole.low < whole.value < whole.high


@pytest.mark.more
def test_equal_skill_is_called_better_in_one_of_twenty() -> None:
    """The standard deviation of a share of 200 trials of 0.05 is 0.015."""
    called = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        references = random.integers(0, 3, 300)
        first, second = of_skill(references, 0.6, random), of_skill(references, 0.6, random)
        called += difference_of(references, first, second, 3).is_more_than_chance
    assert 0.01 <= called / 200 <= 0.09


def run_with(folder: Path, rows: Sequence[tuple[str, object, object]], split: str = "test") -> str:
    """The folder of a run with these predictions: id, label and predicted label."""
    folder.mkdir()
    lines = [
        json.dumps({"split": split, "id": name, "language": "hi", "label": label, "predicted": predicted})
        for name, label, predicted in rows
    ]
    (folder / "predictions.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(folder)


def test_the_command_compares_what_runs_have_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(str(number), "ab"[number % 2], "ab"[number % 2]) for number in range(40)]
    good = run_with(tmp_path / "good", rows)
    bad = run_with(tmp_path / "bad", [(name, label, "a") for name, label, _ in rows])
    assert main(["evaluate", "--compare", bad, good, "--json", "true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["overall"]["first"], found["overall"]["second"]) == pytest.approx((1 / 3, 1))
    expected = {"only_first": 0, "only_second": 20, "exact_p": 2 / 2**20, "mid_p": 1 / 2**20}
    assert found["mcnemar"] == pytest.approx(expected)
    assert main(["evaluate", "--compare", good, bad]) == 0
    assert "A is better than B" in capsys.readouterr().out
    assert main(["evaluate", "--compare", good, good]) == 0
    assert "A and B tie" in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with(tmp_path / "run", [("1", "a", "a"), ("2", "b", "a")])
    others = {
        "compare-other-rows": run_with(tmp_path / "other", [("1", "a", "a"), ("3", "b", "a")]),
        "compare-no-common-rows": run_with(tmp_path / "eval", [("1", "a", "a")], "eval"),
        "compare-one-label-a-row": run_with(tmp_path / "several", [("1", ["a"], ["a", "b"])]),
        "compare-needs-predictions": str(tmp_path),
    }
    for code, other in others.items():
        assert main(["evaluate", "--compare", run, other]) == 2
        assert capsys.readouterr().err.endswith(f"[{code}]\n")
    for words, code in (([run], "compare-two-runs"), ([run, run, "--bf16", "true"], "no-effect")):
        assert main(["evaluate", "--compare", *words]) == 2
        assert capsys.readouterr().err.endswith(f"[{code}]\n")

"""The pairs of which a program knows the better answer."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.checkable_pairs import GROUPS, HELD_OUT, KINDS, TRAIN, Row, is_good, language_of, pairs
from benchmarks.preferences import good_answers
from docs import preference_tables

ROOT = Path(__file__).parents[1]


def question(row: Row) -> str:
    return str(row["prompt"][0]["content"])


def test_a_seed_gives_the_same_rows_in_another_process() -> None:
    program = "import json; from benchmarks.checkable_pairs import pairs; print(json.dumps(pairs(0)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == pairs(0) != pairs(1)


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_questions_are_of_other_things(seed: int) -> None:
    rows = pairs(seed)
    assert {split: len(part) for split, part in rows.items()} == {"train": 3 * TRAIN, "validation": 3 * HELD_OUT}
    asked = {split: {question(row) for row in part} for split, part in rows.items()}
    assert {split: len(part) for split, part in asked.items()} == {"train": 3 * TRAIN, "validation": 3 * HELD_OUT}
    together = [{question(row) for row in group} for each in GROUPS for group in each(random.Random(0))]
    assert {5, 1, 12} == set(map(len, together))
    assert [group for group in together if group & asked["train"] and group & asked["validation"]] == []


@pytest.mark.parametrize("seed", [0, 1])
def test_every_chosen_answer_is_good_and_no_rejected_one(seed: int) -> None:
    rows = [row for part in pairs(seed).values() for row in part]
    assert {row["kind"] for row in rows} == set(KINDS)
    assert {row["language"] for row in rows} == {"en", "hi", "es", "fr", "de"}
    assert [row for row in rows if not is_good(row, row["chosen"][0]["content"])] == []
    assert [row for row in rows if is_good(row, row["rejected"][0]["content"])] == []


@pytest.mark.parametrize(
    ("kind", "language", "asked", "good", "bad"),
    [
        ("arithmetic", "en", "What is 7 + 5?", "To add them: 7 + 5 = 12.", "7 + 5 = 12, so the answer is 13."),
        ("language", "hi", "इटली की राजधानी क्या है?", "रोम।", "The capital इटली is Rome."),
        (
            "language",
            "fr",
            "Quel mois vient après mars ?",
            "C'est le mois d'avril.",
            "Quel mois vient après mars ? Le",
        ),
        ("language", "es", "¿Qué mes viene después de marzo?", "Es abril.", "Qué mes viene después de marzo."),
        ("format", "en", "Name two birds, as a JSON list.", '["a", "b"]', '```json\n["a", "b"]\n```'),
        ("format", "en", "Name two birds, joined by plus signs.", "owl + duck", "owl + duck + crow"),
        ("format", "en", 'Name two birds, one a line, each line beginning with "- ".', "- a\n- b", "Here:\n- a\n- b"),
        ("format", "en", "Name two birds, in capital letters, separated by commas.", "OWL, DUCK", "OWL, duck"),
    ],
)
def test_what_a_model_writes_is_judged(kind: str, language: str, asked: str, good: str, bad: str) -> None:
    row = {"kind": kind, "language": language, "prompt": [{"role": "user", "content": asked}]}
    assert is_good(row, good)
    assert not is_good(row, bad)
    others = {each: {"of": 0, "it": 0} for each in KINDS if each != kind}
    one = {"of": 2, "it": 1}
    assert good_answers([row, row], {"it": [good, bad]}) == {"all": one, kind: one, **others}


def test_a_language_needs_more_of_its_small_words_than_any_other() -> None:
    assert language_of("The capital is Rome.") == "en"
    assert language_of("La") is None
    assert language_of("") is None


def test_the_page_has_the_figures_of_the_newest_result_file() -> None:
    page = preference_tables.PAGE.read_text(encoding="utf-8")
    assert page == preference_tables.page_with_tables(), "stale: type `python -m docs.generate`"
    assert page.count("| all | ") == 3

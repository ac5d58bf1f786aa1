"""The programs in the cards of models that give a number, several labels or tags print what the models say."""

from __future__ import annotations

import re
from ast import literal_eval
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from indictune.config.arguments import ModelArguments
from indictune.hub.card import card_of
from indictune.hub.card_facts import card_facts_of
from indictune.models.load import load_tokenizer
from indictune.models.task_models import load_classifier
from indictune.tasks.tokens import TokenClassification, TokenTags
from tests.first_hour.saved_models import LABELS, saved_classifier

pytestmark = pytest.mark.slow

TEXT = "क्या फिल्म थी! 😍"


def printed(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What the program of a folder's card prints."""
    monkeypatch.chdir(folder.parent)
    (program,) = re.findall(
        r"```python\n(.*?)\n```", str(card_of(card_facts_of(folder, None, folder))), flags=re.DOTALL
    )
    assert TEXT in program
    capsys.readouterr()
    exec(program, {})
    return literal_eval(re.sub(r"np\.float32\((.*?)\)", r"\1", capsys.readouterr().out.strip().splitlines()[-1]))


def logits(folder: Path, kind: Any) -> torch.Tensor:
    """Of the text."""
    inputs = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")
    with torch.no_grad():
        found: torch.Tensor = kind.from_pretrained(folder).eval()(**inputs).logits[0]
    return found


def test_a_number_is_the_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved_classifier(tmp_path / "out", "regression")
    (found,) = printed(folder, monkeypatch, capsys)
    assert found["score"] == pytest.approx(logits(folder, AutoModelForSequenceClassification).item(), rel=1e-4)


def test_each_of_several_labels_has_its_probability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved_classifier(tmp_path / "out", "multi_label_classification")
    found = {each["label"]: each["score"] for each in printed(folder, monkeypatch, capsys)}
    wanted = logits(folder, AutoModelForSequenceClassification).sigmoid().tolist()
    assert found == pytest.approx(dict(zip(LABELS, wanted, strict=True)), rel=1e-4)


def test_each_word_that_is_tagged_has_its_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ModelArguments("builtin:tiny-indic-bert")
    tokenizer, tags = load_tokenizer(args), ["B-PER", "I-PER", "O"]
    config = TokenClassification().read_config(args)
    model: Any = load_classifier(args, tags, tokenizer, None, config, TokenTags.kind)
    torch.nn.init.normal_(model.classifier.weight, std=1.0)
    for part in (model, tokenizer):
        part.save_pretrained(str(tmp_path / "out"))
    found = printed(tmp_path / "out", monkeypatch, capsys)
    wanted = logits(tmp_path / "out", AutoModelForTokenClassification).argmax(-1)[1:-1].tolist()
    assert [each["entity"] for each in found] == [tags[tag] for tag in wanted if tags[tag] != "O"]

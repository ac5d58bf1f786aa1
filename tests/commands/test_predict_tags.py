"""`indictune predict` gives each word the tag of its first token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from indictune.api import predict
from tests.commands.random_models import LABELS, random_classifier

TEXT = "Thiruvananthapuram में  बारिश हो_रही thi yesterdayish 😍😍 मुख्यमंत्रियों ने"


def test_a_word_has_the_tag_of_its_first_token(tmp_path: Path) -> None:
    folder = random_classifier(tmp_path / "model", "bert", of_tokens=True)
    model: Any = AutoModelForTokenClassification.from_pretrained(folder).eval()
    words = TEXT.split()
    encoded: Any = AutoTokenizer.from_pretrained(folder)(words, is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        best = [LABELS[each] for each in model(**encoded).logits[0].argmax(-1).tolist()]
    of_words = [[best[at] for at, word in enumerate(encoded.word_ids(0)) if word == n] for n in range(len(words))]
    first, last = ([tags[at] for tags in of_words] for at in (0, -1))
    assert first != last
    assert [row["label"] for row in predict([TEXT, "ok", TEXT], folder)][::2] == [first, first]

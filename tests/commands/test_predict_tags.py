"""`indictune predict` and `indictune serve` give each word the tag of its first token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

from indictune.api import predict
from indictune.cli import main
from tests.commands.random_models import LABELS, random_classifier

URL = "http://127.0.0.1"
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


def test_a_server_answers_as_predict_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = random_classifier(tmp_path / "model", "bert", of_tokens=True)
    found: list[httpx2.Response] = []

    async def answer(app: Any) -> httpx2.Response:
        transport = httpx2.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx2.AsyncClient(transport=transport, base_url=URL) as client:
            return await client.post("/predict", json={"texts": [TEXT, " "]})

    def run_server(app: Any, *_: Any) -> int:
        found.append(asyncio.run(answer(app)))
        return 0

    monkeypatch.setattr("indictune.serving.server.run_server", run_server)
    assert main(["serve", str(folder), "--port", "0"]) == 0
    first, empty = found[0].json()["predictions"]
    assert [first["label"], empty["label"]] == [row["label"] for row in predict([TEXT, " "], folder)]
    assert "scores" not in first

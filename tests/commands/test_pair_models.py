"""A model of pairs of texts, wherever a finished model is used: it needs both texts, and other models refuse two."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline

import indictune
from indictune.cli import main
from indictune.commands.serve import ServeFlags
from indictune.config.shared_arguments import ClassifierArguments
from indictune.data.text.cleaning import clean
from indictune.hub.card import card_of
from indictune.hub.card_facts import card_facts_of
from indictune.prediction.served_classifier import load_served_classifier
from indictune.serving.app import create_app
from tests.commands.random_models import of_pairs, random_classifier
from tests.first_hour.saved_models import saved_classifier
from tests.refusals import refused

PAIRS = [("यह फिल्म अच्छी थी #मस्त", "फिल्म खराब थी"), ("worst movie @ever", "good movie"), ("a b", "a b " * 40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return of_pairs(random_classifier(tmp_path_factory.mktemp("pairs") / "xnli", "bert", layers=1))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_classifier(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def scores(model: Path) -> list[list[float]]:
    """By transformers alone, of each pair."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForSequenceClassification.from_pretrained(model).eval()
    found = []
    for pair in PAIRS:
        batch = tokenizer(*map(clean, pair), truncation=True, max_length=16, return_tensors="pt")
        assert 1 in batch["token_type_ids"]
        with torch.no_grad():
            found.append(plain(**batch).logits[0].softmax(-1).tolist())
    return found


def values(rows: list[dict[str, Any]]) -> list[list[float]]:
    return [list(row["scores"].values()) for row in rows]


def close(found: list[list[float]], expected: list[list[float]]) -> bool:
    return torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-4)


def test_pairs_get_the_scores_of_the_plain_model(model: Path, scores: list[list[float]]) -> None:
    rows = indictune.predict([*PAIRS, ("", "a"), ("a", " ")], model)
    assert close(values(rows[:3]), scores)
    assert [(row["text"], row["text_pair"]) for row in rows[:3]] == PAIRS
    assert [row["label"] for row in rows[3:]] == [None, None]
    assert not close(values(indictune.predict([(b, a) for a, b in PAIRS], model)), scores)  # the order matters
    assert close(values(indictune.predict([["यह फिल्म अच्छी थी मस्त", PAIRS[0][1]]], model)), scores[:1])


def test_the_pipeline_of_transformers_gives_the_same(model: Path, scores: list[list[float]]) -> None:
    classify: Any = pipeline("text-classification", str(model), top_k=None)
    labels = [AutoConfig.from_pretrained(model).id2label[at] for at in range(3)]
    for (text, text_pair), expected in zip(PAIRS, scores, strict=True):
        found = {
            each["label"]: each["score"]
            for each in classify([{"text": text, "text_pair": text_pair}], truncation=True)[0]
        }
        assert [found[label] for label in labels] == pytest.approx(expected, abs=1e-4)


def test_an_api_call_needs_what_the_model_reads(model: Path, single: Path) -> None:
    with refused("pair-incomplete", flag="texts"):
        indictune.predict(["a", "b"], model)
    with refused("pair-not-expected", flag="texts"):
        indictune.predict(PAIRS, single)
    for wrong in ([("a", "b"), "c"], [("a",)], [("a", "b", "c")], [("a", 1)]):
        with refused("wrong-type", flag="texts"):
            indictune.predict(wrong, model)


def spoken(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_pairs_come_by_flags_and_by_lines(
    model: Path, scores: list[list[float]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    firsts, seconds = zip(*PAIRS, strict=True)
    assert main(["predict", str(model), "--text", *firsts, "--text_pair", *seconds]) == 0
    assert close(values(spoken(capsys)), scores)
    lines = "\n\n".join(map("\t".join, PAIRS))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(lines.encode()))))
    assert main(["predict", str(model)]) == 0
    rows = spoken(capsys)
    assert [row["label"] is None for row in rows] == [False, True, False, True, False]
    assert close(values(rows[::2]), scores)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """The code of a refusal, and the whole message."""
    assert main(["predict", *words]) == 2
    message = capsys.readouterr().err
    return str(re.findall(r"\[([\w-]+)\]", message)[-1]), message


def test_a_text_too_few_or_too_many_is_refused(
    model: Path, single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, str(model), "--text", "a")[0] == "pair-incomplete"
    assert said(capsys, str(single), "--text", "a", "--text_pair", "b")[0] == "pair-not-expected"
    assert said(capsys, str(model), "--text", "a", "b", "--text_pair", "b")[0] == "pairs-uneven"
    (tmp_path / "in.csv").write_text("premise,other\na,b\n")
    code, message = said(capsys, str(model), "--input_file", str(tmp_path / "in.csv"))
    assert (code, str(tmp_path / "in.csv") in message, "hypothesis" in message) == ("column-missing", True, True)
    given = ["--input_file", str(tmp_path / "in.csv"), "--text_column", "premise", "--text_pair_column", "other"]
    assert said(capsys, str(single), *given)[0] == "pair-not-expected"
    (tmp_path / "in.txt").write_text("a\tb\na b\n")
    code, message = said(capsys, str(model), "--input_file", str(tmp_path / "in.txt"))
    assert (code, "in.txt:2" in message) == ("line-is-no-pair", True)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"a\tb\tc\n"))))
    assert said(capsys, str(model))[0] == "line-is-no-pair"


def test_a_file_of_pairs_becomes_a_file_of_labels(model: Path, scores: list[list[float]], tmp_path: Path) -> None:
    rows = [("premise", "second", "text_pair"), *((*pair, "kept") for pair in PAIRS)]
    with (tmp_path / "in.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    out = tmp_path / "out.csv"
    flags = ["--text_pair_column", "second", "--keep_columns", "text_pair", "--output_file", str(out)]
    assert main(["predict", str(model), "--input_file", str(tmp_path / "in.csv"), *flags]) == 0
    with out.open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert [(row["text"], row["text_pair"], row["input_text_pair"]) for row in found] == [(*p, "kept") for p in PAIRS]
    names = [name for name in found[0] if name.startswith("score_")]
    assert close([[float(row[name]) for name in names] for row in found], scores)


def test_a_server_labels_pairs(model: Path, single: Path, scores: list[list[float]]) -> None:
    firsts, seconds = (list(each) for each in zip(*PAIRS, strict=True))

    async def asked(folder: Path, *bodies: dict[str, Any]) -> list[httpx2.Response]:
        limits = ServeFlags(model=str(folder), max_characters=200, allowed_hosts=["*"])
        app = create_app(load_served_classifier(ClassifierArguments(str(folder))), "pairs", limits)
        transport = httpx2.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://a") as client,
        ):
            return [await client.post("/predict", json=body) for body in bodies]

    bodies = [{"texts": firsts, "text_pairs": each} for each in (seconds, seconds[:2], ["a" * 201] * 3, None)]
    answer, *refusals = asyncio.run(asked(model, *bodies))
    assert close(values(answer.json()["predictions"]), scores)
    assert [row["text_pair"] for row in answer.json()["predictions"]] == seconds
    found = [(each.status_code, each.json()["code"]) for each in refusals]
    assert found == [(422, "pairs-uneven"), (413, "text-too-long"), (422, "pair-incomplete")]
    (refusal,) = asyncio.run(asked(single, bodies[0]))
    assert (refusal.status_code, refusal.json()["code"]) == (422, "pair-not-expected")


def test_a_merged_folder_without_a_recipe_still_reads_pairs(
    model: Path, scores: list[list[float]], tmp_path: Path
) -> None:
    folder = shutil.copytree(model, tmp_path / "merged")
    (folder / "recipe.yaml").unlink()
    assert close(values(indictune.predict(PAIRS, folder, max_length=16)), scores)
    with refused("pair-incomplete"):
        indictune.predict("a", folder)


def test_the_card_names_both_columns_and_its_program_runs(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(model.parent)
    text = str(card_of(card_facts_of(model, None, model)))
    assert "in column premise, and the second ones in column hypothesis" in text
    (program,) = re.findall(r"```python\n(.*?)\n```", text, flags=re.DOTALL)
    capsys.readouterr()
    exec(program, {})
    assert re.search(r"'label': '(anger|joy|neutral)'", capsys.readouterr().out)


@pytest.mark.more
def test_an_exported_model_reads_pairs(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"premise": a, "hypothesis": b}) for a, b in PAIRS))
    for number, given in ((3, ["--input_file", str(tmp_path / "in.jsonl")]), (999, [])):
        out = tmp_path / f"onnx{number}"
        assert main(["export", str(model), "--output_dir", str(out), *given]) == 0
        record = json.loads((out / "export.json").read_text(encoding="utf-8"))
        assert (record["texts"], record["equal"]) == (number, number)
    columns = [list(each) for each in zip(*PAIRS, strict=True)]
    batch = AutoTokenizer.from_pretrained(out)(*columns, truncation=True, padding=True, return_tensors="np")
    (logits,) = onnxruntime.InferenceSession(out / "model.onnx").run(["logits"], dict(batch))
    expected = values(indictune.predict(PAIRS, model))
    assert close(torch.tensor(logits).softmax(-1).tolist(), expected)
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"```python\n(.*?)\n```", (out / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    capsys.readouterr()
    exec(program, {})
    assert capsys.readouterr().out.strip() in ("anger", "joy", "neutral")

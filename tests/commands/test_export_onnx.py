"""An exported classifier labels as the model does, and needs nothing but its folder."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from indictune.cli import main
from indictune.commands.export import run_export
from indictune.config.arguments import ModelArguments
from indictune.models.builtin import sample_rows
from indictune.models.load import load_tokenizer
from indictune.models.serving_model import serve_as_trained
from tests.commands.random_models import LABELS, random_classifier
from tests.conftest import FinishedRun
from tests.first_hour.saved_models import MAX_LENGTH, saved_classifier
from tests.models.tiny import CONFIGS
from tests.ranks.launching import ROOT
from tests.refusals import refused

TEXTS = [str(row["text"]) for row in sample_rows("test.jsonl")]
ENCODERS = sorted(CONFIGS.keys() - {"llama"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_classifier(tmp_path_factory.mktemp("model") / "run", "bert", layers=1)


@pytest.fixture(scope="module")
def exported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compared on 20 texts, and moved away from the model."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "texts.txt").write_text("\n".join(TEXTS[:20]), encoding="utf-8")
    assert main(["export", str(model), "--input_file", str(folder / "texts.txt")]) == 0
    shutil.move(model / "onnx", folder / "onnx")
    return folder / "onnx"


def logits_of(folder: Path, texts: list[str]) -> np.ndarray:
    """By ONNX Runtime, in one batch."""
    batch = AutoTokenizer.from_pretrained(folder)(texts, truncation=True, padding=True, return_tensors="np")
    (logits,) = onnxruntime.InferenceSession(folder / "model.onnx").run(["logits"], dict(batch))
    return np.array(logits)


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "export.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.more
def test_a_model_whose_scores_are_no_numbers_is_not_exported(tmp_path: Path) -> None:
    broken = random_classifier(tmp_path / "broken", "bert", layers=1)
    weights = load_file(broken / "model.safetensors")
    weights["classifier.bias"][0] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with refused("logits-not-finite", flag="--model"):
        run_export({"": [str(broken)], "output_dir": [str(tmp_path / "out")]})
    assert not (tmp_path / "out").exists()


@pytest.mark.more
def test_any_number_of_rows_and_tokens_gets_the_logits_of_the_model(model: Path, exported: Path) -> None:
    assert (record(exported)["texts"], record(exported)["equal"]) == (20, 20)
    torch_model: Any = AutoModelForSequenceClassification.from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    for texts in (TEXTS[:1], TEXTS[1:6], ["ok"], [" ".join(TEXTS[:60])]):
        batch = tokenizer(texts, truncation=True, padding=True, return_tensors="pt")
        with torch.inference_mode():
            expected = torch_model(**batch).logits.numpy()
        np.testing.assert_allclose(logits_of(exported, texts), expected, atol=2e-4)


@pytest.mark.parametrize("int8", ["false", pytest.param("true", marks=pytest.mark.more)])
def test_no_file_names_a_path_of_this_machine(model: Path, tmp_path: Path, int8: str) -> None:
    out, texts = tmp_path / "out", tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS[:3]), encoding="utf-8")
    assert main(["export", str(model), "--input_file", str(texts), "--int8", int8, "--output_dir", str(out)]) == 0
    content = b"".join(path.read_bytes() for path in out.iterdir())
    paths = (
        str(ROOT),
        sys.prefix,
        str(Path(torch.__file__).parents[1]),
        str(tmp_path),
        str(model.parent),
    )
    assert [path for path in paths if path.encode() in content] == []
    assert re.findall(rb"[\w/.-]+\.py\b", (out / "model.onnx").read_bytes()) == []


@pytest.mark.more
def test_the_program_of_the_card_runs(
    exported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(exported.parent)
    card = ModelCard.load(exported / "README.md")
    assert card.data["library_name"] == "onnx"
    assert "the same labels to 20 of 20 texts" in card.text
    (program,) = re.findall(r"```python\n(.*?)\n```", card.text, flags=re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out.strip() in LABELS


@pytest.mark.slow
@pytest.mark.parametrize("int8", ["false", "true"])
def test_the_labels_of_1000_texts_are_those_of_a_finished_run(
    int8: str, finished_run: FinishedRun, tmp_path: Path
) -> None:
    words = ["export", str(finished_run.folder), "--output_dir", str(tmp_path / "out"), "--int8", int8]
    assert main(words) == 0
    found = record(tmp_path / "out")
    assert found["texts"] == 1000
    assert found["equal"] == 1000 if int8 == "false" else found["equal"] > 980
    scores = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert ("with weights in 8 bit" in scores) == (int8 == "true")
    assert "model-index" in scores


@pytest.mark.slow
@pytest.mark.parametrize("of_tokens", [False, True], ids=["texts", "tokens"])
@pytest.mark.parametrize("architecture", ENCODERS)
def test_every_architecture_is_exported(architecture: str, of_tokens: bool, tmp_path: Path) -> None:
    folder = random_classifier(tmp_path / "model", architecture, of_tokens)
    for int8 in ("false", "true"):
        out = tmp_path / int8
        assert main(["export", str(folder), "--output_dir", str(out), "--int8", int8]) == 0
        assert record(out)["texts"] == 1000
        if int8 == "false":  # random weights leave int8 no margin
            assert record(out)["equal"] == 1000
        assert len(set(logits_of(out, TEXTS).argmax(-1).flatten())) > 1
    sizes = [(tmp_path / int8 / "model.onnx").stat().st_size for int8 in ("false", "true")]
    assert sizes[1] < 0.5 * sizes[0]


@pytest.mark.slow
@pytest.mark.parametrize("problem_type", ["multi_label_classification", "regression"])
def test_several_labels_and_numbers_are_exported(problem_type: str, tmp_path: Path) -> None:
    folder = saved_classifier(tmp_path / "model", problem_type)
    assert main(["export", str(folder)]) == 0
    found = record(folder / "onnx")
    assert (found["texts"], found["equal"]) == (1000, 1000)


@pytest.mark.slow
def test_an_adapter_is_merged_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved_classifier(tmp_path / "adapter", method="lora")
    config = AutoConfig.from_pretrained(folder / "config.json")
    serve_as_trained(folder, load_tokenizer(ModelArguments()), config, MAX_LENGTH)
    before = sorted(path.name for path in folder.iterdir())
    assert main(["export", str(folder), "--output_dir", str(tmp_path / "out")]) == 0
    assert main(["predict", str(folder), "--text", *TEXTS[:40]]) == 0
    labels = [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(set(labels)) > 1
    assert [config.id2label[each] for each in logits_of(tmp_path / "out", TEXTS[:40]).argmax(1)] == labels
    assert sorted(path.name for path in folder.iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "out"]

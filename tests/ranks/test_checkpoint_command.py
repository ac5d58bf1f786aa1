"""A checkpoint in parts becomes the model that the run had at that step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from indictune.checkpoint import store
from indictune.cli import main
from indictune.models import builtin
from indictune.models.active_vocabulary import ROW_IDS
from indictune.models.task_models import TEMPERATURE
from tests.ranks.launching import EMBEDDING, Run

Start = Callable[..., Run]

TWO_STEPS = ("--max_steps", "2", "--learning_rate", "1e-3")


def converted(run: Run, step: int, folder: Path) -> dict[str, torch.Tensor]:
    assert main(["checkpoint", str(run.folder / f"checkpoint-{step}"), "--convert_to", str(folder)]) == 0
    return load_file(next(folder.glob("*model.safetensors")))


def content(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.more
@pytest.mark.parametrize(
    "strategy", ["fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero1", "zero2", "zero3"))]
)
def test_the_weights_are_those_of_the_step(run_under: Start, tmp_path: Path, strategy: str) -> None:
    run = run_under(strategy, 2, *TWO_STEPS, "--active_vocabulary", "on")
    assert (run.folder / "checkpoint-2" / ROW_IDS).is_file()
    first, last = converted(run, 1, tmp_path / "first"), converted(run, 2, tmp_path / "last")
    for found, expected in ((last, run.weights), (first, run.weights_at(1))):
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert not torch.equal(first["classifier.weight"], last["classifier.weight"])
    own = content(run.folder / "config.json")
    own.pop(TEMPERATURE, None)  # fitted when the run had ended
    assert content(tmp_path / "last" / "config.json") == own
    _, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "last", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "last", run.folder)]
    assert tokenizers[0]("नमस्ते ok") == tokenizers[1]("नमस्ते ok")


@pytest.mark.more
def test_parts_that_others_could_have_written_are_not_read(
    run_under: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_under("fsdp2", 2, *TWO_STEPS, "--active_vocabulary", "on")
    copied = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(run.folder / "checkpoint-2", copied)
    command = ["checkpoint", str(copied), "--convert_to", str(tmp_path / "model")]

    assert main(command) == 2
    assert f"{copied}: it is not in a run's --output_dir" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()

    shutil.copy(run.folder / "recipe.yaml", copied.parent)
    metadata = copied / "pytorch_model_fsdp_0" / ".metadata"
    metadata.chmod(0o666)
    assert main(command) == 2
    assert f"indictune checkpoint {copied}: {metadata} can be written by other users" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
    assert main([*command, "--trust_checkpoint", "true"]) == 0
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.more
def test_parts_without_a_recipe_are_not_put_together(
    run_under: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_under("fsdp2", 2, *TWO_STEPS, "--active_vocabulary", "on")
    copied = shutil.copytree(run.folder / "checkpoint-2", tmp_path / "run" / "checkpoint-2")
    (copied / "recipe.yaml").unlink()
    manifest = store.read_manifest(copied)
    assert manifest is not None
    files = {name: digest for name, digest in manifest.files.items() if name != "recipe.yaml"}
    (copied / store.MANIFEST).write_text(replace(manifest, files=files).to_json(), encoding="utf-8")
    command = ["checkpoint", str(copied), "--convert_to", str(tmp_path / "model"), "--trust_checkpoint", "true"]
    assert main(command) == 2
    assert "[embedding-without-recipe]" in capsys.readouterr().err


@pytest.mark.more
def test_parts_are_not_put_together_with_rows_of_another_model(
    run_under: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a folder that was written over since the training."""
    run = run_under("fsdp2", 2, *TWO_STEPS, "--active_vocabulary", "on")
    copied = shutil.copytree(run.folder / "checkpoint-2", tmp_path / "run" / "checkpoint-2")
    base = shutil.copytree(builtin.resolve("builtin:tiny-indic-bert"), tmp_path / "base")
    recipe = copied / "recipe.yaml"
    recipe.write_text(f"model_name_or_path: {base}\nmodel_revision: main\n", encoding="utf-8")
    manifest = store.read_manifest(copied)
    assert manifest is not None
    files = {**manifest.files, "recipe.yaml": store.file_digest(recipe)}
    (copied / store.MANIFEST).write_text(replace(manifest, files=files).to_json(), encoding="utf-8")
    command = ["checkpoint", str(copied), "--trust_checkpoint", "true", "--convert_to"]
    assert main([*command, str(tmp_path / "model")]) == 0

    weights = load_file(base / "model.safetensors")
    embedding = weights[EMBEDDING.removeprefix("bert.")]
    is_unused = torch.ones(len(embedding), dtype=torch.bool)
    is_unused[run.row_ids_at(2)] = False
    embedding[is_unused.nonzero()[-1]] *= -1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    assert main([*command, str(tmp_path / "other")]) == 2
    assert "[embedding-of-another-model]" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_an_adapter_in_parts_becomes_that_of_the_run(run_under: Start, tmp_path: Path, strategy: str) -> None:
    run = run_under(strategy, 2, *TWO_STEPS, "--method", "lora")
    found, expected = converted(run, 2, tmp_path / "adapter"), load_file(run.folder / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    for name in ("adapter_config.json", "base_model.json", "config.json"):
        assert content(tmp_path / "adapter" / name) == content(run.folder / name)


@pytest.mark.slow
def test_what_was_trained_in_bf16_keeps_its_weights_of_fp32(run_under: Start, tmp_path: Path) -> None:
    """DeepSpeed saves a model in bf16, and the weights that it trains separately."""
    run = run_under("zero3", 2, *TWO_STEPS, "--bf16", "true")
    found, rounded = converted(run, 2, tmp_path / "model"), run.weights
    assert {weight.dtype for weight in found.values()} == {torch.float32}
    assert {weight.dtype for weight in rounded.values()} == {torch.bfloat16}
    for name, weight in found.items():
        assert torch.equal(weight.bfloat16(), rounded[name])

"""Models whose configuration means a class of their own code, such as IndicBERT v3."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from indictune.config.arguments import ModelArguments
from indictune.models.load import load_config, load_tokenizer, load_trained, read_config
from indictune.models.own_code import runs_own_code
from indictune.models.task_models import load_causal_config, load_classifier, load_classifier_config
from tests.hub_layouts.decoders import gemma_3, indicbert_v3
from tests.hub_layouts.shelf import write_files
from tests.refusals import refused

KINDS = [AutoModelForSequenceClassification, AutoModelForTokenClassification]
TEXT = "यह film बहुत अच्छी"


@pytest.fixture
def v3(tmp_path: Path) -> Path:
    return write_files(tmp_path / "v3", indicbert_v3())


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return found


def test_its_class_of_transformers_is_not_taken_for_it(v3: Path) -> None:
    with refused("model-means-its-code", "Gemma3BiForMNTP", flag="--model_name_or_path"):
        load_classifier_config(ModelArguments(str(v3)))
    with refused("no-model-for-task", flag="--model_name_or_path"):
        load_causal_config(ModelArguments(str(v3), trust_remote_code=True))


def with_settings(folder: Path, **settings: Any) -> ModelArguments:
    path = folder / "config.json"
    kept = {name: value for name, value in json.loads(path.read_text()).items() if name != "auto_map"}
    path.write_text(json.dumps(kept | settings))
    return ModelArguments(str(folder))


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"architectures": ["Gemma3ForCausalLM"], "auto_map": {"AutoModel": "a.GemmaBi"}}, "model-means-its-code"),
        ({"architectures": ["Gemma3TextModel"], "auto_map": {"AutoModel": "a.GemmaBi"}}, "model-means-its-code"),
        ({"architectures": ["GemmaBi"]}, "model-class-unknown"),
    ],
)
def test_a_class_that_transformers_does_not_have_is_never_left_out(
    v3: Path, settings: dict[str, Any], code: str
) -> None:
    with refused(code, flag="--model_name_or_path"):
        load_classifier_config(with_settings(v3, **settings))


def test_code_of_a_class_that_transformers_has_is_not_needed_and_its_name_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_files(tmp_path / "gemma", gemma_3())
    config = load_causal_config(with_settings(folder, auto_map={"AutoModelForCausalLM": "a.Gemma3ForCausalLM"}))
    assert type(config).__name__ == "Gemma3TextConfig"
    assert "own code is not used" in caplog.text
    assert load_causal_config(with_settings(folder, architectures=["FlaxGemma3ForCausalLM"])) is not None


@pytest.mark.more
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_ours_on_its_code_sees_later_words_and_is_saved_with_the_code(
    v3: Path, tmp_path: Path, kind: type[Any]
) -> None:
    args = ModelArguments(str(v3), trust_remote_code=True)
    tokenizer = load_tokenizer(args)
    torch.manual_seed(0)
    config = load_config(args, kind, kind._model_mapping, "classifier")
    model: Any = load_classifier(args, ["a", "b"], tokenizer, None, config, kind)
    assert runs_own_code(model)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    changed = ids.clone()
    changed[0, -2] += 1
    first, second = (model.model(input_ids=each).last_hidden_state[0, 0] for each in (ids, changed))
    assert not torch.allclose(first, second, atol=1e-3)
    expected = logits(model, ids)
    model.save_pretrained(tmp_path / "out")
    again = load_trained(tmp_path / "out", trust_remote_code=True, kind=kind)
    assert torch.equal(logits(again, ids), expected)
    again.save_pretrained(str(tmp_path / "again"))  # as a run that goes on from it
    with refused("model-means-its-code", flag="--model"):
        load_trained(tmp_path / "again", kind=kind)
    program = f"""
import torch
from transformers import {kind.__name__} as Kind
ids = torch.tensor({ids.tolist()})
model = Kind.from_pretrained({str(tmp_path / "again")!r}, trust_remote_code=True).eval()
torch.save(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.detach(), {str(tmp_path / "logits")!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)  # transformers alone
    assert torch.equal(torch.load(tmp_path / "logits"), expected)


def test_an_adapter_on_its_code_brings_the_code(v3: Path, tmp_path: Path) -> None:
    from indictune.models.adapters import save_adapter_extras

    args = ModelArguments(str(v3), trust_remote_code=True, method="lora", lora_r=2)
    tokenizer = load_tokenizer(args)
    model: Any = load_classifier(args, ["a", "b"], tokenizer)
    for weight in (each for each in model.parameters() if each.requires_grad):
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(str(tmp_path / "out"))
    save_adapter_extras(model, tmp_path / "out")
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    again = load_trained(tmp_path / "out", trust_remote_code=True)
    assert torch.equal(logits(again, ids), logits(model, ids))
    assert runs_own_code(again)


def test_the_configuration_of_any_other_model_stays_as_it_is(tmp_path: Path) -> None:
    config = read_config(ModelArguments("builtin:tiny-indic-bert"))
    assert type(config).__module__.startswith("transformers.")

"""Packed weights give the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AlbertConfig
from transformers.activations import ACT2FN

from indictune.models.serving_model import TYPES, can_pack, pack_weights
from indictune.models.unpadded import CLASSIFIERS, classify_unpadded
from tests.models.test_unpadded import batches, classifier

pytestmark = pytest.mark.skipif(not can_pack(torch.nn.Linear(2, 2)), reason="torch was built without oneDNN")


@pytest.mark.parametrize("model_type", CLASSIFIERS)
def test_logits_are_those_of_the_padded_model(model_type: str) -> None:
    model = classifier(model_type)
    padded, joined = batches(model)
    expected = model(**padded).logits
    classify_unpadded(model, trains=False)
    assert can_pack(model)
    pack_weights(model)
    assert not any(isinstance(module, torch.nn.Linear) for module in model.modules())
    with torch.inference_mode():
        torch.testing.assert_close(model(**joined).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("model_type", TYPES)
def test_every_activation_stays(model_type: str, activation: str) -> None:
    model = classifier(model_type)
    for layer in model.base_model.encoder.layer:
        layer.intermediate.intermediate_act_fn = ACT2FN[activation]
    model.config.hidden_act = activation
    _, joined = batches(model)
    classify_unpadded(model, trains=False)
    with torch.inference_mode():
        expected = model(**joined).logits
        pack_weights(model)
        torch.testing.assert_close(model(**joined).logits, expected, rtol=0, atol=1e-5)


def test_half_precision_is_not_packed() -> None:
    assert not can_pack(torch.nn.Linear(2, 2).bfloat16())


def test_memory_does_not_grow_with_the_numbers_of_tokens() -> None:
    """oneDNN keeps code for each number of rows that it sees."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 64))
    model.config = AlbertConfig()
    pack_weights(model)
    states = torch.zeros(1, 1_000, 64)
    with torch.inference_mode():
        model(states)
        before = resident_bytes()
        for tokens in range(1_000, 200, -1):
            assert model(states[:, :tokens]).shape == (1, tokens, 64)
    assert resident_bytes() - before < 20_000_000


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))

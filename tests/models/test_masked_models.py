"""A masked language model computes the logits of masked tokens alone, of joined rows as of padded ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, DistilBertConfig

from indictune.data.collation import JoinRows, PadToLongest, Row
from indictune.data.documents import PLACES, Masking, MaskWords
from indictune.models.unpadded import MASKED, choose_masked, uncounted_token
from indictune.tasks.loss import ExactLoss
from tests.models.tiny import CONFIGS, SMALL


def model_of(model_type: str) -> Any:
    config = CONFIGS[model_type]()
    config.pad_token_id = config.pad_token_id or 0
    config.initializer_range = 0.1  # enough for attention to matter
    torch.manual_seed(0)
    return AutoModelForMaskedLM.from_config(config).eval()  # type: ignore[no-untyped-call]


def rows() -> list[Row]:
    """Packed rows: two documents in the first, three in the second."""
    random = np.random.default_rng(0)
    made = []
    for number, lengths in enumerate(((20, 9), (5, 30, 3))):
        words = np.concatenate([[-100, *range(length - 2), -100] for length in lengths])
        ids = random.integers(5, 120, sum(lengths))
        made.append({"input_ids": ids, "labels": words, "seq_lengths": np.array(lengths), "row": number, "epoch": 0})
    return made


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    named = zip((name for name, _ in model.named_parameters()), found, strict=True)
    return {name: each for name, each in named if each is not None}


@pytest.mark.parametrize("model_type", MASKED)
def test_loss_and_gradients_of_packed_rows_are_those_of_padded_documents(model_type: str) -> None:
    model = model_of(model_type)
    mask = MaskWords(JoinRows(uncounted_token(model.config)), Masking(0.4, 4, np.arange(5, 120)), 1)
    joined = mask(rows())
    whole = torch.full_like(joined["input_ids"], -100).flatten()
    whole[joined[PLACES]] = joined["labels"][0]
    ends = joined["cu_seq_lens_q"][1:-1].tolist()
    sides = (np.split(each.numpy(), ends) for each in (joined["input_ids"][0], whole))
    documents = [{"input_ids": ids, "labels": labels} for ids, labels in zip(*sides, strict=True)]
    padded = PadToLongest(model.config.pad_token_id, "right")(documents)
    labels = padded.pop("labels")
    count = (labels >= 0).sum()
    expected = ExactLoss()(model(**padded), labels, count)
    expected_gradients = gradients(model, expected)
    choose_masked(model, joins=True)
    labels = joined.pop("labels")
    outputs = model(**joined)
    assert outputs.logits.shape == (1, int(count), 128)
    loss = ExactLoss()(outputs, labels, count)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    found = gradients(model, loss)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
    assert model(**padded).logits.shape == (*padded["input_ids"].shape, 128)  # as before, without places


def test_a_padded_model_of_another_type_computes_masked_tokens_alone_too() -> None:
    torch.manual_seed(0)
    sizes = {"dim": SMALL["hidden_size"], "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    config = DistilBertConfig(vocab_size=128, **sizes)
    model: Any = AutoModelForMaskedLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    ids, places = torch.randint(5, 120, (2, 7)), torch.tensor([1, 9, 13])
    expected = model(input_ids=ids).logits.flatten(0, 1)[places]
    choose_masked(model, joins=False)
    torch.testing.assert_close(model(input_ids=ids, masked_places=places).logits[0], expected)

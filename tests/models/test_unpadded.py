"""Rows end to end give what padded rows give: logits, gradients, and no row sees another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from indictune.config.arguments import ModelArguments
from indictune.data.collation import JoinRows, PadToLongest, Row
from indictune.models import serving_model, unpadded
from indictune.models.attention import ATTENTION
from indictune.models.unpadded import (
    CAUSAL,
    CLASSIFIERS,
    SEE_PADDING,
    classify_unpadded,
    padding_notes,
    pads,
    pads_causal,
    read_unpadded,
    uncounted_token,
)
from tests.models.tiny import CONFIGS, DECODERS, SMALL
from tests.refusals import refused

# ModernBERT's window is 16 tokens here: some rows are longer, some shorter.
LENGTHS = (41, 30, 30, 12, 12, 12, 3)


def rows_of(lengths: Sequence[int], pad_token_id: int) -> list[Row]:
    """Random rows; the padding token stands in the middle of the second one and at the end of the third."""
    random = np.random.default_rng(0)
    rows: list[Row] = [
        {"input_ids": random.integers(5, 120, length), "labels": 0, "seq_lengths": np.array([length]), "row": index}
        for index, length in enumerate(lengths)
    ]
    rows[1]["input_ids"][2] = rows[2]["input_ids"][-1] = pad_token_id
    return rows


def classifier(model_type: str, lora: bool = False) -> Any:
    config = (CONFIGS | DECODERS)[model_type.partition("-both")[0].removesuffix("-mean")]()
    if model_type.endswith("-both"):  # in both directions, as EmbeddingGemma
        config.use_bidirectional_attention = True
    if model_type.endswith("-mean"):  # as published
        config.classifier_pooling = "mean"
    config.num_labels = 3
    config.pad_token_id = config.pad_token_id or 0
    config.initializer_range = 0.1  # enough for attention to matter
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    if lora:
        model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules="all-linear"))
    return model.eval()


def batches(model: Any, lengths: Sequence[int] = LENGTHS) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same rows padded, and joined."""
    rows = rows_of(lengths, model.config.pad_token_id)
    padded = PadToLongest(model.config.pad_token_id, "right")(rows)
    joined = JoinRows(uncounted_token(model.config))(rows)
    del padded["labels"], joined["labels"]
    return padded, joined


def gradients(model: Any, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    wanted = (logits.square().sum(-1) * torch.arange(1.0, len(logits) + 1, device=logits.device)).sum()
    found = torch.autograd.grad(wanted, list(trained.values()), allow_unused=True)
    return {name: each for name, each in zip(trained, found, strict=True) if each is not None}


@pytest.mark.parametrize("model_type", CLASSIFIERS)
def test_a_head_computes_in_half_precision_as_with_padding(model_type: str) -> None:
    """accelerate (1.15) wraps the model's `forward`, whose hooks come after it."""
    model = classifier(model_type)
    padded, joined = batches(model)
    head = next(module for name, module in model.named_modules() if name in ("score", "classifier"))
    found: list[bool] = []
    head.register_forward_hook(lambda *_: found.append(torch.is_autocast_enabled("cpu")))
    forward = model.forward
    model.forward = lambda **inputs: torch.autocast("cpu", torch.bfloat16)(forward)(**inputs)
    expected = model(**padded).logits
    classify_unpadded(model)
    logits = model(**joined).logits
    assert set(found) == {True}
    torch.testing.assert_close(logits, expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("model_type", [*CLASSIFIERS, "modernbert-mean", "gemma3_text-both"])
class TestClassifiers:
    def test_logits_and_gradients_are_those_of_the_padded_model(self, model_type: str, lora: bool) -> None:
        model = classifier(model_type, lora)
        padded, joined = batches(model)
        expected = model(**padded).logits
        expected_gradients = gradients(model, expected)
        classify_unpadded(model)
        logits = model(**joined).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        assert (expected - expected.roll(1, 0)).abs().max() > 1e-2  # rows differ, so that a mix-up would show
        found = gradients(model, logits)
        assert found.keys() == expected_gradients.keys()
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4, msg=name)

    def test_padded_batches_are_read_as_before(self, model_type: str, lora: bool) -> None:
        model = classifier(model_type, lora)
        padded, joined = batches(model)
        expected = model(**padded).logits
        classify_unpadded(model)
        model(**joined)
        torch.testing.assert_close(model(**padded).logits, expected, rtol=0, atol=1e-5)

    def test_labelling_gives_the_logits_of_the_padded_model(self, model_type: str, lora: bool) -> None:
        model = classifier(model_type, lora)
        padded, joined = batches(model)
        expected = model(**padded).logits
        classify_unpadded(model, trains=False)
        with torch.inference_mode():
            torch.testing.assert_close(model(**joined).logits, expected, rtol=0, atol=1e-5)
            with torch.autocast("cpu", torch.bfloat16):
                torch.testing.assert_close(model(**joined).logits.float(), expected, rtol=0.1, atol=0.1)

    @pytest.mark.more
    def test_activation_checkpointing_changes_nothing(self, model_type: str, lora: bool) -> None:
        model = classifier(model_type, lora)
        if not model.supports_gradient_checkpointing:
            pytest.skip(f"transformers cannot compute the activations of {model_type} again")
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        _, joined = batches(model)
        classify_unpadded(model)
        expected = gradients(model, model(**joined).logits)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        found = gradients(model, model(**joined).logits)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("model_type", serving_model.TYPES)
def test_the_last_layer_labels_by_first_tokens_alone(model_type: str) -> None:
    model = classifier(model_type)
    _, joined = batches(model)
    computed: dict[str, int] = {}
    for name, module in model.base_model.encoder.layer[-1].named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, __, output, name=name: computed.update({name: len(output)}))
    classify_unpadded(model, trains=False)
    model(**joined)
    rows, tokens = len(LENGTHS), sum(LENGTHS)
    of_layer = {name: computed[f"attention.self.{name}"] for name in ("query", "key", "value")}
    assert of_layer == {"query": rows, "key": tokens, "value": tokens}
    assert computed["intermediate.dense"] == computed["output.dense"] == computed["attention.output.dense"] == rows


def causal(model_type: str) -> Any:
    sizes = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 32, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **sizes)
    if model_type in ("gemma3_text", "mistral"):
        config.sliding_window = 8
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model.eval()


def joined_documents() -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Documents, each [1, tokens], and the same joined, in no order of length."""
    rows = rows_of((5, 20, 5, 5, 13), 0)
    joined = JoinRows()(rows)
    del joined["labels"]
    return [torch.tensor(row["input_ids"])[None] for row in rows], joined


@pytest.mark.parametrize("model_type", CAUSAL)
def test_a_causal_model_reads_documents_as_if_alone(model_type: str) -> None:
    model = causal(model_type)
    documents, joined = joined_documents()
    with torch.no_grad():
        alone = torch.cat([model(input_ids=each, use_cache=False).logits for each in documents], 1)
        read_unpadded(model)
        assert model.config._attn_implementation == ATTENTION
        together = model(**joined, use_cache=False).logits
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", CAUSAL)
def test_a_causal_model_reads_padded_rows_as_before(model_type: str) -> None:
    model = causal(model_type)
    padded = PadToLongest(0, "right")(rows_of((5, 20, 13), 0))
    del padded["labels"]
    with torch.no_grad():
        expected = model(**padded, use_cache=False).logits[padded["attention_mask"] == 1]
        read_unpadded(model)
        found = model(**padded, use_cache=False).logits[padded["attention_mask"] == 1]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_last_token_of_a_row_is_the_last_that_is_not_padding() -> None:
    ids, boundaries = torch.tensor([5, 6, 0, 7, 0, 0, 0, 8]), torch.tensor([0, 3, 5, 7, 8], dtype=torch.int32)
    assert unpadded._last_tokens(ids, boundaries, pad_token_id=0).tolist() == [1, 3, 5, 7]
    assert unpadded._last_tokens(ids, boundaries, pad_token_id=None).tolist() == [2, 4, 6, 7]


def test_rows_that_are_not_sorted_give_the_same_logits_in_their_order() -> None:
    model = classifier("bert")
    padded, joined = batches(model, (7, 12, 7, 7, 40))
    expected = model(**padded).logits
    classify_unpadded(model)
    torch.testing.assert_close(model(**joined).logits, expected, rtol=0, atol=1e-5)


OWN_CODE = ModelArguments(trust_remote_code=True)


def with_own_code(kind: str) -> PreTrainedConfig:
    config = CONFIGS[kind]()
    config.auto_map = {"AutoModelForSequenceClassification": "modeling.Own", "AutoModelForCausalLM": "modeling.Own"}
    return config


class TestWhoPads:
    def test_models_that_are_proven_do_not(self) -> None:
        assert not pads("auto", ModelArguments(), CONFIGS["bert"]())
        assert not pads("on", ModelArguments(), CONFIGS["bert"]())

    def test_whoever_asks_for_padding_gets_it(self) -> None:
        assert pads("off", ModelArguments(), CONFIGS["bert"]())

    def test_transformers_own_attention_may_be_named(self, caplog: pytest.LogCaptureFixture) -> None:
        assert not pads("auto", ModelArguments(attn_implementation="sdpa"), CONFIGS["bert"]())
        assert not caplog.records

    @pytest.mark.parametrize("model_type", [*SEE_PADDING, "bert"])
    def test_models_that_read_padding_are_reported(self, model_type: str) -> None:
        """When transformers hides it from one of them, the note can go."""
        small = {**SMALL, "embedding_size": 32, "max_position_embeddings": 64}
        config = AutoConfig.for_model(model_type, initializer_range=0.3, **small)
        torch.manual_seed(0)
        model: Any = AutoModelForSequenceClassification.from_config(config).eval()  # type: ignore[no-untyped-call]
        row, length = torch.randint(5, 120, (1, 12)), 4
        row[:, length:] = config.pad_token_id
        mask = (torch.arange(12) < length).long()[None]
        with torch.no_grad():
            alone = model(input_ids=row[:, :length]).logits
            given = {} if model_type == "fnet" else {"attention_mask": mask}
            padded = model(input_ids=row, **given).logits
        assert bool((alone - padded).abs().max() > 1e-4) is (model_type != "bert")
        assert bool(padding_notes(config, trains=True)) is (model_type != "bert")

    def test_other_models_pad_and_the_reason_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        assert pads("auto", ModelArguments(), AutoConfig.for_model("electra"))
        assert pads("auto", ModelArguments(attn_implementation="eager"), CONFIGS["bert"]())
        assert pads("auto", OWN_CODE, with_own_code("bert"))
        assert pads("auto", ModelArguments(device_map="auto"), CONFIGS["bert"]())
        messages = [record.getMessage() for record in caplog.records]
        for message, reason in zip(messages, ("electra", "eager", "its own code", "--device_map auto"), strict=True):
            assert reason in message

    def test_asking_for_the_impossible_is_refused(self) -> None:
        with refused("padding-needed", "--attn_implementation eager", flag="--padding_free"):
            pads("on", ModelArguments(attn_implementation="eager"), CONFIGS["bert"]())

    def test_causal_models_that_are_proven_do_not(self, caplog: pytest.LogCaptureFixture) -> None:
        assert not pads_causal(ModelArguments(), CONFIGS["llama"]())
        assert not pads_causal(ModelArguments(attn_implementation="sdpa"), CONFIGS["llama"]())
        assert not pads_causal(ModelArguments(device_map="auto"), CONFIGS["llama"]())
        assert not caplog.records

    def test_other_causal_models_pad_and_the_reason_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        assert pads_causal(ModelArguments(), AutoConfig.for_model("gpt2"))
        assert pads_causal(ModelArguments(attn_implementation="flash_attention_2"), CONFIGS["llama"]())
        assert pads_causal(OWN_CODE, with_own_code("llama"))
        messages = [record.getMessage() for record in caplog.records]
        for message, reason in zip(messages, ("gpt2", "flash_attention_2", "its own code"), strict=True):
            assert reason in message

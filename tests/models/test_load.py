"""Tokenizers and classifiers as a run starts with them, and as a finished run is read again."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    T5Config,
    XLNetConfig,
    pipeline,
)

from indictune.config.arguments import Method, ModelArguments
from indictune.models import builtin
from indictune.models.load import check_max_length, load_tokenizer, load_trained
from indictune.models.task_models import class_names, label_order, load_classifier, load_classifier_config
from tests.hub_layouts.decoders import gemma_3
from tests.hub_layouts.shelf import write_files
from tests.models.tiny import CONFIGS, SMALL, words_tokenizer
from tests.refusals import refused

LABELS = ["negative", "neutral", "positive"]

Saved = Callable[[str], str]


def classifier_folder(folder: Path, labels: list[str], architecture: str = "bert") -> ModelArguments:
    """A checkpoint that already is a classifier of these labels."""
    config = CONFIGS[architecture]()
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    model: Any = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    return ModelArguments(str(folder))


def head_of(folder: str) -> torch.Tensor:
    weights: torch.Tensor = AutoModelForSequenceClassification.from_pretrained(folder).classifier.weight.detach()
    return weights


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_saved_model_tells_the_names_of_its_labels(saved: Saved, tmp_path: Path, architecture: str) -> None:
    args = ModelArguments(saved(architecture))
    tokenizer = load_tokenizer(args)
    model: Any = load_classifier(args, LABELS, tokenizer)
    model.save_pretrained(tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "out")

    answers: Any = pipeline("text-classification", str(tmp_path / "out"), top_k=None)(["మంచి ok"])[0]
    assert {answer["label"] for answer in answers} == set(LABELS)
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.id2label == {0: "negative", 1: "neutral", 2: "positive"}
    assert config.label2id == {"negative": 0, "neutral": 1, "positive": 2}
    assert config.problem_type == "single_label_classification"
    assert model.config.use_cache is False

    again = load_trained(tmp_path / "out")
    ids = torch.tensor([[3, 4, 5, 9]])
    assert not again.training
    torch.testing.assert_close(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_weights_are_fp32_whatever_the_checkpoint_has(saved: Saved, method: Method) -> None:
    folder = saved("bert")
    AutoModel.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    args = ModelArguments(folder, method=method)
    model: Any = load_classifier(args, LABELS, load_tokenizer(args))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_weights_of_the_checkpoint_arrive_and_the_head_follows_the_seed(saved: Saved) -> None:
    args = ModelArguments(saved("bert"))
    tokenizer = load_tokenizer(args)

    def load(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return load_classifier(args, LABELS, tokenizer).state_dict()

    first, same, other = load(1), load(1), load(2)
    checkpoint = AutoModel.from_pretrained(args.model_name_or_path).state_dict()
    assert all(torch.equal(first[f"bert.{name}"], weights) for name, weights in checkpoint.items())
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert [name for name in first if not torch.equal(first[name], other[name])] == ["classifier.weight"]


def test_the_built_in_model_loads_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path))
    small = dataclasses.replace(builtin.MODELS["tiny-indic-bert"], texts=lambda: ["अच्छा", "மோசம்"])
    monkeypatch.setitem(builtin.MODELS, "tiny-indic-bert", small)
    args = ModelArguments("builtin:tiny-indic-bert")
    model: Any = load_classifier(args, LABELS, load_tokenizer(args))
    assert model.config.hidden_size == 128
    assert load_classifier_config(args).model_type == "bert"


def test_llama_pads_with_its_end_token_and_reads_the_last_word_of_a_padded_text(saved: Saved) -> None:
    args = ModelArguments(saved("llama"))
    assert AutoTokenizer.from_pretrained(args.model_name_or_path).pad_token is None
    tokenizer = load_tokenizer(args)
    assert tokenizer.pad_token == "</s>"
    model: Any = load_classifier(args, LABELS, tokenizer)
    assert model.config.pad_token_id == 2
    assert model.model.embed_tokens.padding_idx is None
    batch = tokenizer(["ok . ok", "ok"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() in ([[9, 10, 9], [9, 2, 2]], [[9, 10, 9], [2, 2, 9]])
    with torch.no_grad():
        padded = model(
            input_ids=torch.tensor([[9, 10, 9], [9, 2, 2]]), attention_mask=torch.tensor([[1] * 3, [1, 0, 0]])
        )
        alone = model(input_ids=torch.tensor([[9]]))
    torch.testing.assert_close(padded.logits[1], alone.logits[0])


def test_a_tokenizer_with_nothing_to_pad_with_is_refused(saved: Saved) -> None:
    folder = saved("llama")
    tokenizer: PreTrainedTokenizerBase = words_tokenizer(None)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    with refused("tokenizer-without-padding"):
        load_tokenizer(ModelArguments(folder))


@pytest.mark.parametrize("kind", ["albert", "bert", "deberta-v2", "qwen2", "xlm-roberta"])
def test_a_model_that_was_saved_without_its_tokenizer_is_refused(tmp_path: Path, kind: str) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with refused("tokenizer-without-words"):
        load_tokenizer(ModelArguments(model_name_or_path=str(tmp_path)))


def test_a_tokenizer_of_another_model_is_refused(saved: Saved) -> None:
    args = ModelArguments(saved("bert"))
    tokenizer = load_tokenizer(args)
    tokenizer.add_tokens([f"word{number}" for number in range(118)])
    with refused("token-id-without-row", "128 rows"):
        load_classifier(args, LABELS, tokenizer)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_token_id_beyond_the_embedding_is_refused_however_few_tokens_there_are(saved: Saved, method: Method) -> None:
    args = ModelArguments(saved("bert"), method=method)
    path = Path(args.model_name_or_path) / "tokenizer.json"
    description = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = description["model"]["vocab"]
    vocabulary["ok"] = 127
    path.write_text(json.dumps(description), encoding="utf-8")
    load_classifier(args, LABELS, load_tokenizer(args))
    vocabulary["ok"] = 128
    path.write_text(json.dumps(description), encoding="utf-8")
    with refused("token-id-without-row", "token id 128", "128 rows", flag="--model_name_or_path"):
        load_classifier(args, LABELS, load_tokenizer(args))


def test_a_head_for_the_same_labels_keeps_its_weights_and_its_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = classifier_folder(tmp_path, ["positive", "negative", "neutral"])
    order = label_order(load_classifier_config(args), LABELS)
    assert order == ["positive", "negative", "neutral"]
    model: Any = load_classifier(args, order, load_tokenizer(args))
    assert torch.equal(model.classifier.weight, head_of(args.model_name_or_path))
    assert "The head of" not in caplog.text


def named_so(args: ModelArguments, id2label: dict[str, object]) -> ModelArguments:
    """The checkpoint, with the names of its head's classes written by hand."""
    path = Path(args.model_name_or_path) / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | {"id2label": id2label, "label2id": {}}), encoding="utf-8")
    return args


def test_a_head_keeps_the_ids_of_its_classes_in_whatever_order_they_are_listed(tmp_path: Path) -> None:
    args = named_so(classifier_folder(tmp_path, ["a", "b"]), {"1": "negative", "0": "positive"})
    order = label_order(load_classifier_config(args), ["negative", "positive"])
    assert order == ["positive", "negative"]
    model: Any = load_classifier(args, order, load_tokenizer(args))
    assert model.config.id2label == {0: "positive", 1: "negative"}


def test_numbers_may_name_the_classes_of_a_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = named_so(classifier_folder(tmp_path, ["a", "b"]), {"0": 1, "1": 0})
    assert label_order(load_classifier_config(args), ["0", "1"]) == ["1", "0"]
    with caplog.at_level(logging.WARNING):
        load_classifier(args, ["bad", "good"], load_tokenizer(args))
    assert "['1', '0']" in caplog.text
    assert "['bad', 'good']" in caplog.text
    assert class_names(load_trained(tmp_path).config) == ["1", "0"]


def test_a_head_with_a_class_left_out_is_refused_and_one_with_two_of_a_name_is_another(tmp_path: Path) -> None:
    args = named_so(classifier_folder(tmp_path, ["a", "b"]), {"0": "good", "2": "bad"})
    with refused("label-ids-not-consecutive", "0, 2"):
        label_order(load_classifier_config(args), ["bad", "good"])
    named_so(args, {"0": "good", "1": "bad", "2": "bad"})
    assert label_order(load_classifier_config(args), ["bad", "good"]) == ["bad", "good"]


def test_other_labels_keep_the_order_of_the_rows(tmp_path: Path, saved: Saved) -> None:
    """Numbers are in numerical order there: 2 before 10."""
    assert label_order(load_classifier_config(ModelArguments(saved("bert"))), ["2", "3", "10"]) == ["2", "3", "10"]
    args = classifier_folder(tmp_path / "other", ["joy", "anger", "fear"])
    assert label_order(load_classifier_config(args), ["b", "c", "a"]) == ["b", "c", "a"]
    two = classifier_folder(tmp_path / "two", ["LABEL_1", "LABEL_0"])
    assert label_order(load_classifier_config(two), ["b", "a"]) == ["b", "a"]


def test_a_head_of_another_size_is_replaced_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = classifier_folder(tmp_path, ["joy", "anger"])
    with caplog.at_level(logging.WARNING):
        model: Any = load_classifier(args, LABELS, load_tokenizer(args))
    assert model.classifier.weight.shape == (3, 64)
    assert "['joy', 'anger']" in caplog.text


def test_a_head_with_other_labels_is_kept_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = classifier_folder(tmp_path, ["joy", "anger", "fear"])
    with caplog.at_level(logging.WARNING):
        model: Any = load_classifier(args, LABELS, load_tokenizer(args))
    assert torch.equal(model.classifier.weight, head_of(args.model_name_or_path))
    assert "has a head for " in caplog.text


def test_weights_that_do_not_fit_the_configuration_are_refused(saved: Saved) -> None:
    args = ModelArguments(saved("bert"))
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    config.intermediate_size = 48
    config.save_pretrained(args.model_name_or_path)
    with refused("weights-do-not-fit", "bert.encoder"):
        load_classifier(args, LABELS, load_tokenizer(args))


@pytest.mark.parametrize("text", ["{", '{"peft_type": "NEWKIND"}'])
def test_an_adapter_that_cannot_be_read_in_place_of_a_model_is_refused(tmp_path: Path, text: str) -> None:
    args = classifier_folder(tmp_path, LABELS)
    (Path(args.model_name_or_path) / "adapter_config.json").write_text(text, encoding="utf-8")
    with refused("adapter-as-model", args.model_name_or_path, flag="--model_name_or_path"):
        load_classifier_config(args)


@pytest.mark.parametrize("name", ["../../x", "/x", "a/b", "a\0b"])
def test_a_chat_template_that_would_be_saved_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    args = classifier_folder(tmp_path, LABELS)
    path = Path(args.model_name_or_path) / "tokenizer_config.json"
    templates = [{"name": "default", "template": "a"}, {"name": "rag-2.1", "template": "b"}]
    path.write_text(json.dumps({"chat_template": templates}), encoding="utf-8")
    load_tokenizer(args)
    path.write_text(json.dumps({"chat_template": [*templates, {"name": name, "template": "c"}]}), encoding="utf-8")
    with refused("chat-template-name", repr(name)):
        load_tokenizer(args)


@pytest.mark.parametrize(("architecture", "longest"), [("bert", 64), ("modernbert", 64), ("xlm-roberta", 64)])
def test_texts_up_to_the_last_position_pass_and_longer_ones_do_not(
    saved: Saved, architecture: str, longest: int
) -> None:
    args = ModelArguments(saved(architecture))
    config = load_classifier_config(args)
    check_max_length(config, longest)
    model: Any = load_classifier(args, LABELS, load_tokenizer(args))
    model(input_ids=torch.full((1, longest), 5))
    with refused("max-length-over-positions", "64 positions", flag="--max_length"):
        check_max_length(config, longest + 1)


def test_xlm_r_has_512_of_514_positions() -> None:
    config = CONFIGS["xlm-roberta"]()
    config.max_position_embeddings = 514
    check_max_length(config, 512)
    with refused("max-length-over-positions", "512 positions"):
        check_max_length(config, 513)


def rotary(rope: dict[str, Any], model_type: str = "phi3") -> PreTrainedConfig:
    """Of a model that was first trained on 8 positions, and has 64."""
    more = {"original_max_position_embeddings": 8} if model_type == "phi3" else {}
    sizes = {**SMALL, "intermediate_size": 64, "max_position_embeddings": 64}
    config = AutoConfig.for_model(model_type, **sizes, **more, pad_token_id=0, rope_parameters=dict(rope))
    config.name_or_path = "some/model"
    return config


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def depends_on_others(config: PreTrainedConfig, lengths: tuple[int, int]) -> bool:
    """Whether what a text is to a model depends on the other one in its batch."""
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()  # type: ignore[no-untyped-call]
    short, long = lengths
    ids = torch.randint(3, 128, (2, long))
    mask = (torch.arange(long) < torch.tensor([[short], [long]])).long()
    with torch.no_grad():
        alone = model(input_ids=ids[:1, :short]).last_hidden_state[0]
        batched = model(input_ids=ids, attention_mask=mask).last_hidden_state[0, :short]
    return not torch.allclose(alone, batched, atol=1e-5)


def test_texts_beyond_the_original_length_of_longrope_are_refused() -> None:
    """Once `depends_on_others` is never true, they may (transformers 5.23)."""
    config = rotary(LONGROPE)
    assert not depends_on_others(config, (5, 8))
    assert depends_on_others(config, (5, 9))
    check_max_length(config, 8)
    with refused("max-length-over-positions", "some/model", "9", "8 positions", flag="--max_length"):
        check_max_length(config, 9)


def test_longrope_is_seen_where_older_files_or_models_of_many_kinds_of_layers_name_it() -> None:
    sizes: dict[str, Any] = {**SMALL, "max_position_embeddings": 64, "pad_token_id": 0}
    older: Any = {**LONGROPE, "type": "longrope"}
    del older["rope_type"]
    of_one: Any = {"rope_parameters": {"full_attention": {**LONGROPE, "original_max_position_embeddings": 8}}}
    for config in (
        AutoConfig.for_model("phi3", **sizes, original_max_position_embeddings=8, rope_scaling=older),
        PreTrainedConfig(**sizes, **of_one),
    ):
        check_max_length(config, 8)
        with refused("max-length-over-positions", "8 positions"):
            check_max_length(config, 9)


@pytest.mark.parametrize("rope", [DYNAMIC, {"rope_type": "default", "rope_theta": 1e4}])
def test_other_rotary_positions_are_read_alike_up_to_the_last(rope: dict[str, Any]) -> None:
    config = rotary(rope, "llama")
    assert not depends_on_others(config, (5, 64))
    check_max_length(config, 64)


@pytest.mark.parametrize("model_type", ["gpt2", "gptj", "gpt_bigcode", "codegen", "ctrl", "openai-gpt"])
def test_positions_by_another_name_are_a_limit_too(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, n_positions=64)
    assert "max_position_embeddings" not in config.to_dict()
    check_max_length(config, 64)
    with refused("max-length-over-positions", "64 positions"):
        check_max_length(config, 65)


@pytest.mark.parametrize("config", [T5Config(), XLNetConfig()])
def test_relative_positions_have_no_limit(config: PreTrainedConfig) -> None:
    check_max_length(config, 100_000)


@pytest.mark.parametrize("model_type", ["t5", "mt5", "bart", "mbart"])
def test_an_encoder_with_a_decoder_is_refused_as_a_classifier(tmp_path: Path, model_type: str) -> None:
    """It would be trained, and could not be saved: once its head takes a text without an end, it need not be refused
    (transformers 5.23)."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    bart = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = AutoConfig.for_model(model_type, vocab_size=32, **sizes, **bart, encoder_ffn_dim=16, decoder_ffn_dim=16)
    config.save_pretrained(tmp_path)
    with refused("encoder-decoder", model_type, flag="--model_name_or_path"):
        load_classifier_config(ModelArguments(str(tmp_path)))
    model: Any = AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-untyped-call]
    ended = torch.tensor([[5, 6, config.eos_token_id]])
    assert len(model(input_ids=ended).logits) == 1
    with pytest.raises(ValueError, match="at least one <eos>"):
        model(input_ids=ended[:, :2])


def test_a_model_that_cannot_classify_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    with refused("no-model-for-task", "vit"):
        load_classifier_config(ModelArguments(str(tmp_path)))


def test_an_untrained_head_is_no_finished_run(saved: Saved) -> None:
    with refused("model-not-trained", "classifier.bias", flag="--model"):
        load_trained(saved("bert"))


def test_a_head_of_another_size_than_its_configuration_is_no_finished_run(tmp_path: Path) -> None:
    args = classifier_folder(tmp_path, ["joy", "anger"])
    config = load_classifier_config(args)
    config.id2label = dict(enumerate(LABELS))
    config.save_pretrained(tmp_path)
    with refused("model-not-trained", "classifier.bias"):
        load_trained(tmp_path)


def test_xlm_r_keeps_counting_positions_from_its_own_padding_token(saved: Saved, tmp_path: Path) -> None:
    args = ModelArguments(saved("xlm-roberta"))
    assert load_tokenizer(args).pad_token_id == 0
    load_classifier(args, LABELS, load_tokenizer(args)).save_pretrained(str(tmp_path / "out"))
    assert load_trained(tmp_path / "out").config.pad_token_id == 1


def test_a_long_chat_template_is_not_taken_for_the_name_of_a_file(tmp_path: Path) -> None:
    """Those of published models have more letters than the name of a file may have."""
    tokenizer = load_tokenizer(ModelArguments(str(write_files(tmp_path, gemma_3()))))
    assert len(str(tokenizer.chat_template)) > 255

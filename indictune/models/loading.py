"""A run's tokenizer and classifier, read from the Hub, a folder or the built-in model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from peft import PeftConfig, PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from indictune.arguments import ModelArguments
from indictune.errors import UserError
from indictune.models import builtin
from indictune.models.adapters import add_lora, freeze_quantised, nf4_config
from indictune.models.dropout import set_config_dropout, set_module_dropout
from indictune.models.marks import lost_marks
from indictune.models.sources import MODEL_FLAG, explained

logger = logging.getLogger(__name__)

Classifier = PreTrainedModel | PeftModel

# These count positions from pad_token_id + 1, so that many rows of their position table are never used.
POSITIONS_AFTER_PADDING = frozenset(
    {"camembert", "data2vec-text", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta"}
    | {"xlm-roberta-xl", "xmod"}
)


def load_config(args: ModelArguments) -> PreTrainedConfig:
    """The model's configuration as its checkpoint has it; cheap, so that checks can come before any weights.

    Raises:
        UserError: there is no such model, it cannot be read, it is an adapter, or it cannot classify sequences.
    """
    flag = f"{MODEL_FLAG} {args.model_name_or_path}"
    path = builtin.resolve(args.model_name_or_path)
    if (Path(path) / "adapter_config.json").exists():
        base = PeftConfig.from_pretrained(path).base_model_name_or_path
        raise UserError(f"{flag}: the folder holds an adapter. Give its base model ({base}), or a merged model.")
    with explained(args, OSError, ValueError, KeyError):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            path, revision=args.model_revision, trust_remote_code=args.trust_remote_code
        )
    brings_code = args.trust_remote_code and "auto_map" in config.to_dict()
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not brings_code:
        raise UserError(f"{flag}: transformers has no classifier of sequences for the model type {config.model_type}.")
    return config


def load_tokenizer(args: ModelArguments) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with vowel signs kept where its vocabulary has them, and with a padding token.

    ALBERT's and BERT's tokenizers take the vowel signs of Indic scripts for accents and drop them by default. They
    are told not to where that brings signs back; the setting is saved with the tokenizer. A model whose vocabulary
    has no such signs is left as it was trained, and a warning names the scripts.

    A tokenizer without a padding token (LLaMA) pads with its end-of-text token. It stands in no text, and a classifier
    on a decoder reads the last token that is not padding; a new token would add a row to the embedding.

    Raises:
        UserError: there is no such tokenizer, or it has no token to pad with.
    """
    tokenizer = _read_tokenizer(args)
    lost = lost_marks(tokenizer)
    if lost:
        keeping = _read_tokenizer(args, keep_accents=True, strip_accents=False)
        still_lost = lost_marks(keeping)
        if sum(still_lost.values()) < sum(lost.values()):
            tokenizer, lost = keeping, still_lost
    if lost:
        logger.warning(
            "The tokenizer of %s loses vowel signs of %s text: words that differ in them look the same to the model. "
            "Take a model that was trained on these scripts if your texts are written in them.",
            args.model_name_or_path,
            ", ".join(lost),
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(f"--model_name_or_path {args.model_name_or_path}: its tokenizer has no token to pad with.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def label_order(config: PreTrainedConfig, labels: Sequence[str]) -> list[str]:
    """The order in which labels are numbered: the checkpoint's if its head knows exactly these labels, else as given.

    So a head that was trained for the same labels keeps its meaning.
    """
    known = _known_labels(config)
    return known if set(known) == set(labels) else list(labels)


def class_names(config: PreTrainedConfig) -> list[str]:
    """The label of each class id, in order."""
    names = cast(dict[int, str], config.id2label)
    return [names[index] for index in range(len(names))]


def check_max_length(config: PreTrainedConfig, max_length: int) -> None:
    """Refuse texts longer than the model has positions for.

    Raises:
        UserError: `max_length` is above the number of positions.
    """
    positions = config.to_dict().get("max_position_embeddings")
    if positions is None:
        return
    if config.model_type in POSITIONS_AFTER_PADDING:
        positions -= config.pad_token_id + 1
    if max_length > positions:
        raise UserError(
            f"--max_length {max_length}: {config.name_or_path} has {positions} positions; "
            f"give --max_length {positions} or less."
        )


def load_classifier(args: ModelArguments, labels: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Classifier:
    """The model with a head for `labels`, ready to train by `args.method`.

    Weights that the checkpoint lacks (the head, LoRA matrices) are drawn from torch's random state: seed it before.
    They are in fp32, which mixed precision casts from; the quantised base of `qlora` is computed in bf16.

    Args:
        labels: the names, numbered in this order. Take it from `label_order`.
        tokenizer: from `load_tokenizer`; its padding token becomes the model's.

    Raises:
        UserError: the model cannot be read, or does not fit the tokenizer or `args.lora_target_modules`.
        ValueError: the checkpoint's head has the same labels in another order.
    """
    config = load_config(args)
    _check_head(config, labels)
    _set_labels(config, labels)
    if args.dropout is not None:
        set_config_dropout(config, args.dropout)
    quantisation = nf4_config() if args.method == "qlora" else None
    base, new_weights = _read_weights(args, config, quantisation)
    _check_vocabulary(args, base, tokenizer)
    _set_padding(base, tokenizer)
    model: Classifier = base if args.method == "full" else add_lora(base, args, new_weights)
    if args.dropout is not None:
        set_module_dropout(model, args.dropout)
    return model


def load_trained(folder: str | Path, trust_remote_code: bool = False) -> Classifier:
    """A finished run's model for inference, full or adapter, with its label names, in fp32 or on its quantised base.

    Raises:
        UserError: the folder holds no finished model, or the adapter's base cannot be read.
    """
    args = ModelArguments(model_name_or_path=str(folder), trust_remote_code=trust_remote_code)
    with explained(args, OSError, ValueError, KeyError, flag="--model"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if not (Path(folder) / "adapter_config.json").exists():
        model, new_weights = _read_weights(args, config, None, flag="--model")
        if new_weights:
            raise UserError(f"--model {folder}: not trained yet, the weights of {min(new_weights)} are missing.")
        return model
    adapter = PeftConfig.from_pretrained(str(folder))
    args.model_name_or_path = str(adapter.base_model_name_or_path)
    args.model_revision = adapter.revision or "main"
    base, _ = _read_weights(args, config, _take_quantisation(config), flag=f"--model {folder}, whose base is")
    return PeftModel.from_pretrained(base, str(folder))


def _read_tokenizer(args: ModelArguments, **settings: bool) -> PreTrainedTokenizerBase:
    with explained(args, OSError, ValueError, KeyError):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            builtin.resolve(args.model_name_or_path),
            revision=args.model_revision,
            trust_remote_code=args.trust_remote_code,
            **settings,
        )
    return tokenizer


def _read_weights(
    args: ModelArguments,
    config: PreTrainedConfig,
    quantisation: BitsAndBytesConfig | None,
    flag: str = MODEL_FLAG,
) -> tuple[PreTrainedModel, set[str]]:
    """The model, and the names of its parameters that the checkpoint does not hold or holds in another size.

    The type is always given: transformers would take the checkpoint's, and half-precision weights lose small updates.
    """
    with explained(args, OSError, SafetensorError, flag=flag):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            builtin.resolve(args.model_name_or_path),
            config=config,
            revision=args.model_revision,
            trust_remote_code=args.trust_remote_code,
            dtype=torch.float32 if quantisation is None else torch.bfloat16,
            quantization_config=quantisation,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    mismatched = {key for key, *_ in info["mismatched_keys"]}
    wrong = sorted(key for key in mismatched if key.startswith(f"{model.base_model_prefix}."))
    if wrong:
        raise UserError(
            f"{flag} {args.model_name_or_path}: its weights do not fit its config.json, {wrong[0]} for one."
        )
    if quantisation is not None:
        freeze_quantised(model)
    # A decoder's cache of keys and values is of no use to a classifier, which reads a text once.
    model.config.use_cache = False
    return model, set(info["missing_keys"]) | mismatched


def _take_quantisation(config: PreTrainedConfig) -> BitsAndBytesConfig | None:
    """Left on the configuration, it would say that the base's files hold quantised weights."""
    settings = config.to_dict().get("quantization_config")
    if settings is None:
        return None
    del config.quantization_config
    return cast(BitsAndBytesConfig, BitsAndBytesConfig.from_dict(settings))  # type: ignore[no-untyped-call]


def _known_labels(config: PreTrainedConfig) -> list[str]:
    """The labels of the checkpoint's own head, in order; none where the checkpoint is no classifier."""
    if not any("ForSequenceClassification" in name for name in config.architectures or []):
        return []
    return list((config.id2label or {}).values())


def _check_head(config: PreTrainedConfig, labels: Sequence[str]) -> None:
    """Say what becomes of a head that the checkpoint brings."""
    known = _known_labels(config)
    if not known or known == list(labels):
        return
    if set(known) == set(labels):
        raise ValueError(f"labels {list(labels)} in another order than the head's {known}: use label_order().")
    fate = "it starts from its present weights" if len(known) == len(labels) else "a new one takes its place"
    logger.warning(
        "The head of %s was trained for %s, the data have %s: %s.",
        config.name_or_path,
        ", ".join(known),
        ", ".join(labels),
        fate,
    )


def _set_labels(config: PreTrainedConfig, labels: Sequence[str]) -> None:
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    config.problem_type = "single_label_classification"


def _set_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A classifier on a decoder finds the end of a text by the model's padding token: it must be the tokenizer's.

    Set after loading: given before, the embedding would never train the row of LLaMA's end-of-text token. Where
    positions are counted from the padding token, another one would shift every text when the model is read again.
    """
    if model.config.model_type not in POSITIONS_AFTER_PADDING:
        model.config.pad_token_id = tokenizer.pad_token_id


def _check_vocabulary(args: ModelArguments, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    if len(tokenizer) > rows:
        raise UserError(
            f"--model_name_or_path {args.model_name_or_path}: the tokenizer has {len(tokenizer)} tokens, "
            f"the model's embedding {rows} rows; they belong to different models."
        )

"""Load a task's model for training: a sequence classifier, or a causal language model, each with its checks."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from peft import TaskType
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from indictune.config.arguments import ModelArguments, ProblemType
from indictune.config.shared_arguments import TextArguments
from indictune.errors import Problem, UserError, problem
from indictune.files import cache_folder, fill_once
from indictune.models import builtin
from indictune.models.adapters import ALL_LINEAR, HEAD_NAMES, add_lora
from indictune.models.load import (
    Model,
    check_vocabulary,
    load_config,
    load_tokenizer,
    read_weights,
    set_padding,
    stored_quantisation,
)
from indictune.models.trusted_files import BROKEN, MODEL_FLAG, explained, first_line
from indictune.models.unpadded import why_not_joined

logger = logging.getLogger(__name__)

TEMPERATURE = "calibration_temperature"  # of the configuration: logits are divided by it for calibrated scores


def set_config_dropout(config: PreTrainedConfig, probability: float | None) -> None:
    """Set every field of the configuration that is a dropout probability, before the model is made; None sets none.

    The field names differ by architecture (`hidden_dropout_prob`, `attention_dropout`, `resid_pdrop`, ...), and some
    are None to follow another one. Attention reads the configuration, not a module, so the fields themselves count.
    """
    for field in dropout_of(config) if probability is not None else ():
        setattr(config, field, probability)


def dropout_of(config: PreTrainedConfig) -> dict[str, float | None]:
    """The fields of a configuration that are dropout probabilities; None follows another one."""
    named = ((field, value) for field, value in config.to_dict().items() if "drop" in field)
    return {field: p for field, p in named if p is None or (type(p) in (int, float) and 0 <= p <= 1)}


def set_module_dropout(model: nn.Module, probability: float | None) -> None:
    """Set every `nn.Dropout`, also those that code outside transformers made from other fields; None sets none."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) and probability is not None:
            module.p = probability


def load_classifier_config(args: ModelArguments) -> PreTrainedConfig:
    """`load_config` for a sequence classifier.

    Raises:
        UserError: as `load_config`, or `encoder-decoder` (T5, BART). transformers' heads on these (5.23) refuse a text
            without its end token, such as a truncated one.
    """
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    config = load_config(args, AutoModelForSequenceClassification, known, "classifier of sequences")
    if config.is_encoder_decoder:
        raise UserError("encoder-decoder", MODEL_FLAG, args.model_name_or_path, model_type=config.model_type)
    return config


def label_order(config: PreTrainedConfig, labels: Sequence[str]) -> list[str]:
    """The order of the label ids: the checkpoint's if its head has exactly these labels, else as given.

    So a head that was trained for the same labels keeps its meaning.
    """
    known = known_labels(config)
    return known if sorted(known) == sorted(labels) else list(labels)


def class_names(config: PreTrainedConfig) -> list[str]:
    """The label of each class id, in the order of the ids; `label-ids-not-consecutive` if an id is missing."""
    names = cast(dict[int, object], config.id2label or {})
    if sorted(names) != list(range(len(names))):
        ids = ", ".join(map(str, sorted(names)))
        raise UserError("label-ids-not-consecutive", str(config.name_or_path), ids=ids)
    return [str(names[index]) for index in range(len(names))]


def load_classifier(
    args: ModelArguments,
    labels: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    problem_type: ProblemType | None = None,
    config: PreTrainedConfig | None = None,
    kind: type[Any] = AutoModelForSequenceClassification,
) -> Model:
    """The model with a head for `labels`, ready to train by `args.method`.

    Weights that the checkpoint lacks (the head, LoRA matrices) are drawn from torch's random state: seed it before.
    They are in fp32, which mixed precision casts from; the quantised base of `qlora` is computed in bf16.

    Args:
        labels: the names in the order of their ids, from `label_order`.
        tokenizer: from `load_tokenizer`; its padding token becomes the model's.
        problem_type: for the model's configuration; None is `single_label_classification`.
        config: of the model. Default: that of a sequence classifier.

    Raises:
        UserError: the model is unreadable, or does not fit the tokenizer.
    """
    config = load_classifier_config(args) if config is None else config
    if (known := known_labels(config)) and sorted(known) != sorted(labels):
        logger.warning("%s has a head for %s. It is trained for %s.", config.name_or_path, known, list(labels))
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: index for index, label in enumerate(labels)}
    config.problem_type = problem_type or "single_label_classification"
    set_config_dropout(config, args.dropout)
    base, new_weights = read_weights(kind, args, config, torch.float32)
    # A checkpoint of masked language modelling lacks the pooler. The new one must be saved with the adapter: otherwise
    # loading draws other random weights.
    new_modules = sorted({name.rpartition(".")[0] for name in new_weights})
    besides_head = [name for name in new_modules if name.partition(".")[0] not in HEAD_NAMES]
    task = TaskType.TOKEN_CLS if kind is AutoModelForTokenClassification else TaskType.SEQ_CLS
    return _ready(base, args, tokenizer, task, besides_head)


def load_masked(args: ModelArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Model:
    """A masked language model, ready to train; raises as `load_classifier`."""
    set_config_dropout(config, args.dropout)
    base, new = read_weights(AutoModelForMaskedLM, args, config, torch.float32)
    if new:
        logger.warning("%s: %d weights of the head that guesses words begin at random.", config.name_or_path, len(new))
    return _ready(base, args, tokenizer, TaskType.FEATURE_EXTRACTION)


def _ready(
    base: PreTrainedModel,
    args: ModelArguments,
    tokenizer: PreTrainedTokenizerBase,
    task: TaskType,
    trained_whole: Sequence[str] = (),
) -> Model:
    """The model with the tokenizer's padding token, the dropout and the adapter that are asked for."""
    check_vocabulary(args, base, tokenizer)
    set_padding(base, tokenizer)
    model = base if args.method == "full" else add_lora(base, args, task, trained_whole)
    set_module_dropout(model, args.dropout)
    return model


def known_labels(config: PreTrainedConfig | None) -> list[str]:
    """The labels of the checkpoint's head, in the order of their ids; none if the checkpoint is no classifier."""
    if config is None or not re.search("For(Sequence|Token)Classification", str(config.architectures)):
        return []
    return class_names(config)


READING_KEY = "text_reading"


def note_reading(config: PreTrainedConfig, data: TextArguments) -> None:
    """Record it for `config.json`: a model of windows gives the mean of their logits, and one of pairs labels pairs.

    A model that cuts single texts, as every program does, records nothing.
    """
    vars(config).pop(READING_KEY, None)  # of the model that the training starts from
    if data.text_pair_column is not None:
        columns = {"text_column": data.text_column, "text_pair_column": data.text_pair_column}
        setattr(config, READING_KEY, columns)
    elif data.long_text != "truncate":
        setattr(config, READING_KEY, {"long_text": data.long_text, "max_length": int(data.max_length)})


def recorded_reading(config: PreTrainedConfig) -> dict[str, Any]:
    """What `note_reading` recorded; empty for a model that cuts single texts."""
    return dict(vars(config).get(READING_KEY) or {})


ENCODER = "tiny-indic-bert"
MIN_ROWS = 5  # that a piece is in: who reads a published tokenizer learns no word of few people
VOCABULARY_FLAG = "--vocabulary_from_train"


def check_learned_vocabulary(args: ModelArguments) -> list[Problem]:
    """Refuse to learn the vocabulary of a model that has its own, or of a base that an adapter refers to."""
    is_small_encoder = args.model_name_or_path == f"{builtin.PREFIX}{ENCODER}" and args.method == "full"
    if args.vocabulary_from_train is None or is_small_encoder:
        return []
    details = {"model": args.model_name_or_path, "method": args.method}
    return [problem("vocabulary-not-learned", VOCABULARY_FLAG, args.vocabulary_from_train, **details)]


def with_vocabulary(
    args: ModelArguments, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], checkpoint: Path | None
) -> tuple[ModelArguments, PreTrainedTokenizerBase]:
    """The model and the tokenizer of a run: those given, unless `--vocabulary_from_train` makes others.

    Args:
        texts: the cleaned training texts, which are read twice.
        checkpoint: that the run resumes from, whose vocabulary is kept. None: one process learns it from the texts.
            Where nodes share no cache, one of each node does: the same texts give the same vocabulary.

    Raises:
        UserError: the checkpoint has no such vocabulary, or the cache cannot be written.
    """
    if args.vocabulary_from_train is None:
        return args, tokenizer
    size = builtin.Size(vocab_size=args.vocabulary_from_train)
    stored = None if checkpoint is None else stored_vocabulary(checkpoint)
    digest = hashlib.sha256(json.dumps([builtin.MODELS[ENCODER].version, size.vocab_size, MIN_ROWS, stored]).encode())
    for text in texts if stored is None else ():
        digest.update(f"{text}\n".encode())

    def build(folder: Path) -> None:
        vocabulary = builtin.learn_vocabulary(texts, size.vocab_size, MIN_ROWS) if stored is None else stored
        builtin.build_with(vocabulary, folder, size)

    folder = cache_folder() / f"{ENCODER}-{digest.hexdigest()[:16]}"
    fill_once(folder, build)
    made = replace(args, model_name_or_path=str(folder), vocabulary_from_train=None)
    tokenizer = load_tokenizer(made)
    came_from = "the training texts" if checkpoint is None else checkpoint.name
    logger.info("vocabulary: %s entries from %s", f"{len(tokenizer):,}", came_from)
    return made, tokenizer


def stored_vocabulary(checkpoint: Path) -> dict[str, int]:
    """Token -> id of the tokenizer in a checkpoint; a `UserError` if it cannot be read."""
    path = checkpoint / "tokenizer.json"
    try:
        vocabulary: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError("unreadable", "--resume_from_checkpoint", path, reason=type(error).__name__) from error
    return vocabulary


OUTPUT_LAYER = "lm_head"
_UNREAD = "indictune_unread"  # attribute of a model without weights

# transformers keeps documents of these apart by their positions alone. tests/models/test_causal.py compares each one,
# except the flash-attention kernels, which need a GPU.
PACKED_MODELS = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
PACKED_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3")


def check_shapes(kind: type[Any], args: ModelArguments, config: PreTrainedConfig, untouched: Sequence[str]) -> None:
    """Check the attention and the names of an adapter's modules, on the device `meta`.

    Args:
        kind: transformers' Auto class for the task.
        untouched: modules without LoRA matrices.

    Raises:
        UserError: `attention-not-available` or `no-such-module`, with all problems; or `model-unreadable` if the model
            fails with every attention.
    """
    names_modules = args.method != "full" and (args.lora_target_modules != [ALL_LINEAR] or args.modules_to_save)
    if not names_modules and args.attn_implementation is None:
        return
    # From a copy of the configuration, because transformers changes it.
    on_meta = partial(kind.from_config, trust_remote_code=args.trust_remote_code)
    with explained(args, Exception), torch.device("meta"):
        model = on_meta(deepcopy(config), attn_implementation=None)
    problems = _name_problems(model, args, untouched) if names_modules else []
    try:
        with torch.device("meta"):
            on_meta(deepcopy(config), attn_implementation=args.attn_implementation)
    except Exception as error:  # an attention needs packages and support by the model
        given = "--attn_implementation", args.attn_implementation
        details = {"model": args.model_name_or_path, "reason": first_line(error)}
        problems.append(problem("attention-not-available", *given, **details))
    if problems:
        raise UserError(problems=problems)


def _name_problems(model: PreTrainedModel, args: ModelArguments, untouched: Sequence[str]) -> list[Problem]:
    """Names that are no module's, nor the end of one. peft ignores them if another name matches."""
    modules = [name for name, _ in model.named_modules()]
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    targets = [name for name in linear if not name.startswith((*args.modules_to_save, *untouched))]
    wanted = [name for name in args.lora_target_modules if name != ALL_LINEAR]
    problems = []
    for flag, names, known in (
        ("--lora_target_modules", wanted, targets),
        ("--modules_to_save", args.modules_to_save, modules),
    ):
        unmatched = [name for name in names if not any(f".{each}".endswith(f".{name}") for each in known)]
        if unmatched:
            ends = sorted({each.rpartition(".")[2] for each in known if each and not each[-1].isdigit()})
            problems.append(problem("no-such-module", flag, " ".join(unmatched), known=", ".join(ends)))
    return problems


def load_causal_config(args: ModelArguments) -> PreTrainedConfig:
    """`load_config` for a causal language model."""
    return load_config(args, AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING, "causal language model")


def check_causal(args: ModelArguments, config: PreTrainedConfig) -> None:
    """Check a causal model's shapes, before any weights are read; or `lora-on-output-layer`."""
    if args.method != "full" and OUTPUT_LAYER in args.lora_target_modules:
        # TRL computes the loss from the layer's own weight and ignores the matrices.
        raise UserError("lora-on-output-layer", "--lora_target_modules", OUTPUT_LAYER)
    check_shapes(AutoModelForCausalLM, args, config, [OUTPUT_LAYER])


def check_packing(args: ModelArguments, config: PreTrainedConfig) -> None:
    """Refuse to pack rows if documents of one pack could see each other. Raises `packing-impossible`."""
    reason = why_not_joined(args, config, PACKED_MODELS, PACKED_ATTENTION)
    if reason is not None:
        raise UserError("packing-impossible", "--packing", "true", reason=reason)


def load_causal(
    args: ModelArguments,
    tokenizer: PreTrainedTokenizerBase,
    training_dtype: torch.dtype,
    ends: list[int],
    reads: bool = True,
) -> Model:
    """The model, ready to train by `args.method`.

    LoRA matrices are drawn from torch's random state: seed it before.

    Args:
        tokenizer: its padding token becomes the model's.
        training_dtype: of the activations.
        ends: tokens that end an answer. They are saved with the model in addition to its own.
        reads: False skips the weights, because another process sends them. A quantised base is always read.

    Raises:
        UserError: the model is unreadable, or does not fit the tokenizer.
    """
    config = load_causal_config(args)
    set_config_dropout(config, args.dropout)
    # Trained weights are in fp32: half precision loses small updates. A frozen base is computed in `training_dtype`.
    dtype = torch.float32 if args.method == "full" else training_dtype
    if reads or args.method == "qlora" or stored_quantisation(config):
        base, new = read_weights(AutoModelForCausalLM, args, config, dtype)
        if new:
            raise UserError("causal-weights-missing", MODEL_FLAG, args.model_name_or_path, weight=min(new))
    else:
        base = _unread_model(args, config, dtype)
    if base.generation_config is not None:
        base.generation_config.eos_token_id = sorted({*ends, *_own_ends(base, tokenizer)})
    return _ready(base, args, tokenizer, TaskType.CAUSAL_LM)


def _own_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end the answers of a base, such as Gemma's `<end_of_turn>`.

    Ordinary tokens are left out: a configuration names one only as a placeholder.
    """
    assert model.generation_config is not None
    # Gemma 3 nests the configuration of its text, and some models name no end at all (transformers 5.23).
    of_text = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    stored = (model.generation_config.eos_token_id, of_text)
    ids: set[int | None] = {token for each in stored for token in (each if isinstance(each, list) else [each])}
    return {token for token in ids if token in tokenizer.added_tokens_decoder}


def is_unread(model: nn.Module) -> bool:
    """Whether the weights of a model, or of an adapter's base, were left for another process to send."""
    return any(_UNREAD in vars(each) for each in model.modules())


def _unread_model(args: ModelArguments, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with uninitialised weights. The system assigns memory only when they are written."""
    with explained(args, *BROKEN), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=args.trust_remote_code, attn_implementation=args.attn_implementation
        )
    vars(model)[_UNREAD] = True
    model.tie_weights()  # no_init_weights skips it
    model.config.use_cache = False
    return model

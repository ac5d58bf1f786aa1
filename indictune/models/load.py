"""Read configuration, tokenizer and weights of a model from the Hub, a folder or the package, or of a finished run."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Container
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import resolve_revision
from transformers.utils.peft_utils import find_adapter_config_file

from indictune.config.arguments import ModelArguments
from indictune.data.text.cleaning import write_devanagari
from indictune.errors import Problems, UserError, missing_extra
from indictune.files import BASELINE_TYPE, json_or_nothing
from indictune.models import builtin, trusted_files
from indictune.models.adapters import base_of, check_base, config_file, freeze_quantised, nf4_config
from indictune.models.own_code import with_own_code
from indictune.upstream import commit_of, note_commit, without_progress_bar

logger = logging.getLogger(__name__)


# A few common words of each script, with vowel signs before and after the consonant, virama, anusvara and nukta.
PROBES = {
    "Devanagari": "हिन्दी ज़िन्दगी में कुछ भी खुशी",
    "Telugu": "కృష్ణుడు చాలా మంచి సినిమా తెలుగు",
    "Tamil": "வணக்கம் நண்பர்கள் மிகவும் கொடுமை",
}


def lost_vowel_signs(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Script -> number of combining marks that its probe loses by tokenising, for the scripts that lose any."""
    lost = {}
    for script, text in PROBES.items():
        # Compare decoded text, not tokens: byte-level tokens are not characters.
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        decoded = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        if (count := _marks(text) - _marks(str(decoded))) > 0:
            lost[script] = count
    return lost


def _marks(text: str) -> int:
    return sum(unicodedata.category(char).startswith("M") for char in unicodedata.normalize("NFC", text))


# A name of a model whose tokenizer knows Devanagari alone, for texts in all Indic scripts that are written in it.
SINGLE_SCRIPT = "indicbertv2-ss"


def load_tokenizer(args: ModelArguments, flag: str = trusted_files.MODEL_FLAG) -> PreTrainedTokenizerBase:
    """The model's tokenizer, which keeps vowel signs if its vocabulary has them, and has a padding token.

    ALBERT's and BERT's tokenizers drop the vowel signs of Indic scripts as accents by default. This is switched off
    if that restores signs. A model whose vocabulary lacks the signs stays as it was trained, with a warning.
    IndicBERTv2-SS gets texts in Devanagari (`write_devanagari`).

    A tokenizer without a padding token (LLaMA) pads with its end-of-text token: a new token would add a row to the
    embedding.

    Raises:
        UserError: as `read_tokenizer`; or `tokenizer-without-words` or `tokenizer-without-padding`.
    """
    tokenizer = read_tokenizer(args, flag)
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        # Without files, transformers 5 makes a tokenizer to which every text is unknown.
        raise UserError("tokenizer-without-words", flag, args.model_name_or_path)
    if SINGLE_SCRIPT in args.model_name_or_path.lower():
        logger.info("The tokenizer of %s writes all Indic scripts in Devanagari.", args.model_name_or_path)
    lost = {} if is_baseline(args.model_name_or_path) else lost_vowel_signs(tokenizer)
    if lost:
        keeping = read_tokenizer(args, flag, keep_accents=True, strip_accents=False)
        still_lost = lost_vowel_signs(keeping)
        if sum(still_lost.values()) < sum(lost.values()):
            tokenizer, lost = keeping, still_lost
    if lost:
        logger.warning(
            "The tokenizer of %s loses vowel signs of %s text. Use a model that was trained on these scripts if your "
            "texts are written in them.",
            args.model_name_or_path,
            ", ".join(lost),
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError("tokenizer-without-padding", flag, args.model_name_or_path)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def is_baseline(folder: str | Path) -> bool:
    """Whether a folder holds a model of character n-grams, which transformers knows then."""
    if json_or_nothing(Path(folder, "config.json")).get("model_type") != BASELINE_TYPE:
        return False
    import indictune.models.ngrams  # noqa: F401

    return True


def read_tokenizer(args: ModelArguments, flag: str, **settings: bool) -> PreTrainedTokenizerBase:
    """The model's tokenizer as it is, IndicBERTv2-SS's for all scripts; or a `UserError`, as `chat-template-name`."""
    path = builtin.resolve(args.model_name_or_path, flag)
    trusted_files.check_links(Path(path), flag)
    # Broken settings raise any error (AttributeError, TypeError); tokenizers raises bare exceptions.
    with trusted_files.explained(args, Exception, flag=flag):
        revision = resolve_revision(path, args.model_revision)  # check and read the same commit
        trusted_files.check_tokenizer_settings(path, revision, flag)
        is_baseline(path)  # so that transformers knows it
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=args.trust_remote_code, **settings
        )
    for name in tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else ():
        if Path(name).name != name or "\0" in name:  # transformers 5.23 refuses to save it, after hours of training
            raise UserError("chat-template-name", flag, args.model_name_or_path, name=repr(name))
    if SINGLE_SCRIPT in args.model_name_or_path.lower():
        write_devanagari(tokenizer)
    return tokenizer


def check_vocabulary(
    args: ModelArguments, model: Model, tokenizer: PreTrainedTokenizerBase, flag: str = trusted_files.MODEL_FLAG
) -> None:
    """Refuse token ids beyond the rows of the model's embedding (`token-id-without-row`). Ids may have gaps."""
    rows = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise UserError("token-id-without-row", flag, args.model_name_or_path, token_id=largest, rows=rows)


# These count positions from pad_token_id + 1, so the first rows of their position table are never used.
POSITIONS_AFTER_PADDING = frozenset(
    {"camembert", "data2vec-text", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta"}
    | {"xlm-roberta-xl", "xmod"}
)


def check_max_length(config: PreTrainedConfig, max_length: int | str) -> None:
    """Refuse texts longer than the model's positions (`max-length-over-positions`). `auto` keeps within them."""
    positions = positions_of(config)
    if positions is not None and isinstance(max_length, int) and max_length > positions:
        given = "--max_length", max_length
        raise UserError("max-length-over-positions", *given, model=config.name_or_path, limit=positions)


def positions_of(config: PreTrainedConfig | None) -> int | None:
    """How many tokens a model has positions for; None for no limit, or for a model that is unknown.

    LongRoPE (Phi-3, Phi-4-mini) is limited to its original length: beyond it, transformers (5.23,
    `longrope_frequency_update`) chooses the rotation of all positions by the longest text of the micro-batch.
    """
    positions = getattr(config, "max_position_embeddings", None)  # also GPT-2's `n_positions`
    if config is None or positions is None or positions < 0:  # XLNet has -1
        return None
    rope = config.to_dict().get("rope_parameters") or {}
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, dict)]  # for all layers, or for each type
    original = [each["original_max_position_embeddings"] for each in kinds if each.get("rope_type") == "longrope"]
    unused = config.pad_token_id + 1 if config.model_type in POSITIONS_AFTER_PADDING else 0
    return min(positions - unused, *original) if original else int(positions - unused)


Model = PreTrainedModel | PeftModel


def without_adapter(model: nn.Module) -> Any:
    """The transformers model, without the adapter around it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def read_config(args: ModelArguments, flag: str = trusted_files.MODEL_FLAG) -> PreTrainedConfig:
    """The configuration of a model that is trusted; else a `UserError`, such as `adapter-as-model`."""
    path = builtin.resolve(args.model_name_or_path, flag)
    trusted_files.check_links(Path(path), flag)
    with trusted_files.explained(args, Exception, flag=flag):
        is_config = Path(path).is_file()  # a config.json alone, which `indictune plan` takes
        revision = resolve_revision(path, args.model_revision)
        # transformers 5.23 would load the adapter
        if not is_config and find_adapter_config_file(path, revision=revision):
            raise UserError("adapter-as-model", flag, args.model_name_or_path)
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=args.trust_remote_code
        )
        note_commit(config, revision)
        _check_values(config)
        config = _with_its_class(config, args, path, flag)
    trusted_files.check_weights_setting(config, flag)
    return config


def _with_its_class(config: PreTrainedConfig, args: ModelArguments, path: str, flag: str) -> PreTrainedConfig:
    if trusted_files.means_own_code(config):
        return with_own_code(config, args, path, flag)
    if config.model_type != "gemma3_text":
        return config
    from indictune.models.token_heads import taggable

    return taggable(config)


def _check_values(config: PreTrainedConfig) -> None:
    """Raise `ValueError` for values that transformers reads and no model has."""
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if isinstance(size := getattr(config, name, None), int) and not 1 <= size <= 10**7:
            raise ValueError(f"{name} of its config.json is {size}")
    if not isinstance(getattr(config, "threshold", 0.5), int | float):
        raise ValueError(f"threshold of its config.json is {config.threshold!r}")
    if not all(isinstance(each, str) for each in config.architectures or ()):
        raise ValueError(f"architectures of its config.json is {config.architectures}")


def load_config(
    args: ModelArguments, kind: type[Any], known: Container[type[PreTrainedConfig]], task: str
) -> PreTrainedConfig:
    """The configuration of a model to train, before any weights are read.

    Args:
        kind: transformers' Auto class for the task.
        known: its mapping of the configurations that have a model for the task.
        task: name of such a model, for messages.

    Raises:
        UserError: as `read_config`; or `no-model-for-task` or `full-of-quantised`.
    """
    config = read_config(args)
    own = trusted_files.own_classes(config)
    is_of_transformers = type(config).__module__.startswith("transformers.")
    is_known = type(config) in known and not (own and is_of_transformers and trusted_files.means_own_code(config))
    if not is_known and not (args.trust_remote_code and kind.__name__ in own):
        details = {"task": task, "model_type": config.model_type}
        raise UserError("no-model-for-task", trusted_files.MODEL_FLAG, args.model_name_or_path, **details)
    if own and not has_own_code(args, config):
        logger.warning(
            "%s: its own code is not used, but the %s of transformers.", args.model_name_or_path, config.model_type
        )
    if args.method == "full" and stored_quantisation(config):
        raise UserError("full-of-quantised", "--method", args.method, model=args.model_name_or_path)
    return config


def stored_quantisation(config: PreTrainedConfig) -> dict[str, Any]:
    """The quantisation settings of the checkpoint's own weights; empty where they are not quantised."""
    return dict(config.to_dict().get("quantization_config") or {})


def read_weights(
    kind: type[Any],
    args: ModelArguments,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    flag: str = trusted_files.MODEL_FLAG,
    quantisation: BitsAndBytesConfig | None = None,
) -> tuple[PreTrainedModel, set[str]]:
    """The model, and the names of its parameters that the checkpoint lacks or has in another shape.

    A quantised model is frozen and computed in bf16. Its other weights are fp32 in a classifier. In a causal language
    model they are bf16, to be sharded with the packed ones.

    `kind` is transformers' Auto class for the task. `dtype` is used if the model is not quantised. `quantisation` is
    applied while the weights are read; the method `qlora` brings its own. `flag` names the model in messages.

    Raises:
        UserError: the weights are unreadable or not trusted; or `weights-do-not-fit`.
    """
    name, stored = builtin.resolve(args.model_name_or_path), stored_quantisation(config)
    if args.method == "qlora" and not stored:
        quantisation = nf4_config()
    is_quantised = quantisation is not None or bool(stored)
    Problems(missing_extra(flag, args.model_name_or_path, "train", "bitsandbytes") if is_quantised else []).raise_any()
    trusted_files.check_weights_setting(config, flag)
    is_pickled = trusted_files.are_pickled(args, flag)
    with trusted_files.explained(args, *trusted_files.BROKEN, flag=flag), without_progress_bar():
        model, info = kind.from_pretrained(
            name,
            config=config,
            revision=commit_of(config) or args.model_revision,
            trust_remote_code=args.trust_remote_code,
            dtype=torch.bfloat16 if is_quantised else dtype,
            device_map=args.device_map,
            attn_implementation=args.attn_implementation,
            quantization_config=quantisation,
            use_safetensors=not is_pickled,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    mismatched = {key for key, *_ in info["mismatched_keys"]}
    for key in sorted(mismatched):
        if key.startswith(f"{model.base_model_prefix}."):
            raise UserError("weights-do-not-fit", flag, args.model_name_or_path, weight=key)
    if is_quantised:
        freeze_quantised(model, torch.bfloat16 if kind is AutoModelForCausalLM else torch.float32)
    model.config.use_cache = False  # training reads a text once
    return model, set(info["missing_keys"]) | mismatched


def has_own_code(args: ModelArguments, config: PreTrainedConfig) -> bool:
    """Whether the class of the model will come with its files, and not from transformers."""
    return args.trust_remote_code and bool(trusted_files.own_classes(config))


def set_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the tokenizer's padding token the model's: a classifier on a decoder finds the end of a text by it.

    If it were set before loading, the embedding would never train the row of LLaMA's end-of-text token. Models that
    count positions from the padding token keep theirs: another one would shift every text.
    """
    if model.config.model_type not in POSITIONS_AFTER_PADDING:
        model.config.pad_token_id = tokenizer.pad_token_id


def load_trained(
    folder: str | Path,
    trust_remote_code: bool = False,
    device_map: str | None = None,
    kind: type[Any] = AutoModelForSequenceClassification,
    dtype: torch.dtype = torch.float32,
) -> Model:
    """A finished run's model for inference, quantised as in training.

    Args:
        device_map: "cpu" loads it there even if there is a GPU.
        dtype: of the weights, unless they are quantised.

    Raises:
        UserError: the folder holds no finished model, or the adapter's base is unreadable.
    """
    args = ModelArguments(str(folder), trust_remote_code=trust_remote_code, device_map=device_map)
    config = trained_config(args)
    if not (Path(folder) / trusted_files.ADAPTER_CONFIG).exists():
        model, new = read_weights(kind, args, config, dtype, "--model")
        if new:
            raise UserError("model-not-trained", "--model", folder, weight=min(new))
        return model
    trusted_files.check_adapter(Path(folder), "--model")
    base = base_of(folder)
    flag = f"--model {folder}: its base"
    check_base(folder, base.name, flag=flag)
    args.model_name_or_path, args.model_revision = base.name, base.commit_hash or base.revision
    quantisation = take_quantisation(config, read_config(args, flag))
    model, new = read_weights(kind, args, config, dtype, flag, quantisation)
    return add_adapter(model, new, Path(folder), "--model")


def trained_config(args: ModelArguments, flag: str = "--model") -> PreTrainedConfig:
    """The configuration of a finished run's model, or of the base of an adapter on a language model."""
    folder = Path(args.model_name_or_path)
    source = folder if (folder / "config.json").is_file() else config_file(folder)
    is_baseline(folder)  # so that transformers knows it
    with trusted_files.explained(args, Exception, flag=flag):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=args.trust_remote_code)
        _check_values(config)
        return _with_its_class(config, args, str(folder), flag)


def take_quantisation(config: PreTrainedConfig, base_config: PreTrainedConfig) -> BitsAndBytesConfig | None:
    """How an adapter's base is quantised while it is read; None if it is not, or if its files are quantised.

    The quantisation is removed from the adapter's configuration, unless the base's files are quantised.
    """
    settings = stored_quantisation(config)
    if not settings or stored_quantisation(base_config):
        return None
    del config.quantization_config
    return cast(BitsAndBytesConfig, BitsAndBytesConfig.from_dict(settings))  # type: ignore[no-untyped-call]


def add_adapter(base: PreTrainedModel, new_weights: set[str], folder: Path, flag: str) -> PeftModel:
    """The base with the adapter of a folder, for inference.

    `new_weights` are names of the base's weights that are random, and that the adapter must replace.

    Raises:
        UserError: `adapter-does-not-fit`.
    """
    try:
        model = PeftModel.from_pretrained(base, str(folder))
        result = model.load_adapter(str(folder), model.active_adapter)  # again, for what does not fit
    except Exception as error:  # broken files raise any error
        raise UserError("adapter-does-not-fit", flag, folder, reason=trusted_files.first_line(error)) from error
    replaced = tuple(name for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper))
    random = [name for name in new_weights if not f"base_model.model.{name}".startswith(replaced)]
    wrong = sorted([*result.missing_keys, *result.unexpected_keys, *random])
    if wrong:
        raise UserError("adapter-does-not-fit", flag, folder, reason=f"for example {wrong[0]}")
    return model

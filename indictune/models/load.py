"""What every model needs that is read from the Hub, a folder or the package: configuration, tokenizer, weights."""

from __future__ import annotations

import logging
from collections.abc import Container
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import resolve_revision
from transformers.utils.peft_utils import find_adapter_config_file

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError
from indictune.models import builtin
from indictune.models.adapter_base import base_of, check_base
from indictune.models.external_tokenizer_files import check_named_files
from indictune.models.load_errors import BROKEN, MODEL_FLAG, explained
from indictune.models.symlinks import check_links
from indictune.models.vowel_signs import lost_marks
from indictune.models.weight_files import check_adapter, check_indexes

logger = logging.getLogger(__name__)

Model = PreTrainedModel | PeftModel

# These count positions from pad_token_id + 1, so that many rows of their position table are never used.
POSITIONS_AFTER_PADDING = frozenset(
    {"camembert", "data2vec-text", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta"}
    | {"xlm-roberta-xl", "xmod"}
)

# Of a configuration, where it has them: nothing can be made with less than one of each.
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)


def load_config(args: ModelArguments, known: Container[type[PreTrainedConfig]], task: str) -> PreTrainedConfig:
    """The model's configuration as its checkpoint has it; cheap, so that checks can come before any weights.

    Args:
        args: name the model.
        known: transformers' mapping of the configurations that have a model for the task.
        task: what such a model is called in a message.

    Raises:
        UserError: there is no such model, it cannot be read, it is an adapter, it has no model for the task, or its
            weights are quantised and all of them are to be trained; a size is below 1; or a link leads out of its
            folder.
    """
    flag = f"{MODEL_FLAG} {args.model_name_or_path}"
    path = builtin.resolve(args.model_name_or_path)
    if (Path(path) / "adapter_config.json").exists():
        with explained(args, Exception):
            base = PeftConfig.from_pretrained(path).base_model_name_or_path
        raise UserError(f"{flag}: the folder holds an adapter. Give its base model ({base}), or a merged model.")
    check_links(Path(path), flag)
    with explained(args, Exception):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            path, revision=args.model_revision, trust_remote_code=args.trust_remote_code
        )
        is_quantised = bool(stored_quantisation(config))
    check_weights_named(config, flag)
    brings_code = args.trust_remote_code and "auto_map" in config.to_dict()
    if type(config) not in known and not brings_code:
        raise UserError(f"{flag}: transformers has no {task} for the model type {config.model_type}.")
    sizes = {name: config.to_dict().get(name) for name in _SIZES}
    wrong = [f"{name} {size}" for name, size in sizes.items() if isinstance(size, int) and size < 1]
    if wrong:
        raise UserError(f"{flag}: its config.json has {', '.join(wrong)}; expected 1 or more.")
    if args.method == "full" and is_quantised:
        raise UserError(
            f"--method full: the weights of {args.model_name_or_path} are quantised, which cannot be trained. "
            "Give --method lora or qlora, or the checkpoint that they were quantised from."
        )
    return config


def check_weights_named(config: PreTrainedConfig, flag: str) -> None:
    """Refuse a configuration that names the file of its weights: transformers (5.23) reads it in place of the usual
    ones, be it a pickle, or an index that leads out of the model's folder.

    Args:
        config: of a model.
        flag: how a message names it.

    Raises:
        UserError: it does.
    """
    named = config.to_dict().get("transformers_weights")
    if named is not None:
        raise UserError(
            f"{flag}: its config.json names its weights by transformers_weights ({named!r}). If they are its own, "
            "give them their usual name (model.safetensors) and take the entry out."
        )


def stored_quantisation(config: PreTrainedConfig) -> dict[str, Any]:
    """How the checkpoint's own weights are quantised; empty where they are not."""
    return dict(config.to_dict().get("quantization_config") or {})


def load_tokenizer(args: ModelArguments, flag: str = MODEL_FLAG) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with vowel signs kept where its vocabulary has them, and with a padding token.

    ALBERT's and BERT's tokenizers take the vowel signs of Indic scripts for accents and drop them by default. They
    are told not to where that brings signs back; the setting is saved with the tokenizer. A model whose vocabulary
    has no such signs is left as it was trained, and a warning names the scripts.

    A tokenizer without a padding token (LLaMA) pads with its end-of-text token. It stands in no text, and a classifier
    on a decoder reads the last token that is not padding; a new token would add a row to the embedding.

    Args:
        args: name the model.
        flag: what the user typed in front of its name.

    Raises:
        UserError: there is no such tokenizer, a link or its settings lead out of its folder, it has no words, no
            token to pad with, or a chat template whose name leads out of a folder.
    """
    tokenizer = _read_tokenizer(args, flag)
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        # Where there are no files transformers 5 makes one up, to which every text is unknown.
        raise UserError(
            f"{flag} {args.model_name_or_path}: its tokenizer has special tokens and no words. Write the one that "
            "belongs to the model into the folder (`tokenizer.save_pretrained`)."
        )
    lost = lost_marks(tokenizer)
    if lost:
        keeping = _read_tokenizer(args, flag, keep_accents=True, strip_accents=False)
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
            raise UserError(f"{flag} {args.model_name_or_path}: its tokenizer has no token to pad with.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_max_length(config: PreTrainedConfig, max_length: int, begins: bool = True) -> list[str]:
    """Refuse texts longer than the model has positions for, or than those that do not depend on other texts.

    Args:
        config: of the model.
        max_length: of a text, in tokens.
        begins: whether a run begins with that length. One that goes on, and an evaluation, keep what the model was
            trained with: that texts depend on others is only told.

    Returns:
        What the user should know, in a sentence each.

    Raises:
        UserError: `max_length` is above the number of positions.
    """
    alone = _longest_that_reads_alone(config)
    told = (
        f"--max_length {max_length}: {config.name_or_path} reads all texts of a micro-batch otherwise where one has "
        f"more than {alone} tokens (longrope), so that the result depends on which texts share it"
    )
    depends = alone is not None and max_length > alone
    if depends and begins:
        raise UserError(f"{told}. Give --max_length {alone} or less.")
    positions = positions_of(config)
    if positions is not None and max_length > positions:
        raise UserError(
            f"--max_length {max_length}: {config.name_or_path} has {positions} positions; "
            f"give --max_length {positions} or less."
        )
    return [f"{told}. --per_device_eval_batch_size 1 evaluates each alone."] if depends else []


def positions_of(config: PreTrainedConfig) -> int | None:
    """How many tokens a model has positions for; None where they have no limit.

    Some models store the number by another name, such as GPT-2's `n_positions`, and give it by this one too. XLNet
    gives -1 for no limit.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is None or positions < 0:
        return None
    return positions - (config.pad_token_id + 1 if config.model_type in POSITIONS_AFTER_PADDING else 0)


def _longest_that_reads_alone(config: PreTrainedConfig) -> int | None:
    """What a model with LongRoPE (Phi-3, Phi-4-mini) was first trained on, in tokens; None for other models.

    transformers (5.23, `longrope_frequency_update`) turns all positions of a micro-batch by the longest text in it. Of
    `dynamic`, it does so only beyond `max_position_embeddings`.
    """
    rope = config.to_dict().get("rope_parameters") or {}
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, dict)]  # of all layers, or of each type
    stored = [each["original_max_position_embeddings"] for each in kinds if each.get("rope_type") == "longrope"]
    lengths = [length for length in stored if isinstance(length, int)]  # with another no model can be made
    return min(lengths, default=None)


def _read_tokenizer(args: ModelArguments, flag: str, **settings: bool) -> PreTrainedTokenizerBase:
    path = builtin.resolve(args.model_name_or_path)
    named = f"{flag} {args.model_name_or_path}"
    check_links(Path(path), named)
    # What a file of settings can break is any error (AttributeError, TypeError); tokenizers raises bare exceptions.
    with explained(args, Exception, flag=flag):
        revision = resolve_revision(path, args.model_revision)  # what is checked is what is read
        check_named_files(path, revision, named)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=args.trust_remote_code, **settings
        )
    for name in tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else ():
        if Path(name).name != name or "\0" in name:  # transformers 5.23 refuses to save it, after hours of training
            raise UserError(
                f"{named}: its tokenizer has a chat template called {name!r}, which can be no name of a file; give it "
                "another in its tokenizer_config.json."
            )
    return tokenizer


def read_weights(
    kind: type[Any],
    args: ModelArguments,
    config: PreTrainedConfig,
    quantisation: BitsAndBytesConfig | None,
    dtype: torch.dtype,
    flag: str = MODEL_FLAG,
) -> tuple[PreTrainedModel, set[str]]:
    """The model, and the names of its parameters that the checkpoint does not hold or holds in another size.

    Args:
        kind: transformers' Auto class for the task.
        args: name the model.
        config: of the model.
        quantisation: of the weights as they are read, or None.
        dtype: of the weights that are not quantised. Always given: transformers would take the checkpoint's, and
            half-precision weights lose small updates.
        flag: what the user typed in front of the model's name.

    Raises:
        UserError: the weights cannot be read, are pickles that nobody has vouched for, have an adapter beside them,
            or do not fit the configuration.
    """
    name = builtin.resolve(args.model_name_or_path)
    check_weights_named(config, f"{flag} {args.model_name_or_path}")
    if Path(name).is_dir():
        check_indexes(Path(name), f"{flag} {args.model_name_or_path}")
    with explained(args, *BROKEN, flag=flag):
        if find_adapter_config_file(name, revision=args.model_revision):  # which transformers 5.23 reads unasked
            raise UserError(
                f"{flag} {args.model_name_or_path}: there is an adapter_config.json beside its files. Give a model "
                "without an adapter, or merge the two."
            )
        model, info = kind.from_pretrained(
            name,
            config=config,
            revision=args.model_revision,
            trust_remote_code=args.trust_remote_code,
            dtype=dtype,
            device_map=args.device_map,
            attn_implementation=args.attn_implementation,
            quantization_config=quantisation,
            use_safetensors=None if args.trust_checkpoint else True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    mismatched = {key for key, *_ in info["mismatched_keys"]}
    wrong = sorted(key for key in mismatched if key.startswith(f"{model.base_model_prefix}."))
    if wrong:
        raise UserError(
            f"{flag} {args.model_name_or_path}: its weights do not fit its config.json, {wrong[0]} for one."
        )
    # Training reads a text once: the cache of keys and values is of no use to it.
    model.config.use_cache = False
    return model, set(info["missing_keys"]) | mismatched


def has_own_code(args: ModelArguments, config: PreTrainedConfig) -> bool:
    """Whether the model will be of a class that comes with its files, and not of one of transformers'."""
    own = config.to_dict().get("auto_map") or {}
    return args.trust_remote_code and any(name.startswith("AutoModel") for name in own)


def runs_own_code(model: nn.Module) -> bool:
    """Whether the model runs Python code that came with its files, which the user has then allowed."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    # A split model is of a class that torch derives from its own.
    return any(each.__module__.startswith("transformers_modules") for each in type(base).__mro__)


def read_base_of(
    folder: str | Path, args: ModelArguments, config: PreTrainedConfig
) -> tuple[str, BitsAndBytesConfig | None]:
    """Point `args` at the base that the adapter in a folder was trained on.

    Args:
        folder: of the adapter.
        args: get the base's name and revision.
        config: the adapter's, which says how its base was quantised. It keeps saying so only where the base's own
            files hold quantised weights.

    Returns:
        What the user typed in front of the base's name, and how the base is quantised as it is read.

    Raises:
        UserError: the adapter is refused by `check_adapter`; its base is not that of the training, or cannot be read.
    """
    check_adapter(Path(folder), f"--model {folder}")
    trained_on = base_of(folder)
    check_base(folder, trained_on.name)
    args.model_name_or_path, args.model_revision = trained_on.name, trained_on.commit_hash or trained_on.revision
    flag = f"--model {folder}, whose base is"
    with explained(args, Exception, flag=flag):
        base = AutoConfig.from_pretrained(
            builtin.resolve(args.model_name_or_path),
            revision=args.model_revision,
            trust_remote_code=args.trust_remote_code,
        )
    settings = stored_quantisation(config)
    if not settings or stored_quantisation(base):
        return flag, None
    del config.quantization_config
    return flag, cast(BitsAndBytesConfig, BitsAndBytesConfig.from_dict(settings))  # type: ignore[no-untyped-call]


def set_padding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """A classifier on a decoder finds the end of a text by the model's padding token: it must be the tokenizer's.

    Set after loading: given before, the embedding would never train the row of LLaMA's end-of-text token. Where
    positions are counted from the padding token, another one would shift every text when the model is read again.
    """
    if model.config.model_type not in POSITIONS_AFTER_PADDING:
        model.config.pad_token_id = tokenizer.pad_token_id


def check_vocabulary(
    args: ModelArguments, model: Model, tokenizer: PreTrainedTokenizerBase, flag: str = MODEL_FLAG
) -> None:
    """Refuse a tokenizer that gives token ids for which the model's embedding has no row.

    Its largest id is compared, not the number of its tokens: ids may leave numbers out.

    Raises:
        UserError: it gives such ids.
    """
    rows = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= rows:
        raise UserError(
            f"{flag} {args.model_name_or_path}: the tokenizer gives token ids up to {largest}, the model's embedding "
            f"has {rows} rows; they belong to different models."
        )

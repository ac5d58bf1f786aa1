"""A causal language model, ready to train or trained."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel, TaskType
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError
from indictune.models.adapter_base import config_file
from indictune.models.adapters import add_lora, freeze_quantised, nf4_config
from indictune.models.config_shapes import check_shapes
from indictune.models.dropout import set_config_dropout, set_module_dropout
from indictune.models.load import (
    Model,
    check_vocabulary,
    has_own_code,
    load_config,
    read_base_of,
    read_weights,
    set_padding,
    stored_quantisation,
)
from indictune.models.load_errors import BROKEN, MODEL_FLAG, explained

OUTPUT_LAYER = "lm_head"

# Where transformers keeps documents apart by their positions alone; each is compared in tests/models/test_causal.py,
# but for the flash-attention kernels, which need a GPU.
PACKED_MODELS = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
PACKED_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3")


def load_causal_config(args: ModelArguments) -> PreTrainedConfig:
    """`load_config` for a model that can continue texts."""
    return load_config(args, MODEL_FOR_CAUSAL_LM_MAPPING, "causal language model")


def check_causal(args: ModelArguments, config: PreTrainedConfig) -> None:
    """Check what a causal model's shapes alone tell, before any weights are read.

    Args:
        args: name the model and the method.
        config: from `load_causal_config`.

    Raises:
        UserError: as `check_shapes`; or the output layer is to get LoRA matrices.
    """
    _check_output_layer(args)
    check_shapes(AutoModelForCausalLM, args, config, [OUTPUT_LAYER])


def check_packing(args: ModelArguments, config: PreTrainedConfig) -> None:
    """Refuse to pack rows where one document would be read while another is answered.

    Raises:
        UserError: neither the model nor its attention is known to keep documents apart.
    """
    if config.model_type not in PACKED_MODELS:
        raise UserError(
            f"--packing: {args.model_name_or_path} is of the type {config.model_type}, not known to keep packed "
            f"documents apart ({', '.join(PACKED_MODELS)} are). Leave --packing out."
        )
    if has_own_code(args, config):
        raise UserError(
            f"--packing with --trust_remote_code: the code that comes with {args.model_name_or_path} is not known to "
            "keep packed documents apart. Leave --packing out."
        )
    if args.attn_implementation not in PACKED_ATTENTION:
        raise UserError(
            f"--packing with --attn_implementation {args.attn_implementation}: documents of one pack would see each "
            f"other. Leave one of them out; {', '.join(filter(None, PACKED_ATTENTION))} keep documents apart."
        )


def base_dtype(args: ModelArguments, training_dtype: torch.dtype, quantised: bool) -> torch.dtype:
    """The type of the weights that are not quantised.

    All weights that are trained stay in fp32, which mixed precision casts from: half precision loses small updates.
    A frozen base is computed in `training_dtype` anyway, and takes half the memory in it. What NF4 leaves unquantised
    has the type in which the rest is computed and stored, so that all of it can be sharded together.
    """
    if args.method == "full":
        return torch.float32
    return torch.bfloat16 if quantised else training_dtype


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
        args: name the model and the method.
        tokenizer: its padding token becomes the model's.
        training_dtype: in which activations are computed.
        ends: tokens that end an answer; saved with the model beside its own, so that its answers stop there.
        reads: False leaves the weights unread where another process sends them. A quantised base is always read.

    Raises:
        UserError: the model cannot be read, or does not fit the tokenizer or `args.lora_target_modules`.
    """
    config = load_causal_config(args)
    if args.dropout is not None:
        set_config_dropout(config, args.dropout)
    is_stored_so = bool(stored_quantisation(config))
    quantisation = nf4_config() if args.method == "qlora" and not is_stored_so else None
    is_quantised = is_stored_so or quantisation is not None
    dtype = base_dtype(args, training_dtype, is_quantised)
    base = _read(args, config, quantisation, dtype) if reads or is_quantised else _unread(args, config, dtype)
    check_vocabulary(args, base, tokenizer)
    set_padding(base, tokenizer)
    if base.generation_config is not None:
        base.generation_config.eos_token_id = sorted({*ends, *_own_ends(base, tokenizer)})
    model: Model = base
    if args.method != "full":
        model = add_lora(base, args, TaskType.CAUSAL_LM, untouched=[OUTPUT_LAYER])
    if args.dropout is not None:
        set_module_dropout(model, args.dropout)
    return model


def load_trained_causal(
    folder: str | Path,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    trust_checkpoint: bool = False,
    device_map: str | None = None,
) -> Model:
    """A finished run's model for inference, full or adapter, on its quantised base where it had one.

    Args:
        folder: of the run.
        dtype: of the weights, where the base is not quantised.
        trust_remote_code: run Python code that comes with the model.
        trust_checkpoint: read weights that are a pickle; an adapter's own never are.
        device_map: "cpu" reads it there also where there is a GPU.

    Raises:
        UserError: the folder holds no finished model, or the adapter's base cannot be read.
    """
    args = ModelArguments(
        model_name_or_path=str(folder),
        trust_remote_code=trust_remote_code,
        trust_checkpoint=trust_checkpoint,
        device_map=device_map,
        method="lora",
    )
    with explained(args, Exception, flag="--model"):
        config = AutoConfig.from_pretrained(config_file(folder), trust_remote_code=trust_remote_code)
    if not (Path(folder) / "adapter_config.json").exists():
        return _read(args, config, None, dtype, flag="--model")
    dtype = base_dtype(args, dtype, quantised=bool(stored_quantisation(config)))
    flag, quantisation = read_base_of(folder, args, config)
    base = _read(args, config, quantisation, dtype, flag)
    return PeftModel.from_pretrained(base, str(folder))


def _own_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end the answers of a base, such as Gemma's `<end_of_turn>`. A token of words is none: it stands in a
    configuration for want of another."""
    assert model.generation_config is not None
    # Gemma 3 has a configuration for its text within its own, and some models name no end at all (transformers 5.23).
    of_text = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    stored = (model.generation_config.eos_token_id, of_text)
    ids: set[int | None] = {token for each in stored for token in (each if isinstance(each, list) else [each])}
    return {token for token in ids if token in tokenizer.added_tokens_decoder}


def _read(
    args: ModelArguments,
    config: PreTrainedConfig,
    quantisation: BitsAndBytesConfig | None,
    dtype: torch.dtype,
    flag: str = MODEL_FLAG,
) -> PreTrainedModel:
    """`read_weights` of a causal model, none of which may be missing; a quantised one is frozen.

    Raises:
        UserError: weights are missing.
    """
    model, new = read_weights(AutoModelForCausalLM, args, config, quantisation, dtype, flag)
    if new:
        raise UserError(
            f"{flag} {args.model_name_or_path}: the weights of {min(new)} are missing, so it was not trained to "
            "continue texts. Give a causal language model."
        )
    if stored_quantisation(model.config):
        freeze_quantised(model, dtype)
    return model


def _unread(args: ModelArguments, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with memory for its weights that nothing is written to, and so is not taken from the system yet."""
    with explained(args, *BROKEN), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=args.trust_remote_code, attn_implementation=args.attn_implementation
        )
    model.tie_weights()  # which is left out together with the drawing of weights
    model.config.use_cache = False
    return model


def _check_output_layer(args: ModelArguments) -> None:
    """TRL multiplies the hidden states by the output layer's own weight, in pieces: matrices on it would be ignored.

    Raises:
        UserError: `--lora_target_modules` names the output layer.
    """
    if args.method != "full" and OUTPUT_LAYER in args.lora_target_modules:
        raise UserError(
            f"--lora_target_modules {OUTPUT_LAYER}: the loss is computed from the output layer's weight directly, so "
            f"LoRA matrices on it would never be trained. Train it whole: --modules_to_save {OUTPUT_LAYER}."
        )

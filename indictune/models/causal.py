"""Load a causal language model for training or inference."""

from __future__ import annotations

import torch
from peft import TaskType
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError
from indictune.models.adapters import add_lora
from indictune.models.config_shapes import check_shapes
from indictune.models.load import (
    Model,
    check_vocabulary,
    load_config,
    read_weights,
    set_config_dropout,
    set_module_dropout,
    set_padding,
    stored_quantisation,
)
from indictune.models.trusted_files import BROKEN, MODEL_FLAG, explained
from indictune.models.unpadded import why_not_joined

OUTPUT_LAYER = "lm_head"
_UNREAD = "indictune_unread"  # attribute of a model without weights

# transformers keeps documents of these apart by their positions alone. tests/models/test_causal.py compares each one,
# except the flash-attention kernels, which need a GPU.
PACKED_MODELS = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
PACKED_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3")


def load_causal_config(args: ModelArguments) -> PreTrainedConfig:
    """`load_config` for a causal language model."""
    return load_config(args, MODEL_FOR_CAUSAL_LM_MAPPING, "causal language model")


def check_causal(args: ModelArguments, config: PreTrainedConfig) -> None:
    """Check a causal model's shapes, before any weights are read.

    Raises:
        UserError: as `check_shapes`, or `lora-on-output-layer`.
    """
    if args.method != "full" and OUTPUT_LAYER in args.lora_target_modules:
        # TRL computes the loss from the layer's own weight and ignores the matrices.
        raise UserError("lora-on-output-layer", "--lora_target_modules", OUTPUT_LAYER)
    check_shapes(AutoModelForCausalLM, args, config, [OUTPUT_LAYER])


def check_packing(args: ModelArguments, config: PreTrainedConfig) -> None:
    """Refuse to pack rows if documents of one pack could see each other.

    Raises:
        UserError: `packing-impossible`.
    """
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
        args: name the model and the method.
        tokenizer: its padding token becomes the model's.
        training_dtype: of the activations.
        ends: tokens that end an answer. They are saved with the model in addition to its own.
        reads: False skips the weights, because another process sends them. A quantised base is always read.

    Raises:
        UserError: the model is unreadable, or does not fit the tokenizer.
    """
    config = load_causal_config(args)
    if args.dropout is not None:
        set_config_dropout(config, args.dropout)
    # Trained weights are in fp32: half precision loses small updates. A frozen base is computed in `training_dtype`.
    dtype = torch.float32 if args.method == "full" else training_dtype
    if reads or args.method == "qlora" or stored_quantisation(config):
        base, new = read_weights(AutoModelForCausalLM, args, config, dtype)
        if new:
            raise UserError("causal-weights-missing", MODEL_FLAG, args.model_name_or_path, weight=min(new))
    else:
        base = _unread(args, config, dtype)
    check_vocabulary(args, base, tokenizer)
    set_padding(base, tokenizer)
    if base.generation_config is not None:
        base.generation_config.eos_token_id = sorted({*ends, *_own_ends(base, tokenizer)})
    model: Model = base
    if args.method != "full":
        model = add_lora(base, args, TaskType.CAUSAL_LM)
    if args.dropout is not None:
        set_module_dropout(model, args.dropout)
    return model


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


def _unread(args: ModelArguments, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with uninitialised weights. The system assigns memory only when they are written."""
    with explained(args, *BROKEN), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, trust_remote_code=args.trust_remote_code, attn_implementation=args.attn_implementation
        )
    vars(model)[_UNREAD] = True
    model.tie_weights()  # no_init_weights skips it
    model.config.use_cache = False
    return model

"""Let models read a batch as one sequence without padding, in which each row attends only to itself.

`JoinRows` makes such batches. The model's own `forward` runs, so the hooks of each strategy still fire. An attention
function keeps the rows apart. A forward hook gives a classifier's head the first token of each row, or the mean.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError
from indictune.models import serving_model
from indictune.models.attention import ATTENTION
from indictune.models.load import has_own_code, without_adapter
from indictune.upstream import attention_of

logger = logging.getLogger(__name__)

# tests/models/test_unpadded.py compares each with the padded model.
CLASSIFIERS = ("albert", "bert", "gemma3_text", "llama", "modernbert", "qwen3", "roberta", "xlm-roberta")
CAUSAL = ("gemma", "gemma3_text", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
ATTENTIONS = (None, "sdpa")  # `ATTENTION` can replace these
# Classifiers of transformers (5.23) whose logits of a row depend on its padding: their convolutions, Fourier
# transforms and landmarks ignore the mask.
SEE_PADDING = ("convbert", "fnet", "nystromformer", "yoso")
_PADDING = "Padding rows, grouped by length: %s."


def pads(padding_free: Literal["auto", "on", "off"], args: ModelArguments, config: PreTrainedConfig) -> bool:
    """Whether a classifier's rows are padded.

    Raises:
        UserError: `padding-needed`.
    """
    reason = why_not_joined(args, config, CLASSIFIERS)
    if args.device_map is not None:  # accelerate moves the inputs of layers, but not what the hooks here keep
        reason = f"--device_map {args.device_map} may put a row's states and its boundaries on different GPUs"
    if reason is not None and padding_free == "on":
        raise UserError("padding-needed", "--padding_free", padding_free, reason=reason)
    if reason is not None and padding_free == "auto":
        logger.warning(_PADDING, reason)
    return reason is not None or padding_free == "off"


def pads_causal(args: ModelArguments, config: PreTrainedConfig) -> bool:
    """Whether the rows of a causal language model are padded."""
    reason = why_not_joined(args, config, CAUSAL)
    if reason is not None:
        logger.warning(_PADDING, reason)
    return reason is not None


def why_not_joined(
    args: ModelArguments,
    config: PreTrainedConfig,
    types: Collection[str],
    attentions: Collection[str | None] = ATTENTIONS,
) -> str | None:
    """Why a model may not keep joined rows apart; None if it is known to."""
    if has_own_code(args, config):
        return "the model has its own code, which may not keep joined rows apart"
    if config.model_type not in types:
        return f"models of type {config.model_type} may not keep joined rows apart ({', '.join(types)} do)"
    if args.attn_implementation not in attentions:
        known = ", ".join(filter(None, attentions))
        return f"--attn_implementation {args.attn_implementation} may not keep joined rows apart ({known} does)"
    return None


def padding_notes(config: PreTrainedConfig, trains: bool) -> list[str]:
    """A note if padding changes the result of a model that is trained, or only evaluated."""
    if config.model_type not in SEE_PADDING:
        return []
    return [
        f"{config.name_or_path}: models of type {config.model_type} read the padding of a text. Losses and scores "
        "depend on the texts of a micro-batch, and so on the world size. Use "
        f"{'--per_device_train_batch_size 1 and ' * trains}--per_device_eval_batch_size 1 to read each text alone."
    ]


def uncounted_token(config: PreTrainedConfig) -> int | None:
    """The token without a position of its own: RoBERTa does not count its padding token."""
    return int(config.pad_token_id) if config.model_type in ("roberta", "xlm-roberta") else None


def read_unpadded(model: nn.Module) -> None:
    """Let a causal language model, or an adapter on one, read batches of `JoinRows` too, if it keeps them apart."""
    own = without_adapter(model)
    if own.config.model_type in CAUSAL and attention_of(own.config) in ATTENTIONS:
        own.set_attn_implementation(ATTENTION)


def classify_unpadded(model: nn.Module, trains: bool = True) -> None:
    """Let a classifier that `pads` accepts read batches of `JoinRows`. Its logits are [rows, labels].

    It reads padded batches as before, unless it only labels: its last layer may then compute first tokens alone.
    """
    own = without_adapter(model)
    own.set_attn_implementation(ATTENTION)
    if not trains and own.config.model_type in serving_model.TYPES:
        serving_model.read_first_tokens(own)
    elif own.config.model_type in ("gemma3_text", "llama", "qwen3"):
        last = _LastTokens(own.config.pad_token_id)
        own.base_model.register_forward_hook(last.keep)
        own.register_forward_hook(last.choose, with_kwargs=True)
    else:
        # BERT's and ALBERT's pooler belongs to the base model, and reads the output of the encoder.
        base = own.base_model
        is_modern = own.config.model_type == "modernbert"
        encoder = base if is_modern else base.encoder
        takes_means = is_modern and own.config.classifier_pooling == "mean"
        encoder.register_forward_hook(_means if takes_means else _first_tokens, with_kwargs=True)


def _first_tokens(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A forward hook: the state of each row's first token, [rows, 1, width]."""
    if "cu_seq_lens_q" in kwargs:
        starts = kwargs["cu_seq_lens_q"][:-1]
        output.last_hidden_state = output.last_hidden_state[0, starts][:, None]
    return output


def _means(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A forward hook: the mean of each row's token states, [rows, 1, width]."""
    if "cu_seq_lens_q" in kwargs:
        states, lengths = output.last_hidden_state[0], kwargs["cu_seq_lens_q"].diff()
        # `unsafe` skips a check of the lengths, which waits for the GPU.
        means = torch.segment_reduce(states.float(), "mean", lengths=lengths, axis=0, unsafe=True)
        output.last_hidden_state = means[:, None].to(states.dtype)
    return output


class _LastTokens:
    """Forward hooks that give a LLaMA-like classifier the logits of each row's last token.

    transformers selects them after the head, for each row of `input_ids`; here all rows are one. As in transformers,
    the last token is the last one that is not the padding token. Texts may hold that token: many tokenizers pad with
    the end token.

    `choose` calls the head again for these tokens. If it selected logits of the first call instead, ZeRO-3 (DeepSpeed
    0.19) would not know that the backward pass needs the head's weight.
    """

    def __init__(self, pad_token_id: int | None) -> None:
        self.pad_token_id = pad_token_id

    def keep(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Hook of the base model: keep the states of all tokens, [1, tokens, width], and the autocast settings."""
        self._states = output.last_hidden_state
        device = self._states.device.type
        in_half, of_half = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self._autocast = torch.autocast(device, of_half, enabled=in_half)  # autocast ends before `choose`

    def choose(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Hook of the whole model: its logits become [rows, labels]."""
        if "cu_seq_lens_q" in kwargs:
            last = _last_tokens(kwargs["input_ids"][0], kwargs["cu_seq_lens_q"], self.pad_token_id)
            with self._autocast:
                logits = module.score(self._states[0, last])
            output.logits = logits.to(output.logits.dtype)
        del self._states
        return output


def _last_tokens(input_ids: torch.Tensor, boundaries: torch.Tensor, pad_token_id: int | None) -> torch.Tensor:
    """The position of each row's last token that is not padding, or of its first token; int64 [rows].

    Boundaries are the start of each row, and the end of the last one, [rows + 1].
    """
    starts = boundaries[:-1].long()
    if pad_token_id is None:
        return boundaries[1:].long() - 1
    positions = torch.arange(len(input_ids), device=input_ids.device)
    row_of = torch.bucketize(positions, boundaries[1:].long(), right=True)
    return starts.scatter_reduce(0, row_of, positions * (input_ids != pad_token_id), "amax")


# Masked language models. tests/models/test_masked_models.py compares each with the padded model.
MASKED = ("albert", "bert", "modernbert", "roberta", "xlm-roberta")


def choose_masked(model: nn.Module, joins: bool) -> None:
    """Let a masked language model compute the head of some tokens alone, and with `joins` keep joined rows apart.

    The head has as many outputs as the vocabulary: for all tokens they would take several times the memory of the
    model. A call gives the tokens as `masked_places`, int64 [masked], which count over the flattened `input_ids`. Its
    logits are [1, masked, vocabulary]. A call without them is as before.
    """
    own, places = cast(Any, model), list[torch.Tensor | None]()
    if joins:
        own.set_attn_implementation(ATTENTION)

    def take(_module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        places[:] = [given.pop("masked_places", None)]
        return args, given

    def choose(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        if places and places[0] is not None:
            output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[places[0]][None]
        return output

    own.register_forward_pre_hook(take, with_kwargs=True)
    own.base_model.register_forward_hook(choose)

"""Models that read a batch as one sequence without padding, each row seeing itself alone.

`JoinRows` makes such batches. The model's own `forward` runs, so that whatever a strategy hooks into it still fires:
rows are kept apart by an attention function, and a classifier's head gets each row's own token, or the mean of its
tokens, by a forward hook.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedConfig

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError
from indictune.models.attention import ATTENTION
from indictune.models.load import has_own_code

logger = logging.getLogger(__name__)

# Each is compared with the padded model in tests/models/test_unpadded.py.
CLASSIFIERS = ("albert", "bert", "llama", "modernbert", "roberta", "xlm-roberta")
CAUSAL = ("gemma", "gemma3_text", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3")
ATTENTIONS = (None, "sdpa")  # that `ATTENTION` takes the place of
# Classifiers of transformers (5.23) whose logits of a row change with the padding behind it: their convolutions,
# Fourier transforms and landmarks take no notice of the mask.
SEE_PADDING = ("convbert", "fnet", "nystromformer", "yoso")


def why_padded(
    config: PreTrainedConfig, attn_implementation: str | None, own_code: bool = False, device_map: str | None = None
) -> str | None:
    """Why a classifier has to pad its rows, or None if it need not.

    Args:
        config: of the model.
        attn_implementation: the attention that the user named, if any.
        own_code: the model's class comes with its files, and may read any token, or see any.
        device_map: by which the user spreads the layers, if any.
    """
    if device_map is not None:  # accelerate moves what layers get, and not what the hooks here keep and look up
        return f"--device_map {device_map} may leave a text's states on another GPU than what tells where it ends"
    return _why_padded(config, attn_implementation, own_code, CLASSIFIERS)


def _why_padded(
    config: PreTrainedConfig,
    attn_implementation: str | None,
    own_code: bool,
    types: Collection[str],
) -> str | None:
    """As `why_padded`, of models of these types."""
    if own_code:
        return "the model has code of its own, which is not known to keep joined rows apart"
    if config.model_type not in types:
        return f"models of the type {config.model_type} are not known to work without it ({', '.join(types)} are)"
    if attn_implementation not in ATTENTIONS:
        return f"--attn_implementation {attn_implementation} needs it"
    return None


def pads(padding_free: Literal["auto", "on", "off"], args: ModelArguments, config: PreTrainedConfig) -> bool:
    """Whether a classifier's rows are padded.

    Args:
        padding_free: `--padding_free`.
        args: of the model.
        config: of the model.

    Raises:
        UserError: `on`, and the model cannot do without padding.
    """
    reason = why_padded(config, args.attn_implementation, has_own_code(args, config), args.device_map)
    if reason is not None and padding_free == "on":
        raise UserError(f"--padding_free on: {reason}. Leave it out, and rows are padded by length.")
    if reason is not None and padding_free == "auto":
        _tell(reason)
    return reason is not None or padding_free == "off"


def pads_causal(args: ModelArguments, config: PreTrainedConfig) -> bool:
    """Whether the rows of a causal language model are padded."""
    reason = _why_padded(config, args.attn_implementation, has_own_code(args, config), CAUSAL)
    if reason is not None:
        _tell(reason)
    return reason is not None


def padding_notes(config: PreTrainedConfig, trains: bool) -> list[str]:
    """What the user should know of a model whose rows are padded, in at most one sentence.

    Args:
        config: of the model.
        trains: whether it is trained, and not evaluated alone.
    """
    if config.model_type not in SEE_PADDING:
        return []
    return [
        f"{config.name_or_path}: models of the type {config.model_type} see the padding behind a text, so that losses "
        "and scores depend on which texts share a micro-batch, and so on the launch. "
        f"{'--per_device_train_batch_size 1 and ' * trains}--per_device_eval_batch_size 1 read each alone."
    ]


def _tell(reason: str) -> None:
    logger.warning("Rows are padded, rows of like length together: %s.", reason)


def reads_unpadded(config: PreTrainedConfig, attn_implementation: str | None) -> bool:
    """Whether a causal language model with this attention, or the default, may be given to `read_unpadded`."""
    return config.model_type in CAUSAL and attn_implementation in ATTENTIONS


def uncounted_token(config: PreTrainedConfig) -> int | None:
    """The token that has no position of its own, where the model counts only the others: RoBERTa's padding."""
    return int(config.pad_token_id) if config.model_type in ("roberta", "xlm-roberta") else None


def read_unpadded(model: nn.Module) -> None:
    """Let a causal language model, or an adapter on one, read batches of `JoinRows`, beside padded ones."""
    _own(model).set_attn_implementation(ATTENTION)


def classify_unpadded(model: nn.Module) -> None:
    """Let a classifier for which `why_padded` is None read batches of `JoinRows`. Its logits are [rows, labels].

    Padded batches it reads as before.
    """
    own = _own(model)
    own.set_attn_implementation(ATTENTION)
    if own.config.model_type == "llama":
        last = _LastTokens(own.config.pad_token_id)
        own.base_model.register_forward_hook(last.keep)
        own.register_forward_hook(last.choose, with_kwargs=True)
    else:
        # BERT's and ALBERT's pooler belongs to the base model, and reads what their encoder gives.
        base = own.base_model
        is_modern = own.config.model_type == "modernbert"
        encoder = base if is_modern else base.encoder
        takes_means = is_modern and own.config.classifier_pooling == "mean"
        encoder.register_forward_hook(_means if takes_means else _first_tokens, with_kwargs=True)


def _own(model: nn.Module) -> Any:
    """The model of transformers, without the adapter around it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _first_tokens(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A forward hook: of each row the first token's state, as [rows, 1, width]."""
    if "cu_seq_lens_q" in kwargs:
        starts = kwargs["cu_seq_lens_q"][:-1]
        output.last_hidden_state = output.last_hidden_state[0, starts][:, None]
    return output


def _means(_module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A forward hook: of each row the mean of its tokens' states, as [rows, 1, width]."""
    if "cu_seq_lens_q" in kwargs:
        states, lengths = output.last_hidden_state[0], kwargs["cu_seq_lens_q"].diff()
        # `unsafe`: else a GPU would be waited for to check the lengths.
        means = torch.segment_reduce(states.float(), "mean", lengths=lengths, axis=0, unsafe=True)
        output.last_hidden_state = means[:, None].to(states.dtype)
    return output


class _LastTokens:
    """Forward hooks that give a classifier of the kind of LLaMA the logits of each row's last token.

    transformers chooses them after the head, by the number of rows in `input_ids`, which is one here. As there, the
    last token is the last that is not the padding's, which may stand in a text: many tokenizers pad by the end token.

    The head is called once more, for these tokens. Of the logits that it gave for all, a hook that was there before
    ZeRO-3's would keep those of which DeepSpeed (0.19) does not know that the backward pass needs the head's weight.
    """

    def __init__(self, pad_token_id: int | None) -> None:
        self.pad_token_id = pad_token_id

    def keep(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Of the base model: remember the states of all tokens, [1, tokens, width], and in what the head computes."""
        self._states = output.last_hidden_state
        device = self._states.device.type
        in_half, of_half = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self._autocast = torch.autocast(device, of_half, enabled=in_half)  # which is over when `choose` is called

    def choose(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Of the whole model: its logits become [rows, labels]."""
        if "cu_seq_lens_q" in kwargs:
            last = _last_tokens(kwargs["input_ids"][0], kwargs["cu_seq_lens_q"], self.pad_token_id)
            with self._autocast:
                logits = module.score(self._states[0, last])
            output.logits = logits.to(output.logits.dtype)
        del self._states
        return output


def _last_tokens(input_ids: torch.Tensor, boundaries: torch.Tensor, pad_token_id: int | None) -> torch.Tensor:
    """Where each row's last token stands that is not padding, or its first where all are; int64 [rows].

    Args:
        input_ids: [tokens] of all rows.
        boundaries: [rows + 1], where each row begins and the last one ends.
        pad_token_id: or None.
    """
    starts = boundaries[:-1].long()
    if pad_token_id is None:
        return boundaries[1:].long() - 1
    places = torch.arange(len(input_ids), device=input_ids.device)
    row_of = torch.bucketize(places, boundaries[1:].long(), right=True)
    return starts.scatter_reduce(0, row_of, places * (input_ids != pad_token_id), "amax")

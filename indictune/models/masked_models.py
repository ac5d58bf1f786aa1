"""Masked language models: load one for training, and compute the logits of masked tokens alone."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedTokenizerBase

from indictune.config.arguments import ModelArguments
from indictune.config.plan import Launch
from indictune.errors import Problem, problem
from indictune.models.attention import ATTENTION
from indictune.models.load import Model, check_vocabulary, load_config, read_weights, set_padding, without_adapter
from indictune.models.task_models import set_config_dropout, set_module_dropout
from indictune.models.unpadded import why_not_joined

logger = logging.getLogger(__name__)

# tests/models/test_masked_models.py compares each with the padded model.
JOINED = ("albert", "bert", "modernbert", "roberta", "xlm-roberta")


def load_masked_config(args: ModelArguments) -> PreTrainedConfig:
    """`load_config` for a masked language model."""
    return load_config(args, AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING, "masked language model")


def check_whole(args: ModelArguments, launch: Launch) -> list[Problem]:
    """Refuse adapters, a new vocabulary, and processes that split one model."""
    found = []
    if args.method != "full":
        reason = "a classifier that goes on from the model takes whole weights"
        found.append(problem("not-of-masked-words", "--method", args.method, reason=reason))
    if args.vocabulary_from_train is not None:
        given = "--vocabulary_from_train", args.vocabulary_from_train
        found.append(problem("not-of-masked-words", *given, reason="the model's own vocabulary is trained"))
    if launch.axes.pipeline * launch.axes.tensor > 1:
        reason = "its processes split one model, whose head and embedding are one weight"
        found.append(problem("not-of-masked-words", "strategy", launch.strategy, reason=reason))
    return found


def load_masked(args: ModelArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Model:
    """The model, ready to train. A head that the checkpoint lacks is drawn from torch's random state: seed it before.

    Raises:
        UserError: the model is unreadable, or does not fit the tokenizer.
    """
    set_config_dropout(config, args.dropout)
    model, new = read_weights(AutoModelForMaskedLM, args, config, torch.float32)
    if new:
        tied = "; its output layer is the embedding" if config.tie_word_embeddings else ""
        what = "%s has no head that guesses masked words: a new one begins at random (%d weights%s)."
        logger.warning(what, args.model_name_or_path, len(new), tied)
    check_vocabulary(args, model, tokenizer)
    set_padding(model, tokenizer)
    set_module_dropout(model, args.dropout)
    return model


def why_padded(args: ModelArguments, config: PreTrainedConfig) -> str | None:
    """Why documents cannot be packed for a model; None if it keeps them apart."""
    return why_not_joined(args, config, JOINED)


class MaskedStates:
    """Hooks that let a masked language model compute the head of some tokens alone.

    The head has as many outputs as the vocabulary: for all tokens they would take several times the memory of the
    model. A call gives the tokens as `masked_places`, int64 [masked], which count over the flattened `input_ids`. Its
    logits are [1, masked, vocabulary]. A call without them is as before.
    """

    def __init__(self, model: nn.Module, joins: bool) -> None:
        self._places: torch.Tensor | None = None
        own: Any = without_adapter(model)
        if joins:
            own.set_attn_implementation(ATTENTION)
        own.register_forward_pre_hook(self._take, with_kwargs=True)
        own.base_model.register_forward_hook(self._choose)

    def _take(self, _module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._places = given.pop("masked_places", None)
        return args, given

    def _choose(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        if self._places is not None:
            output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[self._places][None]
            self._places = None
        return output

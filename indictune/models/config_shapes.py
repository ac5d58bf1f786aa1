"""Shapes and parameter counts of a model, by its configuration alone."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, field
from typing import cast

import torch
from peft import TaskType
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from indictune.config.arguments import ModelArguments
from indictune.models.adapters import HEAD_NAMES, add_lora
from indictune.models.load import without_adapter
from indictune.models.trusted_files import BROKEN, explained

KINDS = {
    "ForSequenceClassification": (AutoModelForSequenceClassification, TaskType.SEQ_CLS),
    "ForTokenClassification": (AutoModelForTokenClassification, TaskType.TOKEN_CLS),
    "ForCausalLM": (AutoModelForCausalLM, TaskType.CAUSAL_LM),
    "ForMaskedLM": (AutoModelForMaskedLM, TaskType.FEATURE_EXTRACTION),  # no run of it has an adapter
}


@dataclass(frozen=True)
class ParameterCounts:
    """How many parameters a model has."""

    total: int  # each shared one once, adapters included
    trained: int  # those that get gradients
    packed: int = 0  # those that `--method qlora` keeps in 4 bit
    # Those that no token is multiplied by: embeddings, without one that is the output layer too.
    looked_up: int = field(default=0, compare=False)

    @property
    def multiplied(self) -> int:
        """Those that every token is multiplied by. Layers that share them count once, and of experts all."""
        return self.total - self.looked_up


@dataclass(frozen=True)
class MetaModel:
    """A model on the device `meta`, which has shapes and no values: whole, in its adapter if the method has one."""

    whole: nn.Module
    packed: Collection[Tensor]  # weights that `--method qlora` keeps in 4 bit
    looked_up: Collection[Tensor]  # tables that no token is multiplied by

    @property
    def own(self) -> PreTrainedModel:
        """The model of transformers, without the adapter around it."""
        return cast(PreTrainedModel, without_adapter(self.whole))

    @property
    def counts(self) -> ParameterCounts:
        """Its parameters."""
        parameters = list(self.whole.parameters())
        trained = sum(each.numel() for each in parameters if each.requires_grad)
        packed, looked_up = (sum(each.numel() for each in some) for some in (self.packed, self.looked_up))
        return ParameterCounts(sum(each.numel() for each in parameters), trained, packed, looked_up)


def meta_model(args: ModelArguments, config: PreTrainedConfig, head: str, active_rows: int | None = None) -> MetaModel:
    """Build the model on the device `meta`, which reads no weights.

    Args:
        config: of the model; it is not changed.
        head: end of the class name of the task's models, such as `ForCausalLM`.
        active_rows: rows of the embedding that are trained, of an active vocabulary; None for all.

    Raises:
        UserError: no model has the values of the configuration.
    """
    kind, task = KINDS[head]
    with torch.device("meta"):
        with explained(args, *BROKEN):
            own: PreTrainedModel = kind.from_config(deepcopy(config), trust_remote_code=args.trust_remote_code)  # type: ignore[no-untyped-call]
        if active_rows is not None:
            width = cast(nn.Embedding, own.get_input_embeddings()).embedding_dim
            own.set_input_embeddings(nn.Embedding(active_rows, width))
        packed = _quantised(own) if args.method == "qlora" else frozenset[Tensor]()
        with no_init_weights():  # there are none to draw
            whole = own if args.method == "full" else add_lora(own, args, task)
    output = own.get_output_embeddings()  # type: ignore[no-untyped-call]
    tables = {each.weight for each in own.modules() if isinstance(each, nn.Embedding)}
    return MetaModel(whole, packed, tables if output is None else tables - {output.weight})


def _quantised(model: PreTrainedModel) -> frozenset[Tensor]:
    """The matrices that NF4 packs: all of linear layers but those of heads and poolers."""
    kept = {*HEAD_NAMES, "lm_head", "head", "pooler"}
    return frozenset(
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not set(name.split(".")) & kept
    )

"""Count the parameters of a model before its weights are read."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

import torch
from peft import TaskType
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)

from indictune.config.arguments import ModelArguments
from indictune.models.adapters import HEAD_NAMES, add_lora

KINDS = {
    "ForSequenceClassification": (AutoModelForSequenceClassification, TaskType.SEQ_CLS),
    "ForTokenClassification": (AutoModelForTokenClassification, TaskType.TOKEN_CLS),
    "ForCausalLM": (AutoModelForCausalLM, TaskType.CAUSAL_LM),
}


@dataclass(frozen=True)
class ParameterCounts:
    """How many parameters a model has.

    Attributes:
        total: all of them, each shared one once, adapters included.
        trained: those that get gradients.
        packed: those that `--method qlora` keeps in 4 bit.
        looked_up: those that no token is multiplied by: embeddings, without one that is the output layer too.
    """

    total: int
    trained: int
    packed: int = 0
    looked_up: int = field(default=0, compare=False)

    @property
    def multiplied(self) -> int:
        """Those that every token is multiplied by. Layers that share them count once, and of experts all."""
        return self.total - self.looked_up


def count_parameters(args: ModelArguments, config: PreTrainedConfig, head: str) -> ParameterCounts:
    """Build the model on the device `meta`, which reads no weights, and count.

    Args:
        args: name the method and the size of an adapter.
        config: of the model; it is not changed.
        head: end of the class name of the task's models, such as `ForCausalLM`.
    """
    kind, task = KINDS[head]
    with torch.device("meta"):
        model = kind.from_config(deepcopy(config), trust_remote_code=args.trust_remote_code)  # type: ignore[no-untyped-call]
        unpacked = (*HEAD_NAMES, "lm_head", "head", "pooler")
        packed = sum(
            module.weight.numel()
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and not set(name.split(".")) & set(unpacked)
        )
        whole = model if args.method == "full" else add_lora(model, args, task)
    looked_up = [each.weight for each in model.modules() if isinstance(each, nn.Embedding)]
    output = model.get_output_embeddings()
    tables = sum(each.numel() for each in looked_up if output is None or each is not output.weight)
    trained = sum(each.numel() for each in whole.parameters() if each.requires_grad)
    total = sum(each.numel() for each in whole.parameters())
    return ParameterCounts(total, trained, packed if args.method == "qlora" else 0, tables)

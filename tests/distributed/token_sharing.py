"""A script in which ranks share the tokens of tiny models' rows.

    torchrun --nproc_per_node 3 tests/distributed/token_sharing.py llama mistral

The first rank prints a line of JSON for each: how far log-probabilities and gradients are from those of whole rows.
With flags in place of models, it is scripts/train_llama.py with one thing broken; the variable MUTANT says which.
"""

from __future__ import annotations

import copy
import json
import os
import runpy
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from indictune.data.collation import JoinRows, PadToLongest, Row
from indictune.distributed import context
from indictune.distributed.context import PART, OwnTokens, Part, use_group
from indictune.models.unpadded import read_unpadded
from indictune.tasks.protocol import Collator
from tests.models.tiny import SMALL

LENGTHS = (1, 23, 9, 2)  # more tokens than a window has; a row of one token
SETTINGS = {**SMALL, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
COLLATORS: dict[str, Collator] = {"joined": JoinRows(), "padded": PadToLongest(0, "right", with_row_numbers=True)}


def rows(lengths: tuple[int, ...] = LENGTHS) -> list[Row]:
    random = np.random.default_rng(0)
    found = []
    for number, length in enumerate(lengths):
        tokens = random.integers(3, 99, length)
        labels = np.where(np.arange(length) < length // 3, -100, tokens)
        found.append({"input_ids": tokens, "labels": labels, "seq_lengths": np.array([length]), "row": number})
    return found


def tiny(kind: str) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **SETTINGS, pad_token_id=0, sliding_window=8)
    config.update({"use_sliding_window": True, "initializer_range": 0.2})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).train()  # type: ignore[no-untyped-call]
    add_fused_lm_head(model)
    return model


def log_probs(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Of each row's labels, summed."""
    inputs = {name: each for name, each in batch.items() if name != "row_numbers"}
    found: Tensor = model(**inputs, fused_lm_head=True).log_probs.sum(-1)
    return found


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm().clamp(min=1e-12))


def compare(kind: str, form: str) -> dict[str, float]:
    world = torch.distributed.group.WORLD
    assert world is not None
    whole = tiny(kind)
    model = copy.deepcopy(whole)
    read_unpadded(whole)
    use_group(model, world)
    expected = log_probs(whole, COLLATORS[form](rows()))
    torch.autograd.backward((expected * torch.arange(1.0, len(expected) + 1)).sum())
    collator = OwnTokens(COLLATORS[form], world.rank(), world.size())
    own = log_probs(model, collator(rows()))
    torch.autograd.backward((own * torch.arange(1.0, len(own) + 1)).sum())
    found = own.detach()
    torch.distributed.all_reduce(found, group=world)
    gradients = {name: each.grad for name, each in whole.named_parameters() if each.grad is not None}
    for each in model.parameters():
        if each.grad is not None:
            torch.distributed.all_reduce(each.grad)
    of_parts = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    largest = max(apart(gradients[name], each) for name, each in of_parts.items())
    return {"log_probs": apart(expected.detach(), found), "gradients": largest, "parameters": len(gradients)}


def unsummed_gradients() -> None:
    """A rank keeps its own gradient of its keys and values, and drops that of the others."""
    gather: Any = vars(context)["_Gathered"]

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        part: Part = ctx.part
        first, last = part.pieces_of(part.rank)
        own = [gradient[:, :, :, piece.start : piece.stop] for piece in (first, last)]
        return torch.cat(own, 3), None, None

    gather.backward = staticmethod(backward)


def one_document() -> None:
    """Joined rows see each other."""
    seen = Part.seen.func  # type: ignore[attr-defined]
    Part.seen = property(lambda part: seen(Part((0, part.boundaries[-1]), part.rank, part.ranks)))  # type: ignore[assignment, method-assign]


def labels_shifted_after() -> None:
    """The last token of a piece has the label of the next piece that its rank has."""
    call = OwnTokens.__call__

    def shifted(self: OwnTokens, rows: list[Row]) -> dict[str, Any]:
        found, labels = call(self, rows), self.collator(rows)["labels"]
        found["shift_labels"] = torch.roll(found[PART].own(labels), -1, 1)
        return found

    OwnTokens.__call__ = shifted  # type: ignore[method-assign]


MUTANTS = {each.__name__: each for each in (unsummed_gradients, one_document, labels_shifted_after)}


if __name__ == "__main__":
    if mutant := os.environ.get("MUTANT"):
        MUTANTS[mutant]()
    if sys.argv[1].startswith("--"):
        runpy.run_path("scripts/train_llama.py", run_name="__main__")  # exits
    torch.distributed.init_process_group("gloo")
    for kind in sys.argv[1:]:
        for form in COLLATORS:
            found = compare(kind, form)
            if torch.distributed.get_rank() == 0:
                print(json.dumps({"model": kind, "form": form, **found}), flush=True)
    torch.distributed.destroy_process_group()

"""TRL's SFTTrainer, fed and evaluated exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from trl.trainer.sft_trainer import SFTTrainer

from indictune.config.chat_arguments import LlamaTrainingArguments
from indictune.data.collation import JoinRows, PadToLongest, Row
from indictune.distributed import sharding
from indictune.evaluation.answer_metrics import RowResults, answer_metrics, flatten_answers
from indictune.evaluation.console_tables import answers_table
from indictune.models.causal import load_trained_causal
from indictune.models.load import Model, runs_own_code
from indictune.models.unpadded import read_unpadded, reads_unpadded
from indictune.train.exact_trainer import ExactTrainer
from indictune.train.task_trainer import Batch

logger = logging.getLogger(__name__)


class LlamaTrainer(ExactTrainer, SFTTrainer):
    """Trains a causal language model to give answers. The loss is TRL's, in pieces that never hold all logits.

    Args:
        model: a causal language model, or an adapter on one.
        args: with `gradient_accumulation_steps` already decided.
        train_dataset: columns `input_ids`, `labels`, `length`; packed, `seq_lengths` too.
        eval_dataset: likewise, with `language` and never packed; or None.
        tokenizer: saved with the model.
        padded: whether the rows of a training micro-batch are padded; packs never are.
    """

    args: LlamaTrainingArguments

    def __init__(
        self,
        model: Model,
        args: LlamaTrainingArguments,
        train_dataset: Dataset,
        eval_dataset: Dataset | None,
        tokenizer: PreTrainedTokenizerBase,
        padded: bool = True,
    ) -> None:
        self._pad_token_id = tokenizer.pad_token_id
        padded = padded and "seq_lengths" not in train_dataset.column_names
        self.padded = padded
        collator = self.collator(evaluating=False)
        of_text = model.config.get_text_config()
        balances = getattr(of_text, "router_aux_loss_coef", None)
        super().__init__(model, args, train_dataset, eval_dataset, tokenizer, padded, data_collator=collator)
        # transformers (5.23) counts a step's tokens for models that take the count: not Gemma 3n, Gemma 4, or code of
        # its own without **kwargs. TRL (1.16) gives it to none: it divides by it itself, else by a micro-batch's own.
        self.model_accepts_loss_kwargs = True
        if balances is not None:
            _leave_out_balancing(of_text, balances)
        if not padded and reads_unpadded(model.config, model.config._attn_implementation):
            read_unpadded(model)
        _keep_trained_weights_in_fp32(model)

    def collator(self, evaluating: bool) -> Callable[[list[Row]], dict[str, Any]]:
        if not (self.padded or evaluating):
            return JoinRows()
        return PadToLongest(self._pad_token_id, "right", with_row_numbers=evaluating)

    def compute_loss(self, *args: Any, **settings: Any) -> Any:
        """A micro-batch's share of the loss. A callback would not see that TRL takes the micro-batch's own mean."""
        if settings.get("num_items_in_batch") is None:
            raise ValueError("The Trainer did not count the tokens of the global batch (num_items_in_batch is None).")
        loss = super().compute_loss(*args, **settings)
        means = self._metrics["train"]
        # TRL (1.16) takes both for 0 where no rank has an answer's token: of the ragged end's empty micro-batches.
        if means["entropy"][-1] == means["mean_token_accuracy"][-1] == 0:
            for name in ("entropy", "mean_token_accuracy"):
                means[name].pop()
                if not means[name]:  # TRL divides by how many there are
                    del means[name]
        return loss

    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        """The summed loss, the tokens that count and the right ones."""
        outputs = model(**inputs, fused_lm_head=True)
        return -outputs.log_probs.float().sum(-1), outputs.label_mask.sum(-1), outputs.is_top1.sum(-1)

    def score(self, dataset: Dataset, results: Sequence[np.ndarray]) -> dict[str, Any]:
        return answer_metrics(cast(RowResults, tuple(results)), dataset["language"][:])

    def flatten(self, block: dict[str, Any]) -> dict[str, float]:
        return flatten_answers(block)

    def tables(self, block: dict[str, Any]) -> str:
        return answers_table(block)

    def unlogged(self) -> dict[str, Any]:
        """TRL's means (1.16): numbers of each micro-batch, and the tokens of all steps; gathered from all ranks."""
        return {"of_micro_batches": self._metrics["train"], "num_tokens": self._total_train_tokens}

    def log_on(self, unlogged: dict[str, Any]) -> None:
        if unlogged:
            self._metrics["train"].clear()
            self._metrics["train"].update(unlogged["of_micro_batches"])
            self._total_train_tokens = unlogged["num_tokens"]

    def reload(self, folder: Path) -> nn.Module:
        trusts = runs_own_code(sharding.bare(self))
        return load_trained_causal(folder, compute_dtype(self.args), trusts, self.trusts_checkpoint, device_map="cpu")


def _leave_out_balancing(config: PreTrainedConfig, coefficient: float) -> None:
    """Keep what a mixture of experts says of the loss that balances them, which TRL (1.16) sets to 0 to leave it out.

    It is a product of a micro-batch's means: a sum over micro-batches depends on how a global batch is dealt.
    """
    config.router_aux_loss_coef = coefficient
    if coefficient:
        logger.warning(
            "The loss that balances the experts (router_aux_loss_coef %g in the model's config.json) is left out: it "
            "depends on how the run is distributed",
            coefficient,
        )


def _keep_trained_weights_in_fp32(model: nn.Module) -> None:
    """Undo what TRL does to an adapter on a quantised base (1.16): it casts the matrices to bf16.

    An update smaller than a 256th of a weight is lost there, and the order in which gradients are summed, which
    differs between strategies, would show in the result.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def compute_dtype(args: LlamaTrainingArguments) -> torch.dtype:
    """In which activations are computed."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else torch.float32

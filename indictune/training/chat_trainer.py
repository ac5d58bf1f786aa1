"""TRL's SFTTrainer, fed and evaluated exactly."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import PreTrainedTokenizerBase
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from indictune import upstream
from indictune.config.chat_arguments import LlamaTrainingArguments, PreferenceArguments, RatedTrainingArguments
from indictune.models.load import Model
from indictune.models.unpadded import read_unpadded
from indictune.run import LAST_BEFORE_A_WAIT, OWN_PROGRESS
from indictune.tasks.chat import Answers, compute_dtype
from indictune.tasks.kto import MarkedAnswers
from indictune.tasks.preferences import Preferences
from indictune.tasks.protocol import Batch, Objective
from indictune.training.exact_trainer import ExactTrainer
from indictune.training.task_trainer import RunContext

# Where TRL's own defaults (1.16) would prepare rows, or let the loss depend on how a batch is split.
_NOT_OF_TRL: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}, "router_aux_loss_coef": 0.0}
_NOT_OF_TRL |= {"max_length": None, "pad_to_multiple_of": None}


class TrlArguments(LlamaTrainingArguments, SFTConfig):
    """Arguments that TRL takes for its own. What `SFTConfig` adds is no field, and stays out of `recipe.yaml`."""


class TrlPairArguments(PreferenceArguments, TrlArguments):
    """The same for pairs of answers. Their fields are in `recipe.yaml`."""


class TrlRatedArguments(RatedTrainingArguments, TrlArguments):
    """The same for answers that are marked good or bad."""


_FOR_TRL: dict[type[LlamaTrainingArguments], type[TrlArguments]] = {
    LlamaTrainingArguments: TrlArguments,
    PreferenceArguments: TrlPairArguments,
    RatedTrainingArguments: TrlRatedArguments,
}


def for_trl(args: LlamaTrainingArguments) -> TrlArguments:
    """Completed arguments for TRL, which gets rows and models that are complete."""
    made: TrlArguments = object.__new__(_FOR_TRL[type(args)])
    vars(made).update(vars(args) | _NOT_OF_TRL)
    return made


class LlamaTrainer(ExactTrainer, SFTTrainer):
    """Trains a causal language model, or an adapter on one, to give answers, or to continue raw text.

    The loss is TRL's, in pieces that never hold all logits. The arguments are those of `ExactTrainer`, and what is
    measured, by default the answers. Packed training rows have a column `seq_lengths` too, and are never padded.
    """

    args: TrlArguments
    objective: Answers

    def __init__(
        self,
        model: Model,
        args: LlamaTrainingArguments,
        train_dataset: Dataset,
        eval_dataset: Dataset | None,
        tokenizer: PreTrainedTokenizerBase,
        padded: bool = True,
        context: RunContext | None = None,
        objective: Objective | None = None,
    ) -> None:
        padded = padded and "seq_lengths" not in train_dataset.column_names
        chosen = objective or Answers(tokenizer.pad_token_id, compute_dtype(args), padded)
        assert isinstance(chosen, Answers)
        self.objective = chosen
        collator = self.objective.collator(evaluating=False)
        of_text = model.config.get_text_config()
        balances = getattr(of_text, "router_aux_loss_coef", None)
        args = for_trl(args)
        super().__init__(model, args, train_dataset, eval_dataset, tokenizer, padded, context, data_collator=collator)
        # transformers (5.23) counts a step's tokens only for models that accept the count. Gemma 3n, Gemma 4, and a
        # model's own code without **kwargs do not. TRL (1.16) divides by the count, or by a micro-batch's without it.
        self.model_accepts_loss_kwargs = True
        upstream.count_tokens_once(self, self.launch.axes.tensor)
        if balances is not None:  # TRL (1.16) sets it to 0 to leave out the loss that balances experts
            of_text.router_aux_loss_coef = balances
        if not padded:
            read_unpadded(model)
        _keep_trained_weights_in_fp32(model)

    def compute_loss(self, *args: Any, **settings: Any) -> Any:
        """A micro-batch's share of the loss. A callback would not see that TRL takes the micro-batch's own mean."""
        if settings.get("num_items_in_batch") is None:
            raise ValueError("The Trainer did not count the tokens of the global batch (num_items_in_batch is None).")
        if self.parallelism.pipeline is not None or self.objective.sums_rows:
            return self._own_loss(*args, **settings)
        loss = super().compute_loss(*args, **settings)  # type: ignore[no-untyped-call]
        OWN_PROGRESS.passed(LAST_BEFORE_A_WAIT)
        means = upstream.means_of_log(self)
        # TRL (1.16) adds a 0 to both means for a micro-batch without an answer's token on any rank.
        if means["entropy"][-1] == means["mean_token_accuracy"][-1] == 0:
            for name in ("entropy", "mean_token_accuracy"):
                means[name].pop()
                if not means[name]:  # TRL divides by how many there are
                    del means[name]
        return loss

    def _own_loss(self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        """The loss of the objective, without TRL's means (1.16) of it.

        TRL gathers these from all ranks, and ranks without the last stage do not take part.
        """
        total = self.objective.total(model, dict(inputs))
        OWN_PROGRESS.passed(LAST_BEFORE_A_WAIT)
        return total / num_items_in_batch * self.launch.data_size

    def before_steps(self) -> None:
        """Measure the reference of answers: no callback comes between the weights and a resume from a checkpoint."""
        if isinstance(self.objective, Preferences):
            from indictune.training.evaluation import look_at_start

            look_at_start(self, self.objective)

    def before_step(self, batches: list[Batch]) -> None:
        if isinstance(self.objective, MarkedAnswers):
            from indictune.training.evaluation import measure_divergence

            measure_divergence(self, self.objective, batches)

    def unlogged(self) -> dict[str, Any]:
        """TRL's means (1.16): numbers of each micro-batch, and the tokens of all steps; gathered from all ranks."""
        return {"of_micro_batches": upstream.means_of_log(self), "num_tokens": upstream.trained_tokens(self)}

    def restore_unlogged(self, unlogged: dict[str, Any]) -> None:
        if unlogged:
            means = upstream.means_of_log(self)
            means.clear()
            means.update(unlogged["of_micro_batches"])
            upstream.set_trained_tokens(self, unlogged["num_tokens"])


def _keep_trained_weights_in_fp32(model: nn.Module) -> None:
    """Undo what TRL does to an adapter on a quantised base (1.16): it casts the matrices to bf16.

    An update smaller than a 256th of a weight is lost there. The order in which gradients are summed differs between
    strategies, and would show in the result.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()

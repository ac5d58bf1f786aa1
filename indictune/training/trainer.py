"""transformers' Trainer with exact batches, loss and evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from indictune.arguments import IndicTrainingArguments
from indictune.data.batching import NO_ROW, EvaluationBatches, TrainingBatches
from indictune.data.collation import IndexedRows, PadToLongest, Row
from indictune.evaluation.metrics import ClassificationMetrics, flatten_for_trainer
from indictune.models.adapters import save_adapter_extras
from indictune.models.loading import Classifier, class_names
from indictune.strategy import sharding
from indictune.training.epochs import EpochShuffle
from indictune.training.loss import ExactLoss, row_losses

Batch = dict[str, torch.Tensor]


class IndicTrainer(Trainer):
    """Trains a classifier of tweets; the result does not depend on how the run is distributed.

    Args:
        model: a sequence classifier with `id2label`.
        args: with `gradient_accumulation_steps` already decided.
        train_dataset: columns `input_ids`, `labels`, `length`.
        eval_dataset: likewise, with `language`; or None.
        tokenizer: saved with the model.
        loss: of a micro-batch.
        callbacks: beside the Trainer's own.
    """

    args: IndicTrainingArguments
    train_dataset: Dataset | None
    eval_dataset: Dataset | None
    loss: ExactLoss
    batches: TrainingBatches

    def __init__(
        self,
        model: Classifier,
        args: IndicTrainingArguments,
        train_dataset: Dataset | None,
        eval_dataset: Dataset | None,
        tokenizer: PreTrainedTokenizerBase,
        loss: ExactLoss,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        sharding.fit_to_model(model)
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            compute_loss_func=loss,
            callbacks=callbacks,
        )
        self.loss = loss
        self.detailed_metrics: dict[str, dict[str, Any]] = {}
        self._class_names = class_names(model.config)
        self._padding = (tokenizer.pad_token_id, tokenizer.padding_side)
        self._evaluated: Dataset = eval_dataset
        if train_dataset is not None:
            self.batches = TrainingBatches(
                num_rows=len(train_dataset),
                global_batch_size=args.global_batch_size,
                accumulation_steps=args.gradient_accumulation_steps,
                rank=args.process_index,
                world_size=args.world_size,
                seed=args.seed if args.data_seed is None else args.data_seed,
            )
            self.add_callback(EpochShuffle(self.batches))

    def get_train_dataloader(self) -> DataLoader[Row]:
        """The rank's own micro-batches. A callback would come too late: accelerate would deal them out a second time,
        repeating rows at a ragged end."""
        return self._loader(self.train_dataset, self.batches, PadToLongest(*self._padding))

    def get_eval_dataloader(self, eval_dataset: Dataset | None = None) -> DataLoader[Row]:
        """Every row once over all ranks. A callback would come too late, for the same reason."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("There are no rows to evaluate on.")
        self._evaluated = dataset
        batches = EvaluationBatches(
            dataset["length"][:], self.args.per_device_eval_batch_size, self.args.process_index, self.args.world_size
        )
        return self._loader(dataset, batches, PadToLongest(*self._padding, with_row_numbers=True))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save, with two things mended for which a callback on saving comes too late.

        Where checkpoints are kept in shards, the Trainer writes nothing here, and then looks whether the folder of the
        best checkpoint is there, each rank for itself (5.23, `_save_checkpoint`). It may be there for one rank and not
        yet for another: seen is one rank loading the best model at the end while the other waited for it, for ever.
        And peft leaves the label names out of an adapter's folder.
        """
        folder = output_dir or str(self.args.output_dir)
        if self.args.should_save:
            Path(folder).mkdir(parents=True, exist_ok=True)
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            save_adapter_extras(self.accelerator.unwrap_model(self.model), folder)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, Any, torch.Tensor]:
        """Keep the predicted label and the loss of each row, [rows] both, and the row's number in place of labels.

        A callback cannot: the Trainer would gather all logits, and average losses over batches instead of rows.
        """
        inputs = self._prepare_inputs(dict(inputs))
        row_numbers, labels = inputs.pop("row_numbers"), inputs.pop("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            logits = model(**inputs).logits
        return None, (logits.argmax(-1), row_losses(logits, labels)), row_numbers

    def evaluation_loop(
        self,
        dataloader: DataLoader[Row],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Score the gathered rows. A callback cannot: only here are they and the dataset they come from both at hand.

        The nested metrics stay in `detailed_metrics[metric_key_prefix]`; the Trainer gets the flat ones.
        """
        output = super().evaluation_loop(dataloader, description, False, ignore_keys, metric_key_prefix)
        predicted, losses = cast(tuple[np.ndarray, np.ndarray], output.predictions)
        detailed = self._score(cast(np.ndarray, output.label_ids), predicted, losses)
        self.detailed_metrics[metric_key_prefix] = detailed
        scalars = {f"{metric_key_prefix}_{name}": value for name, value in flatten_for_trainer(detailed).items()}
        return output._replace(metrics={**(output.metrics or {}), **scalars})

    def _score(self, row_numbers: np.ndarray, predicted: np.ndarray, losses: np.ndarray) -> dict[str, Any]:
        """Metrics of the gathered rows, in the dataset's order, with the rows that stand for nothing taken out."""
        dataset = self._evaluated
        real = row_numbers != NO_ROW
        order = np.argsort(row_numbers[real])
        if not np.array_equal(row_numbers[real][order], np.arange(len(dataset))):
            raise RuntimeError(f"The evaluation gathered {real.sum()} rows, not each of {len(dataset)} rows once.")
        result: dict[str, Any] = ClassificationMetrics(self._class_names).compute(
            predictions=predicted[real][order],
            references=dataset["labels"][:],
            losses=losses[real][order],
            languages=dataset["language"][:],
        )
        return result

    def _loader(
        self, dataset: Dataset, batches: TrainingBatches | EvaluationBatches, collator: PadToLongest
    ) -> DataLoader[Row]:
        return DataLoader(
            IndexedRows(dataset),
            batch_sampler=batches,
            collate_fn=collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
        )

"""The trainer of all tasks: exact batches, exact loss and evaluation, whole models."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from indictune.checkpoint.model_state import ModelState
from indictune.checkpoint.resume import AllRanksReader, can_load_best
from indictune.checkpoint.save import Checkpoints, ManifestFacts
from indictune.checkpoint.snapshots import Snapshots
from indictune.checkpoint.train_state import RandomStates, TrainState
from indictune.config.arguments import IndicTrainingArguments
from indictune.data.batching import TrainingBatches, lengths_of
from indictune.data.collation import Row
from indictune.distributed import devices, sharding
from indictune.distributed.launch import shown_axes
from indictune.distributed.parallelism import Parallelism
from indictune.errors import UserError
from indictune.models.load import Model
from indictune.run import LAST_BEFORE_A_WAIT, OWN_PROGRESS
from indictune.stop_signals import Stopped
from indictune.tasks.protocol import Batch, Objective
from indictune.training.bad_steps import BadSteps, NonFinite
from indictune.training.callbacks.every_step import EpochShuffle, KeepRecords, Throughput
from indictune.training.task_trainer import RunContext, TaskTrainer, drop_if_bad, write_model
from indictune.upstream import unlogged_loss_of

logger = logging.getLogger(__name__)


class ExactTrainer(TaskTrainer):
    """A Trainer whose result does not depend on how the run is distributed.

    Args:
        args: with `gradient_accumulation_steps` already decided.
        train_dataset: columns `input_ids`, `labels`, `length`; None to evaluate only.
        eval_dataset: likewise, with `language`; or None.
        tokenizer: saved with the model.
        padded: whether the rows of a training micro-batch are padded to its longest; else they are joined.
    """

    def __init__(
        self,
        model: Model,
        args: IndicTrainingArguments,
        train_dataset: Dataset | None,
        eval_dataset: Dataset | None,
        tokenizer: PreTrainedTokenizerBase,
        padded: bool,
        context: RunContext | None,
        **settings: Any,
    ) -> None:
        context = context or RunContext()
        self.launch, self.stop_request, self.samples = context.launch, context.stop_request, context.samples
        self.test_dataset = context.test_rows
        self.trusts_checkpoint, self.validation_origins = context.trusts_checkpoint, context.validation_origins
        self.parallelism = Parallelism(model, context.launch, args)
        self.nonfinite, self.detailed_metrics = NonFinite(), {}
        rows: dict[str, Any] = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        super().__init__(model=model, args=args, processing_class=tokenizer, **rows, **settings)
        self.parallelism.set_up(self)
        devices.undo_tf32_of_accelerate(args)
        self.add_callback(KeepRecords(self))
        if train_dataset is not None:
            self.batches = TrainingBatches(
                lengths=lengths_of(train_dataset, padded),
                global_batch_size=args.global_batch_size,
                accumulation_steps=args.gradient_accumulation_steps,
                rank=self.launch.data_rank,
                world_size=self.launch.data_size,
                seed=args.seed if args.data_seed is None else args.data_seed,
                padded=padded,
                tokens=lengths_of(train_dataset),
            )
            strategy = context.launch.strategy
            self.bad_steps = BadSteps(self.batches, context.row_location, context.bad_steps, strategy)
            self.throughput = Throughput(self.batches)
            self.add_callback(EpochShuffle(self.batches))
            self.add_callback(self.throughput)

    def get_tp_size(self) -> int:
        """Ranks that work on the same tokens: the Trainer counts a step's labels on all ranks, and divides by it."""
        return self.launch.axes.pipeline * self.launch.axes.tensor

    def get_train_dataloader(self) -> DataLoader[Row]:
        """The rank's own micro-batches: accelerate would deal them out again, and repeat rows at a ragged end."""
        return self._loader(self.train_dataset, self.batches, self.objective.collator(evaluating=False))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Any]:
        """Move a step's micro-batches to the device. On a resume accelerate (1.15, `skip_first_batches`) replaces the
        loader by a plain one, so the loader cannot do it."""
        on_device = map(self.on_device, OWN_PROGRESS.passing("reading rows", epoch_iterator))
        batches, count = super().get_batch_samples(on_device, num_batches, device)
        self.before_step(cast("list[Batch]", batches))
        return batches, count

    def training_step(self, *args: Any, **settings: Any) -> torch.Tensor:
        """Note the loss on the device: no callback sees it before the Trainer waits for it."""
        step = partial(super().training_step, *args, **settings)
        if self.parallelism.pipeline is not None:
            step = partial(self.parallelism.pipeline.train, self, *args[1:], **settings)
        if not self.has_begun:
            self.has_begun = True
            states, unlogged = RandomStates(), copy.deepcopy(self.unlogged())
            self.parallelism.settle(args[0], step)
            states.restore()
            self.restore_unlogged(unlogged)
        loss = step()
        self.parallelism.average_gradients(self)
        self.nonfinite.note_loss(loss)
        return loss

    def evaluate(
        self, eval_dataset: Dataset | None = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Score every row once: the Trainer averages losses over batches, which depends on the number of processes
        (trl 1.16: 3.7251 on one, 3.7283 on two).

        The nested metrics stay in `detailed_metrics[metric_key_prefix]`; the Trainer gets the flat ones. Where a stop
        or a metric that fails ends an evaluation in training, the step is saved, and a resumed run evaluates it.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("There are no rows to evaluate on.")
        from indictune.training.evaluation import evaluate_rows

        before = RandomStates()  # an evaluation draws one number when it begins
        try:
            if self.is_in_train and self.stop_request.agreed and self.args.save_strategy == SaveStrategy.BEST:
                raise Stopped("stopped before an evaluation.")  # else a step that is not the best is not saved
            metrics = evaluate_rows(self, dataset, metric_key_prefix)
        except (Stopped, UserError) as error:
            if not self.is_in_train:
                raise
            before.restore()
            self.stop_request.evaluation_due = True
            self._save_checkpoint(self.model_wrapped, None)
            raise (self._stopped() if isinstance(error, Stopped) else error) from None
        if self.is_in_train and not self.checkpoints.is_compared():
            self._best_before = self.state.best_metric, self.state.best_global_step
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Add what `write_model` adds: a callback comes only when the checkpoint is committed."""
        folder = Path(output_dir or str(self.args.output_dir))
        write_model(self, folder, partial(super().save_model, str(folder), _internal_call=True))

    def init_hf_repo(self, *args: Any, **settings: Any) -> None:
        """Make the repository by `make_repository`: the Trainer does so before a callback exists."""
        from indictune.hub.publish import make_repository

        make_repository(self, partial(super().init_hf_repo, *args, **settings))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Note the norm of a step's gradients: callbacks do not see it before the optimizer's step."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        if self.parallelism.pipeline is not None:
            norm = self.parallelism.pipeline.grad_norm
        if not self.args.fp16:  # loss scaling finds its scale by infinite gradients, and skips those steps
            self.nonfinite.note(norm)
        if self.args.on_nonfinite != "stop":
            drop_if_bad(self)
        return norm

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint whole or not at all: the Trainer writes in place, and callbacks come after it."""
        self.forget_uncompared_best()
        if not self.checkpoints.is_snapshot:
            self.checkpoints.finish()
        self.check_weights()
        self.store_flos()
        loss, since_step = unlogged_loss_of(self)
        logged = {"task": self.unlogged(), "left_out": self.bad_steps.count, "throughput": self.throughput.counted()}
        self.checkpoints.save({"loss": loss, "since_step": since_step, **logged})
        # At the end of an epoch an evaluation or a save may be due: the run stops after it.
        if self.stop_request.agreed and not self.stop_request.epoch_ends:
            raise self._stopped()

    def _stopped(self) -> Stopped:
        return Stopped(f"stopped after step {self.state.global_step}, which is saved.")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load nothing: the Trainer refuses another strategy's weights, and `_prepare_for_training` restores them."""

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """Prepare, then restore by `TrainState`: the Trainer refuses what another strategy has saved."""
        self.parallelism.prepare(self)
        prepared: tuple[nn.Module, Any] = super()._prepare_for_training(  # type: ignore[no-untyped-call]
            max_steps, train_dataloader, None
        )
        self.before_steps()
        digests, axes = (self.data_digest, self.validation_digest), shown_axes(self.launch)
        facts = ManifestFacts(self.launch.strategy, self.batches.steps_per_epoch, *digests, axes)
        snapshots = Snapshots(self.args) if self.args.snapshot_steps else None
        assert self.lr_scheduler is not None
        state = TrainState(
            model=ModelState.of(self, self.parallelism.pipeline),
            scheduler=self.lr_scheduler,
            scaler=self.accelerator.scaler,
            progress=self.state,
            exportable=self._exportable,
            save_model=lambda folder: self.save_model(str(folder), _internal_call=True),
        )
        self.checkpoints = Checkpoints(self.args, state, facts, self.stop_request, self.disks_group, snapshots)
        # From here on a stop waits: torch (2.13) reports what a read of shards raises as a failure.
        self.stop_request.wait_for_the_step()
        if resume_from_checkpoint is not None:
            self.checkpoints.state.restore(Path(resume_from_checkpoint))
        return prepared

    def _exportable(self) -> list[ExportableState]:
        candidates: list[Any] = [*self.callback_handler.callbacks, self.control]
        return [each for each in candidates if isinstance(each, ExportableState)]

    def check_weights(self) -> None:
        """Raise `NonFiniteLossError` if a weight is NaN or infinite. All ranks must call it."""
        assert self.model is not None
        if not sharding.weights_are_finite(self.model, self.args.device):
            raise self.bad_steps.stop("nonfinite-weights", self.state.global_step, None)

    def load_best(self) -> None:
        """Load the best weights at the end of the training, unless they are damaged."""
        state, best = self.state, self.checkpoints.state.best
        if not self.args.load_best_model_at_end or best is None:
            return
        reader = AllRanksReader(self.args, self.trusts_checkpoint, self.disks_group)
        if can_load_best(best, reader):
            self.checkpoints.state.model.restore_weights(best)
            state.best_model_checkpoint = str(best)
        else:
            logger.warning("The model is that of the last step, %d, and not the best", state.global_step)
            state.best_global_step = state.best_metric = None


class IndicTrainer(ExactTrainer):
    """Trains a model towards an objective. The other arguments are those of `ExactTrainer`."""

    args: IndicTrainingArguments

    def __init__(
        self,
        model: Model,
        args: IndicTrainingArguments,
        train_dataset: Dataset | None,
        eval_dataset: Dataset | None,
        tokenizer: PreTrainedTokenizerBase,
        objective: Objective,
        padded: bool = True,
        context: RunContext | None = None,
    ) -> None:
        self.objective, loss = objective, objective.loss

        def recorded_loss(*args: Any, **settings: Any) -> Any:
            computed = None if loss is None else loss(*args, **settings)
            OWN_PROGRESS.passed(LAST_BEFORE_A_WAIT)
            return computed

        super().__init__(
            model, args, train_dataset, eval_dataset, tokenizer, padded, context, compute_loss_func=recorded_loss
        )
        objective.prepare(model, padded)

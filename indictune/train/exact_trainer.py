"""What the trainers of all tasks share: exact batches, exact evaluation, whole models."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from datasets import Dataset
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from indictune.checkpoint import best, resume, rng_state, save, store
from indictune.config.arguments import IndicTrainingArguments
from indictune.data.batching import EvaluationBatches, TrainingBatches
from indictune.data.collation import IndexedRows, Row, in_order, lengths_of
from indictune.distributed import async_shards, convert_state, cpu_adam, node_disks, sharding, strategy_limits, tf32
from indictune.distributed.communication import set_up_communication
from indictune.hub import push
from indictune.models.load import Model
from indictune.progress import HERE
from indictune.supervise.signals import DeafWorkers, Stopped, StopRequest
from indictune.train.bad_steps import BadSteps, drop_if_bad, scaled
from indictune.train.callbacks.epoch_shuffle import EpochShuffle
from indictune.train.collective_flags import FlagsOnTheirWay
from indictune.train.device_transfer import sent_to_device
from indictune.train.nonfinite import NonFinite
from indictune.train.rehearsal import rehearse

logger = logging.getLogger(__name__)

Batch = dict[str, torch.Tensor]
Collator = Callable[[list[Row]], dict[str, Any]]


class ExactTrainer(Trainer):
    """A Trainer whose result does not depend on how the run is distributed.

    Args:
        model: to train or to evaluate.
        args: with `gradient_accumulation_steps` already decided.
        train_dataset: columns `input_ids`, `labels`, `length`; or None where nothing is trained.
        eval_dataset: likewise, with `language`; or None.
        tokenizer: saved with the model.
        padded: whether the rows of a training micro-batch are padded to its longest; else they are joined.
        settings: of the Trainer below.
    """

    args: IndicTrainingArguments
    train_dataset: Dataset | None
    eval_dataset: Dataset | None
    batches: TrainingBatches
    bad_steps: BadSteps
    strategy: str  # of the launch, in the names of `accelerate_configs/`
    unfinished: save.Unfinished | None = None  # the checkpoint that is being written
    made_up: Path | None = None  # the checkpoint after an evaluation that was due in the one gone on from
    asked_before: FlagsOnTheirWay | None = None  # to stop, at the batch or token before
    grad_norm: torch.Tensor | float = 0.0  # of the last step
    trusts_checkpoint = False  # the user vouches for the pickles of checkpoints
    has_begun = False  # to train
    _is_saving = False

    def __init__(
        self,
        model: Model,
        args: IndicTrainingArguments,
        train_dataset: Dataset | None,
        eval_dataset: Dataset | None,
        tokenizer: PreTrainedTokenizerBase,
        padded: bool,
        **settings: Any,
    ) -> None:
        sharding.fit_to_model(model, args)
        self.padded = padded
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            **settings,
        )
        set_up_communication(self.accelerator, args, model)
        tf32.put_back(args)
        self.nonfinite, self.stop_request = NonFinite(), StopRequest()
        self.detailed_metrics: dict[str, dict[str, Any]] = {}
        self._evaluated: Dataset = eval_dataset
        if train_dataset is not None:
            self.batches = TrainingBatches(
                lengths=lengths_of(train_dataset),
                global_batch_size=args.global_batch_size,
                accumulation_steps=args.gradient_accumulation_steps,
                rank=args.process_index,
                world_size=args.world_size,
                seed=args.seed if args.data_seed is None else args.data_seed,
                padded=padded,
            )
            self.add_callback(EpochShuffle(self.batches))

    @abstractmethod
    def collator(self, evaluating: bool) -> Collator:
        """What makes a micro-batch of rows. For evaluation it adds `row_numbers`, int64 [rows]."""

    @abstractmethod
    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        """What an evaluation keeps of each row of a micro-batch, each [rows]."""

    @abstractmethod
    def score(self, dataset: Dataset, results: Sequence[np.ndarray]) -> dict[str, Any]:
        """The block of `metrics.json` of an evaluation; arguments as in `Objective.score`."""

    @abstractmethod
    def flatten(self, block: dict[str, Any]) -> dict[str, float]:
        """The numbers of a block that the Trainer logs and compares checkpoints by."""

    @abstractmethod
    def tables(self, block: dict[str, Any]) -> str:
        """A block as people read it."""

    def fitted(self) -> dict[str, Any]:
        """Entries for the `config.json` of the saved model, decided by the validation rows."""
        return {}

    def unlogged(self) -> dict[str, Any]:
        """What the task logs beside the loss, since the last logged step, as JSON holds it; the same on all ranks."""
        return {}

    def log_on(self, unlogged: dict[str, Any]) -> None:
        """Go on with what `unlogged` gave to a checkpoint."""

    @abstractmethod
    def reload(self, folder: Path) -> nn.Module:
        """The saved model, on the CPU."""

    def get_train_dataloader(self) -> DataLoader[Row]:
        """The rank's own micro-batches. A callback would come too late: accelerate would deal them out a second time,
        repeating rows at a ragged end."""
        return self._loader(self.train_dataset, self.batches, self.collator(evaluating=False))

    def get_eval_dataloader(self, eval_dataset: Dataset | None = None) -> DataLoader[Row]:
        """Every row once over all ranks. A callback would come too late, for the same reason."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("There are no rows to evaluate on.")
        self._evaluated = dataset
        batches = EvaluationBatches(
            lengths_of(dataset), self.args.per_device_eval_batch_size, self.args.process_index, self.args.world_size
        )
        return self._loader(dataset, batches, self.collator(evaluating=True))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Any]:
        """The micro-batches of a step, on the device. A loader of our own would be lost where a resumed run skips what
        it has seen: accelerate 1.15 makes a plain one of it (`skip_first_batches`)."""
        on_device = HERE.passing("reading rows", (sent_to_device(batch, device) for batch in epoch_iterator))
        samples: tuple[list[Batch], Any] = super().get_batch_samples(on_device, num_batches, device)
        return samples

    def training_step(self, *args: Any, **settings: Any) -> torch.Tensor:
        """A micro-batch's step. A callback sees its loss only after the Trainer has waited for it."""
        step = partial(super().training_step, *args, **settings)
        rehearse(self, args[0], step)
        loss = scaled(self, step)
        self.nonfinite.note_loss(loss)
        return loss

    def compute_loss(self, *args: Any, **settings: Any) -> Any:
        """A micro-batch's loss. No callback comes after it, before the ranks wait for each other."""
        loss: Any = super().compute_loss(*args, **settings)
        self.nonfinite.last = loss.detach()
        HERE.passed("a backward pass")
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm of a step's gradients, noted. A callback would see it only after the step it spoils."""
        norm = self.grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        if not self.args.fp16:  # whose loss scaling finds its scale by infinite gradients, and leaves those steps out
            self.nonfinite.note(norm)
        if self.args.on_nonfinite != "stop":
            drop_if_bad(self)
        return norm

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **settings: Any) -> None:
        """Log, and forget a NaN that was logged: the Trainer (5.23) subtracts the sum from itself, which keeps it."""
        logs = self.control.should_log
        super()._maybe_log_save_evaluate(tr_loss, *args, **settings)
        if logs:
            self._tr_loss.nan_to_num_(0.0, 0.0, 0.0)

    def _get_output_dir(self, trial: Any) -> str:
        """Where checkpoints are, or while one is written: where it is not yet one."""
        folder = str(super()._get_output_dir(trial))
        return save.unfinished_folder(folder) if self._is_saving else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint that is whole or not there. A callback comes when the Trainer has written in its place."""
        save.save_checkpoint(self, partial(self._write_checkpoint, model, trial))

    def _write_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial)
            folder = store.path_of(Path(self._get_output_dir(trial)), self.state.global_step)
        finally:
            self._is_saving = False
        best.name(self)
        if self.args.should_save:
            self.state.save_to_json(str(folder / "trainer_state.json"))
            save.copy_recipe(Path(str(self.args.output_dir)), folder)
        save.write_unlogged(self, folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the scheduler alone where weights and optimizer states are copied, to be written beside the training.
        A callback comes when the Trainer has written them."""
        if not self.args.async_save:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            assert self.lr_scheduler is not None
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load weights, also those that another strategy has saved. A callback comes when the Trainer has refused."""
        if not self.has_begun:  # else a rollback finishes its step, and then the ranks agree
            self.stop_request.wait_for_the_step()  # torch (2.13) makes a failure of what is raised in a read of shards
        checkpoint = Path(resume_from_checkpoint)
        if convert_state.is_foreign(checkpoint, self.args):
            convert_state.load_weights(sharding.bare(self), checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random states to go on with. A callback comes when the Trainer has saved its own."""
        rng_state.save(Path(output_dir), self.args)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load the random states to go on with. A callback would come before they are loaded."""
        rng_state.load(self.made_up or Path(str(checkpoint)), self.args)

    def _load_best_model(self) -> None:
        """Load the best weights, which may be from before another strategy took over. Where they are damaged, the last
        ones stay. A callback comes when the Trainer has read them."""
        checkpoint = Path(str(self.state.best_model_checkpoint))
        if not resume.can_load_best(checkpoint, self.args, self.trusts_checkpoint, self.disks_group):
            logger.warning("The model is that of the last step, %d, and not the best", self.state.global_step)
            self.state.best_global_step = self.state.best_metric = self.state.best_model_checkpoint = None
        elif convert_state.is_foreign(checkpoint, self.args):
            convert_state.load_weights(sharding.bare(self), checkpoint)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer's and the scheduler's states, also where another strategy has saved them."""
        if checkpoint is None or not convert_state.is_foreign(Path(checkpoint), self.args):
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                cpu_adam.complete_states(self)
                strategy_limits.forget_pages(cast(AcceleratedOptimizer, self.optimizer).optimizer)
            return
        assert self.lr_scheduler is not None
        optimizer = cast(AcceleratedOptimizer, self.optimizer).optimizer
        convert_state.load_states(sharding.bare(self), optimizer, Path(checkpoint))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _run_epoch(self, *args: Any, **settings: Any) -> None:
        """An epoch, unless an evaluation that was made up for before it has ended the training."""
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **settings)  # type: ignore[no-untyped-call]

    def _finalize_training(self, *args: Any, **settings: Any) -> TrainOutput:
        """The end, all checkpoints committed: the Trainer (5.23) reads the best before, and deletes the last early."""
        save.finish(self)
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return cast(TrainOutput, super()._finalize_training(*args, **settings))  # type: ignore[no-untyped-call]
        finally:
            self.args.save_total_limit = limit

    def init_hf_repo(self, *args: Any, **settings: Any) -> None:
        """Make the repository. The Trainer does so when it is made, before a callback could come."""
        push.make_repository(self.args, partial(super().init_hf_repo, *args, **settings))

    @cached_property
    def writers(self) -> ProcessGroup | None:
        """The ranks where they write beside the training. All must ask for it."""
        return async_shards.group_of_writers(self.args)

    @cached_property
    def disks_group(self) -> ProcessGroup | None:
        """The ranks that write what other nodes give, where each has a disk of its own. All must ask for it."""
        return node_disks.group_of_disks(self.args)

    @cached_property
    def data_digest(self) -> str:
        """Of the training rows and their order."""
        assert self.train_dataset is not None
        return save.data_digest(self.train_dataset, self.batches)

    @cached_property
    def validation_digest(self) -> str | None:
        """Of the rows that checkpoints are compared on; None where there are none."""
        return None if self.eval_dataset is None else save.validation_digest(self.eval_dataset)

    def _evaluate(self, trial: Any, *args: Any, **settings: Any) -> dict[str, float]:
        """Evaluate in training. Where that is stopped, the step is saved, and evaluated when the run goes on."""
        before = rng_state.RandomStates()  # an evaluation draws one when it begins
        try:
            metrics: dict[str, float] = super()._evaluate(trial, *args, **settings)
        except Stopped:
            before.restore()
            self.stop_request.evaluation_due = True
            self._save_checkpoint(self.model_wrapped, trial)
            raise save.stopped_after(self.state.global_step) from None
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Whether a step is saved under `--save_strategy best`: a new best, or a stop. No callback comes between."""
        is_best = best.is_compared(self) and super()._determine_best_metric(metrics, trial)
        return is_best or self.control.should_save

    def look_for_stop(self, what: str, at_once: bool = False) -> None:
        """End what a rank was asked to stop in, or not, if all would be lost. Known a call later, so none waits.

        Args:
            what: was done, and what going on does, as the message says it.
            at_once: wait for the other ranks: what comes next takes long.

        Raises:
            Stopped: on all ranks.
        """
        last = store.path_of(Path(str(self.args.output_dir)), self.state.global_step)
        is_lost = not self.is_in_train and not last.is_dir()  # in training, the step is saved yet
        now = FlagsOnTheirWay(self.stop_request.asked, is_lost, device=self.args.device)
        before, self.asked_before = now if at_once else self.asked_before, now
        if before is not None and before.read() == [True, False]:
            raise Stopped(f"stopped while {what}.")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save, with what `save.write_model` mends, for which a callback on saving comes too late."""
        folder = Path(output_dir or str(self.args.output_dir))
        save.write_model(self, folder, partial(super().save_model, output_dir, _internal_call))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save weights, tied ones once. A callback comes when they are written."""
        super()._save(output_dir, sharding.tied_once(self.model, state_dict))

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[None, Any, torch.Tensor]:
        """Measure each row, and give its number in place of labels. A callback cannot: the Trainer would gather all
        logits, and average losses over batches; TRL's depends on the number of processes (trl 1.16: 3.7251 on one,
        3.7283 on two)."""
        HERE.passed("evaluating a batch")
        self.look_for_stop("the finished model was evaluated; going on evaluates it again")
        inputs = sent_to_device(inputs, self.args.device)
        row_numbers = inputs.pop("row_numbers")
        with torch.no_grad(), self.compute_loss_context_manager():
            return None, self.measure(model, inputs), row_numbers

    def evaluation_loop(
        self,
        dataloader: DataLoader[Row],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Score the gathered rows. A callback cannot: only here are they and the dataset they come from both at hand.
        The nested metrics stay in `detailed_metrics[metric_key_prefix]`; the Trainer gets the flat ones."""
        self.asked_before = None
        output = super().evaluation_loop(dataloader, description, False, ignore_keys, metric_key_prefix)
        results = in_order(cast(np.ndarray, output.label_ids), output.predictions, len(self._evaluated))
        detailed = self.score(self._evaluated, results)
        self.detailed_metrics[metric_key_prefix] = detailed
        scalars = {f"{metric_key_prefix}_{name}": value for name, value in self.flatten(detailed).items()}
        return output._replace(metrics={**(output.metrics or {}), **scalars})

    def _loader(
        self, dataset: Dataset, batches: TrainingBatches | EvaluationBatches, collator: Collator
    ) -> DataLoader[Row]:
        return DataLoader(
            IndexedRows(dataset),
            batch_sampler=batches,
            collate_fn=collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            multiprocessing_context=DeafWorkers() if self.args.dataloader_num_workers else None,
        )

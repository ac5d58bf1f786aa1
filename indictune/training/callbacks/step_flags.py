"""Callbacks of every step: what the ranks must agree on at its end, and what the Trainer records wrongly."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from indictune.data.batching import TrainingBatches
from indictune.distributed.agreement import DivergedError, check_copies
from indictune.distributed.sharding import has_own_optimizer, unwrapped
from indictune.training.bad_steps import CollectiveFlags, is_below_one, mean_over_ranks
from indictune.training.task_trainer import TaskTrainer
from indictune.training.upstream import forget_nan_loss


class StepFlags(TrainerCallback):
    """Reads each step's flags one step later, and at once before a save or an evaluation.

    A bad number ends the run, and so does loss scaling without a scale. A request to stop makes this step the last
    one, which is saved. An evaluation that is due begins, notices the request by itself, and stays due
    (`ExactTrainer.evaluate`). After the last step of an epoch, all this waits for the end of the epoch. A checkpoint
    that all ranks have written is committed.
    """

    def __init__(self, trainer: TaskTrainer) -> None:
        self.trainer = trainer
        self._unread: deque[tuple[int, torch.Tensor | None, CollectiveFlags]] = deque()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.trainer.bad_steps.resume_after(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer, request = self.trainer, self.trainer.stop_request
        loss, bad = trainer.nonfinite.loss, trainer.nonfinite.take()
        without_scale = is_below_one(trainer.accelerator.scaler)
        known = (False if bad is None else bad, without_scale, request.asked, trainer.checkpoints.is_writing())
        every = trainer.args.snapshot_steps
        control.should_save |= every > 0 and state.global_step % every == 0
        self._unread.append((state.global_step, loss, CollectiveFlags(*known, device=args.device)))
        at_once = control.should_save or control.should_evaluate or control.should_training_stop
        self._read(leave=0 if at_once else 1)
        if request.agreed:
            self._read(leave=0)  # for this step is saved
        # The last step of a run may stand in the middle of an epoch.
        request.epoch_ends = control.should_training_stop or state.global_step % trainer.batches.steps_per_epoch == 0
        if not request.epoch_ends:
            control.should_save |= request.agreed
        elif args.logging_strategy == IntervalStrategy.EPOCH:
            control.should_log = True  # now: a checkpoint of this step does not know that the line is due

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._read(leave=0)
        self.trainer.stop_request.epoch_ends = False
        control.should_save |= self.trainer.stop_request.agreed

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._read(leave=0)

    def _read(self, leave: int) -> None:
        while len(self._unread) > leave:
            step, loss, flags = self._unread.popleft()
            bad, without_scale, asked, writing = flags.read()
            self.trainer.stop_request.agreed |= asked
            if bad or without_scale or not writing:
                self.trainer.checkpoints.finish()
            if bad or without_scale:
                code = "nonfinite-step" if bad else "no-loss-scale"
                raise self.trainer.bad_steps.stop(code, step, mean_over_ranks(loss))


FLAG = "--divergence_check_steps"


class CheckDivergence(TrainerCallback):
    """Compares the ranks' copies every so many steps, and before each save: a checkpoint holds copies that agree."""

    def __init__(self, trainer: TaskTrainer, every: int) -> None:
        self.trainer = trainer
        self.every = every

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if control.should_save or state.global_step % self.every == 0:
            self._check(state.global_step)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if control.should_save:
            self._check(state.global_step)

    def _check(self, step: int) -> None:
        trainer = self.trainer
        assert trainer.optimizer is not None
        own: Any = trainer.optimizer
        optimizer = own.optimizer if has_own_optimizer(trainer) else None
        try:
            check_copies(step, FLAG, unwrapped(trainer), optimizer, trainer.launch)
        except DivergedError:
            trainer.checkpoints.finish()  # it was compared when it was begun
            raise


class KeepRecords(TrainerCallback):
    """Forgets a NaN that was logged, and a best step whose weights are not kept."""

    def __init__(self, trainer: TaskTrainer) -> None:
        self.trainer = trainer

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            forget_nan_loss(self.trainer)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.forget_uncompared_best()

    on_train_end = on_step_begin


class EpochShuffle(TrainerCallback):
    """Tells the batches which epoch begins.

    The Trainer (5.23) does not tell a batch sampler that has no sampler inside: every epoch would repeat the first
    one's order.
    """

    def __init__(self, batches: TrainingBatches) -> None:
        self.batches = batches

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.batches.set_epoch(state.global_step // self.batches.steps_per_epoch)

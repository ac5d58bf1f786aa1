"""Callbacks of every step: what the ranks must agree on, how fast they are, and what the Trainer records wrongly."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psutil
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from indictune.console_text import shown_rate
from indictune.data.batching import TrainingBatches
from indictune.distributed.agreement import DivergedError, check_copies
from indictune.distributed.sharding import has_own_optimizer, unwrapped
from indictune.files import Record, json_line, keep_lines, write_whole
from indictune.training.bad_steps import CollectiveFlags, is_below_one, mean_over_ranks
from indictune.training.task_trainer import TaskTrainer
from indictune.upstream import forget_nan_loss

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StepFlags(TrainerCallback):
    """Reads each step's flags one step later, and at once before a save or an evaluation.

    A bad number ends the run, and so does loss scaling without a scale. A request to stop makes this step the last
    one, which is saved. An evaluation that is due begins, notices the request by itself, and stays due
    (`ExactTrainer.evaluate`). After the last step of an epoch, all this waits for the end of the epoch. A checkpoint
    that all ranks have written is committed.
    """

    trainer: TaskTrainer
    _unread: deque[tuple[int, torch.Tensor | None, CollectiveFlags]] = field(default_factory=deque)
    _began: float = field(default_factory=time.monotonic)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if (record := self.trainer.bad_steps.record) is not None:  # later steps are trained again
            keep_lines(record.path, lambda line: line["step"] <= state.global_step)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer, request = self.trainer, self.trainer.stop_request
        request.step_seconds = time.monotonic() - self._began
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


@dataclass(eq=False)
class CheckDivergence(TrainerCallback):
    """Compares the ranks' copies every so many steps, and before each save: a checkpoint holds copies that agree."""

    trainer: TaskTrainer
    every: int

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
            check_copies(step, "--divergence_check_steps", unwrapped(trainer), optimizer, trainer.launch)
        except DivergedError:
            trainer.checkpoints.finish()  # it was compared when it was begun
            raise


@dataclass(eq=False)
class KeepRecords(TrainerCallback):
    """Forgets a NaN that was logged, and a best step whose weights are not kept.

    Adds `bubble`, the share of the last step in which ranks of a pipeline waited, and `bubble_formula` to the log.
    """

    trainer: TaskTrainer

    def on_log(self, args: TrainingArguments, *_: Any, **more: Any) -> None:
        if "loss" in more["logs"]:
            forget_nan_loss(self.trainer)
            if (pipeline := self.trainer.parallelism.pipeline) is not None:
                more["logs"] |= pipeline.waiting(args.gradient_accumulation_steps)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.forget_uncompared_best()

    on_train_end = on_step_begin


@dataclass(eq=False)
class EpochShuffle(TrainerCallback):
    """Tells the batches which epoch begins.

    The Trainer (5.23) does not tell a batch sampler that has no sampler inside: every epoch would repeat the first
    one's order.
    """

    batches: TrainingBatches

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.batches.set_epoch(state.global_step // self.batches.steps_per_epoch)


_COUNTED = ("rows", "tokens", "tokens_with_padding", "seconds_to_first_step")


@dataclass(eq=False)
class Throughput(TrainerCallback):
    """Counts the rows and tokens of every global batch from its row numbers, so that no tensor is read.

    Attributes:
        rows: trained on, earlier starts of the run included.
        tokens: likewise.
        seconds_before: of training in earlier starts, up to the checkpoint that the run resumes from.
        seconds_to_first_step: from the start of the process, imports included, to the end of the run's first step;
            None before.
    """

    batches: TrainingBatches
    rows: int = 0
    tokens: int = 0
    tokens_with_padding: int = 0
    seconds_before: float = 0.0
    seconds_to_first_step: float | None = None
    _has_stepped = False  # in this process
    _began = 0.0
    _last_lap = (0.0, 0, 0)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()
        self._last_lap = (self._began, self.rows, self.tokens)

    def counted(self) -> dict[str, Any]:
        """The counts until now, for a checkpoint."""
        seconds = self.seconds_before + time.perf_counter() - self._began
        return {"seconds": seconds, **{name: getattr(self, name) for name in _COUNTED}}

    def count_on(self, counted: dict[str, Any]) -> None:
        """Continue from what `counted` gave to a checkpoint; empty if it holds no counts."""
        if counted:
            self.seconds_before = counted["seconds"]
            vars(self).update({name: counted[name] for name in _COUNTED})
            self._last_lap = (self._last_lap[0], self.rows, self.tokens)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            seconds = time.time() - psutil.Process().create_time()
            logger.debug("first step after %.1f s", seconds)
            self.seconds_to_first_step = seconds if self.seconds_to_first_step is None else self.seconds_to_first_step
        epoch, step = divmod(state.global_step - 1, self.batches.steps_per_epoch)
        rows, tokens, tokens_with_padding = self.batches.counts(epoch, step)
        self.rows += rows
        self.tokens += tokens
        self.tokens_with_padding += tokens_with_padding

    @property
    def padding_fraction(self) -> float:
        """Share of the computed tokens that is padding."""
        return 1 - self.tokens / self.tokens_with_padding if self.tokens_with_padding else 0.0

    def lap(self) -> dict[str, float]:
        """`samples_per_second` and `tokens_per_second`, over all ranks, since the last call."""
        then, rows, tokens = self._last_lap
        now = time.perf_counter()
        self._last_lap = (now, self.rows, self.tokens)
        return _rates(self.rows - rows, self.tokens - tokens, now - then)

    def totals(self, seconds: float) -> dict[str, Any]:
        """Time, rates and padding over all starts of the run, of which this one took `seconds`."""
        seconds += self.seconds_before
        return {
            "runtime_s": seconds,
            "time_to_first_step_s": self.seconds_to_first_step,
            **_rates(self.rows, self.tokens, seconds),
            "padding_fraction": self.padding_fraction,
        }


def _rates(rows: int, tokens: int, seconds: float) -> dict[str, float]:
    return {"samples_per_second": rows / seconds, "tokens_per_second": tokens / seconds}


LOGGED = ("loss", "grad_norm", "learning_rate", "bubble", "bubble_formula")


@dataclass(eq=False)
class TrainLog(TrainerCallback):
    """Appends to the log on rank 0. A resumed run drops the lines after its checkpoint.

    Lines that are missing, for example on a new disk, come from the checkpoint, without rates.
    """

    record: Record
    throughput: Throughput
    _began = 0.0, 0  # time and step

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.monotonic(), state.global_step
        if not state.is_world_process_zero:
            return
        path = self.record.path
        done = keep_lines(path, lambda entry: int(entry["step"]) <= state.global_step)
        kept = {entry["step"]: entry for entry in done}
        known = {entry["step"]: entry for entry in state.log_history if "loss" in entry}
        if known.keys() - kept.keys() or not path.exists():
            entries = sorted((known | kept).items())
            write_whole(path, "".join(json_line(entry) for _, entry in entries))

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **more: Any) -> None:
        logs: dict[str, Any] = more["logs"]
        if not state.is_world_process_zero or "loss" not in logs:
            return
        entry = {"step": state.global_step, "epoch": state.epoch}
        entry |= {name: logs[name] for name in LOGGED if name in logs} | self.throughput.lap()
        self.record.append(entry)
        began, first_step = self._began
        a_step = (time.monotonic() - began) / max(1, state.global_step - first_step)  # with its evaluations
        left = timedelta(seconds=round(a_step * (state.max_steps - state.global_step)))
        logger.info(
            "step %d of %d: loss %.4f, %s rows/s, %s left",
            *(state.global_step, state.max_steps, entry["loss"], shown_rate(entry["samples_per_second"]), left),
        )

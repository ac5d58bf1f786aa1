"""What the ranks must agree on at a step's end: a bad number, a request to stop, a checkpoint that is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from indictune.stop_signals import StopRequest
from indictune.train.bad_steps import BadSteps, of_all_ranks
from indictune.train.collective_flags import FlagsOnTheirWay
from indictune.train.nonfinite import NonFinite


class StepFlags(TrainerCallback):
    """Reads each step's flags one step later, and at once before anything is saved or evaluated.

    A bad number ends the run, and so does loss scaling without a scale. A request to stop makes this step the last: it
    is saved. An evaluation that is due begins, sees the request by itself, and is noted as due
    (`ExactTrainer._evaluate`). After the last step of an epoch that is left to the epoch's own end. A checkpoint that
    all ranks have written is committed.

    Args:
        nonfinite: of this rank's micro-batches; nobody else takes it, unless bad steps are left out.
        stop_request: of this rank.
        bad_steps: record and message.
        is_writing: whether this rank still writes a checkpoint beside the training.
        finish: commits it, on all ranks together; where there is none, does nothing.
        has_no_scale: whether loss scaling has found none, known to the host or on the device.
    """

    def __init__(
        self,
        nonfinite: NonFinite,
        stop_request: StopRequest,
        bad_steps: BadSteps,
        is_writing: Callable[[], bool],
        finish: Callable[[], None],
        has_no_scale: Callable[[], bool | torch.Tensor],
    ) -> None:
        self.nonfinite = nonfinite
        self.stop_request = stop_request
        self.bad_steps = bad_steps
        self.is_writing = is_writing
        self.finish = finish
        self.has_no_scale = has_no_scale
        self.batches = bad_steps.batches
        self._on_their_way: deque[tuple[int, torch.Tensor | None, FlagsOnTheirWay]] = deque()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.bad_steps.go_on_after(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        loss, bad = self.nonfinite.loss, self.nonfinite.take()
        known = (False if bad is None else bad, self.has_no_scale(), self.stop_request.asked, self.is_writing())
        self._on_their_way.append((state.global_step, loss, FlagsOnTheirWay(*known, device=args.device)))
        at_once = control.should_save or control.should_evaluate or control.should_training_stop
        self._read(leave=0 if at_once else 1)
        if self.stop_request.agreed:
            self._read(leave=0)  # for this step is saved
        # The last step of a run may stand in the middle of an epoch.
        self.stop_request.epoch_ends = (
            control.should_training_stop or state.global_step % self.batches.steps_per_epoch == 0
        )
        if not self.stop_request.epoch_ends:
            self._stop(control)
        elif args.logging_strategy == IntervalStrategy.EPOCH:
            control.should_log = True  # now, for a checkpoint of this step would not know that the line is due

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._read(leave=0)
        self.stop_request.epoch_ends = False
        self._stop(control)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._read(leave=0)
        self.bad_steps.end()

    def _stop(self, control: TrainerControl) -> None:
        control.should_save |= self.stop_request.agreed

    def _read(self, leave: int) -> None:
        while len(self._on_their_way) > leave:
            step, loss, flags = self._on_their_way.popleft()
            bad, without_scale, asked, writing = flags.read()
            self.stop_request.agreed |= asked
            if bad or without_scale or not writing:
                self.finish()
            if bad:
                raise self.bad_steps.stop(step, of_all_ranks(loss))
            if without_scale:
                raise self.bad_steps.stop_without_scale(step, of_all_ranks(loss))

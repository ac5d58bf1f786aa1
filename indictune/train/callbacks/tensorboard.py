"""Keep one TensorBoard log for a run that is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback


class ContinuedTensorBoard(TensorBoardCallback):
    """Logs to `runs/` at each start, and hides the steps after the checkpoint.

    transformers (5.23) begins a folder at each start, named by time and host: a resumed run would become two runs.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self.logging_dir = self.logging_dir or str(Path(str(args.output_dir), "runs"))
            self.tb_writer = self._SummaryWriter(self.logging_dir, purge_step=state.global_step + 1)
        super().on_train_begin(args, state, control, **kwargs)  # type: ignore[no-untyped-call]

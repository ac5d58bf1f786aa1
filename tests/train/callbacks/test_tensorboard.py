"""A run that goes on goes on in its TensorBoard log too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import TensorBoardCallback

from indictune.train.callbacks.tensorboard import ContinuedTensorBoard
from tests.conftest import FinishedRun
from tests.faults.runs import STEP, Job


def steps(folder: Path, tag: str) -> list[int]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


def test_no_step_is_there_twice_and_none_is_missing(finished_run: FinishedRun, tmp_path: Path) -> None:
    flags = ("--report_to", "tensorboard", "--logging_steps", "1", "--save_steps", "4", "--eval_steps", "4")
    job = Job(finished_run.recipe, tmp_path / "out", flags=flags)
    assert job.start(f"SIGKILL@{STEP}:7").returncode != 0
    assert steps(job.folder / "runs", "train/loss") == [1, 2, 3, 4, 5, 6]
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert steps(job.folder / "runs", "train/loss") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert steps(job.folder / "runs", "eval/loss")[:2] == [4, 8]  # then the finished model's
    assert {path.is_file() for path in (job.folder / "runs").iterdir()} == {True}


def begun_and_ended(callback: Any, folder: Path) -> None:
    args, state, control = TrainingArguments(str(folder), use_cpu=True), TrainerState(), TrainerControl()
    callback.on_train_begin(args, state, control)
    callback.on_train_end(args, state, control)


def test_a_folder_of_ones_own_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "mine"))
    begun_and_ended(ContinuedTensorBoard(), tmp_path / "out")  # type: ignore[no-untyped-call]
    assert not (tmp_path / "out" / "runs").exists()
    assert len(list((tmp_path / "mine").iterdir())) == 1


def test_transformers_begins_a_folder_each_time(tmp_path: Path) -> None:
    """Once it no longer does, `ContinuedTensorBoard` may be needless."""
    begun_and_ended(TensorBoardCallback(), tmp_path / "out")  # type: ignore[no-untyped-call]
    (folder,) = (tmp_path / "out" / "runs").iterdir()
    assert folder.is_dir()

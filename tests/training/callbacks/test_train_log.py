"""`train_log.jsonl`: one JSON object a logged step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from indictune.config.arguments import IndicTrainingArguments
from indictune.data.batching import TrainingBatches
from indictune.files import Record
from indictune.training.callbacks.every_step import Throughput, TrainLog

LOGS = {"loss": 0.5, "grad_norm": 1.25, "learning_rate": 1e-4, "epoch": 0.5}


class Log:
    def __init__(self, folder: Path) -> None:
        self.args = IndicTrainingArguments(output_dir=str(folder), use_cpu=True)
        self.path = folder / "train_log.jsonl"
        throughput = Throughput(TrainingBatches([1] * 5, 5, 1, 0, 1, seed=1))
        throughput.on_train_begin()
        self.callback = TrainLog(Record(self.path), throughput)

    def begin(self, step: int = 0, rank_0: bool = True) -> None:
        state = TrainerState(global_step=step, is_world_process_zero=rank_0)
        self.callback.on_train_begin(self.args, state, TrainerControl())

    def log(self, step: int, logs: dict[str, Any] | None = None, rank_0: bool = True) -> None:
        state = TrainerState(global_step=step, epoch=step / 4, max_steps=8, is_world_process_zero=rank_0)
        self.callback.on_log(self.args, state, TrainerControl(), logs=LOGS if logs is None else logs)

    @property
    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def test_a_line_has_the_keys_of_the_contract(log: Log) -> None:
    log.begin()
    log.log(2)
    (entry,) = log.entries
    assert entry.keys() == {
        "step", "epoch", "loss", "grad_norm", "learning_rate", "tokens_per_second", "samples_per_second",
    }  # fmt: skip
    assert {name: entry[name] for name in ("step", "epoch", "loss", "grad_norm", "learning_rate")} == {
        "step": 2, "epoch": 0.5, "loss": 0.5, "grad_norm": 1.25, "learning_rate": 1e-4,
    }  # fmt: skip


def test_lines_follow_each_other(log: Log) -> None:
    log.begin()
    for step in (2, 4, 6):
        log.log(step)
    assert [entry["step"] for entry in log.entries] == [2, 4, 6]


@pytest.mark.parametrize("other", [{"eval_loss": 1.0, "epoch": 1.0}, {"train_runtime": 3.0}])
def test_logs_that_are_no_step_leave_no_line(log: Log, other: dict[str, Any]) -> None:
    log.begin()
    log.log(2, other)
    assert log.entries == []


def test_only_rank_0_writes(log: Log) -> None:
    log.begin(rank_0=False)
    log.log(2, rank_0=False)
    assert not log.path.exists()


def test_a_new_run_begins_an_empty_log(log: Log) -> None:
    log.path.write_text('{"step": 2}\n{"step": 4}\n')
    log.begin()
    assert log.entries == []


def test_a_resumed_run_drops_what_was_logged_after_its_checkpoint(log: Log) -> None:
    log.path.write_text("".join(f'{{"step": {step}}}\n' for step in (2, 4, 6, 8)))
    log.begin(step=4)
    log.log(6)
    assert [entry["step"] for entry in log.entries] == [2, 4, 6]


@pytest.mark.parametrize("unfinished", ['{"step": 6, "lo', "", "null", "{}"])
def test_a_line_that_a_killed_run_left_unfinished_is_dropped(log: Log, unfinished: str) -> None:
    log.path.write_text(f'{{"step": 2}}\n{unfinished}')
    log.begin(step=4)
    assert log.entries == [{"step": 2}]


def test_a_log_that_cannot_be_written_warns_once(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    log.begin()
    log.log(2)
    whole = log.path.rename(log.path.with_suffix(".whole"))
    log.path.symlink_to("/dev/full")
    log.log(4)
    log.log(6)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == f"{log.path} cannot be written: No space left on device. The run continues."
    log.path.unlink()
    whole.rename(log.path)
    log.log(8)
    assert [entry["step"] for entry in log.entries] == [2, 8]


def test_a_resumed_run_fills_the_hole_that_a_full_disk_left(log: Log) -> None:
    log.path.write_text('{"step": 2, "loss": 0.5, "samples_per_second": 7.0}\n{"step": 8, "loss": 0.1}\n')
    state = TrainerState(global_step=6)
    state.log_history = [
        *({"step": step, "loss": step / 10} for step in (2, 4, 6)), {"step": 6, "eval_loss": 1.0}
    ]  # fmt: skip
    log.callback.on_train_begin(log.args, state, TrainerControl())
    assert log.entries == [
        {"step": 2, "loss": 0.5, "samples_per_second": 7.0},
        {"step": 4, "loss": 0.4},
        {"step": 6, "loss": 0.6},
    ]

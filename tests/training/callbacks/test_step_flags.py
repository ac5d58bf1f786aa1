"""NaN losses stop the run within two steps, and always before a save."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, distribute_tensor
from transformers import TrainerControl, TrainerState

from indictune.config.arguments import IndicTrainingArguments
from indictune.data.batching import TrainingBatches
from indictune.stop_signals import StopRequest
from indictune.training.bad_steps import BadSteps, NonFinite, NonFiniteLossError, is_below_one
from indictune.training.callbacks.every_step import StepFlags

NAN = float("nan")


class Driver:
    """Runs the callback the way the Trainer does: losses of the micro-batches, then the end of the step."""

    def __init__(self, folder: Path, strategy: str = "single") -> None:
        self.is_writing = True
        self.finished_at: list[int] = []
        self.nonfinite = NonFinite()
        # 5 rows: 3 steps an epoch, the last of one row for two micro-batches.
        self.batches = TrainingBatches([1] * 5, 2, 2, rank=0, world_size=1, seed=3)
        self.stop_request = StopRequest()
        bad_steps = BadSteps(self.batches, lambda row: f"t.csv:{row + 2}", None, strategy)
        self.scaler = torch.amp.GradScaler("cpu")
        self.args = IndicTrainingArguments(output_dir=str(folder), use_cpu=True)
        trainer = SimpleNamespace(
            args=self.args,
            nonfinite=self.nonfinite,
            stop_request=self.stop_request,
            bad_steps=bad_steps,
            batches=self.batches,
            checkpoints=SimpleNamespace(is_writing=lambda: self.is_writing, finish=self.finish),
            accelerator=SimpleNamespace(scaler=self.scaler),
        )
        self.callback = StepFlags(cast(Any, trainer))
        self.state = TrainerState()

    def finish(self) -> None:
        self.finished_at.append(self.state.global_step)

    def step(self, *losses: float, **control: bool) -> None:
        for value in losses:
            self.nonfinite.note_loss(torch.tensor(value))
        self.state.global_step += 1
        self.callback.on_step_end(self.args, self.state, TrainerControl(**control))


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(tmp_path)


def test_finite_losses_stop_nothing(driver: Driver) -> None:
    for _ in range(7):
        driver.step(1.0, 2.0)
    driver.callback.on_epoch_end(driver.args, driver.state, TrainerControl())
    driver.callback.on_train_end(driver.args, driver.state, TrainerControl())


def test_the_time_of_a_step_is_known(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for now in (100.0, 142.5):
        monkeypatch.setattr("indictune.training.callbacks.every_step.time.monotonic", lambda now=now: now)
        (driver.callback.on_step_begin if now == 100.0 else driver.step)()
    assert driver.stop_request.step_seconds == 42.5


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_the_step_is_named_one_step_later(driver: Driver, bad: float) -> None:
    driver.step(1.0, 1.0)
    driver.step(1.0, bad)  # on its way: nothing waits for it yet
    with pytest.raises(NonFiniteLossError, match="The loss or the gradient of step 2 is NaN or infinite"):
        driver.step(1.0, 1.0)


@pytest.mark.parametrize("control", ["should_save", "should_evaluate", "should_training_stop"])
def test_it_is_read_at_once_before_a_save_an_evaluation_and_the_end(driver: Driver, control: str) -> None:
    driver.step(1.0, 1.0)
    with pytest.raises(NonFiniteLossError, match="The loss or the gradient of step 2 "):
        driver.step(NAN, 1.0, **{control: True})


def test_a_save_right_after_a_bad_step_names_the_bad_step(driver: Driver) -> None:
    driver.step(NAN, 1.0)
    with pytest.raises(NonFiniteLossError, match="The loss or the gradient of step 1 "):
        driver.step(1.0, 1.0, should_save=True)


def test_it_is_read_before_the_save_that_a_stop_asks_for(driver: Driver) -> None:
    driver.stop_request.asked = True
    driver.step(1.0, 1.0)  # it is known at the end of the next step, which is bad
    with pytest.raises(NonFiniteLossError, match="The loss or the gradient of step 2 "):
        driver.step(NAN, 1.0)


@pytest.mark.parametrize("end", ["on_epoch_end", "on_train_end"])
def test_the_last_step_is_read_at_the_end_of_an_epoch_and_of_the_training(driver: Driver, end: str) -> None:
    driver.step(NAN, 1.0)
    with pytest.raises(NonFiniteLossError, match="The loss or the gradient of step 1 "):
        getattr(driver.callback, end)(driver.args, driver.state, TrainerControl())


@pytest.mark.parametrize("bad_step", [1, 2, 3, 4, 6])
def test_the_message_lists_the_rows_of_that_step(driver: Driver, bad_step: int) -> None:
    for step in range(1, bad_step):
        driver.step(1.0, 1.0)
        assert step < bad_step
    with pytest.raises(NonFiniteLossError) as raised:
        driver.step(NAN, 1.0, should_save=True)
    driver.batches.set_epoch((bad_step - 1) // 3)
    micro_batches = list(driver.batches)
    first = 2 * ((bad_step - 1) % 3)
    rows = [row for micro_batch in micro_batches[first : first + 2] for row in micro_batch if row != -1]
    assert len(rows) == (1 if bad_step % 3 == 0 else 2)
    places = ", ".join(f"t.csv:{row + 2}" for row in rows)
    message = str(raised.value)
    assert message.startswith(f"The loss or the gradient of step {bad_step} is NaN or infinite. ")
    assert f" The loss was nan, the rows {places}. " in message
    assert message.endswith(" [nonfinite-step]")


@pytest.mark.parametrize(
    ("strategy", "policies"), [("ddp", "skip or rollback"), ("zero0", "rollback"), ("zero3_offload", "rollback")]
)
def test_the_message_names_the_policies_of_the_strategy(tmp_path: Path, strategy: str, policies: str) -> None:
    with pytest.raises(NonFiniteLossError, match=f" --on_nonfinite {policies} leaves such steps out"):
        Driver(tmp_path, strategy).step(NAN, should_save=True)


def test_the_flag_of_each_step_is_its_own(driver: Driver) -> None:
    """A step without a loss of this rank's leaves no flag, and takes none over."""
    driver.step(1.0)
    driver.step()
    driver.step(NAN)
    with pytest.raises(NonFiniteLossError, match="The loss or the gradient of step 3 "):
        driver.step(1.0)


def overflowing(scaler: torch.amp.GradScaler) -> None:
    """A step whose gradient is infinite."""
    weight = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    scaler.scale(weight * torch.inf).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0


def test_loss_scaling_that_finds_no_scale_ends_the_run(driver: Driver) -> None:
    """From 2**16 down to 1, and a step further."""
    for _ in range(16):
        overflowing(driver.scaler)
        driver.step(1.0)
    driver.callback.on_epoch_end(driver.args, driver.state, TrainerControl())
    overflowing(driver.scaler)
    driver.step(1.0)
    assert driver.finished_at == []
    with pytest.raises(NonFiniteLossError) as raised:
        driver.step(1.0)
    assert driver.finished_at == [18]
    message = str(raised.value)
    assert "at step 17 " in message
    assert "The loss was 1, the rows t.csv:" in message
    assert message.endswith("[no-loss-scale]")


def test_a_run_that_scales_nothing_has_lost_no_scale() -> None:
    assert is_below_one(None) is False
    assert is_below_one(torch.amp.GradScaler("cpu", enabled=False)) is False


class TestNonFinite:
    @staticmethod
    def noted(*values: float) -> NonFinite:
        nonfinite = NonFinite()
        for value in values:
            nonfinite.note(torch.tensor(value))
        return nonfinite

    def test_there_is_no_flag_before_a_loss(self) -> None:
        assert NonFinite().take() is None

    def test_finite_losses_leave_a_false_flag(self) -> None:
        nonfinite = self.noted(1.0, 2.0)
        flag = nonfinite.take()
        assert flag is not None
        assert not flag.item()

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("position", [0, 1, 2])
    def test_one_bad_micro_batch_of_a_step_is_enough(self, bad: float, position: int) -> None:
        values = [1.0, 1.0, 1.0]
        values[position] = bad
        nonfinite = self.noted(*values)
        flag = nonfinite.take()
        assert flag is not None
        assert flag.item()

    @pytest.mark.parametrize(("norm", "is_bad"), [(1.5, False), (float("nan"), True), (float("inf"), True)])
    def test_a_norm_is_a_number_under_deepspeed(self, norm: float, is_bad: bool) -> None:
        nonfinite = self.noted(1.0)
        nonfinite.note(norm)
        flag = nonfinite.take()
        assert flag is not None
        assert flag.item() == is_bad

    @pytest.mark.parametrize("norm", [1.5, float("nan"), float("inf")])
    def test_a_norm_is_spread_over_the_ranks_under_fsdp2(self, norm: float) -> None:
        distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            spread = distribute_tensor(torch.tensor(norm), mesh, [Partial()])
            nonfinite = NonFinite()
            nonfinite.note(spread)
            flag = nonfinite.take()
        finally:
            distributed.destroy_process_group()
        assert type(flag) is torch.Tensor  # of this rank alone
        assert flag.item() == (norm != 1.5)

    def test_a_flag_is_taken_once(self) -> None:
        nonfinite = self.noted(float("nan"))
        nonfinite.take()
        assert nonfinite.take() is None
        nonfinite.note(torch.tensor(1.0))
        flag = nonfinite.take()
        assert flag is not None
        assert not flag.item()


def test_a_checkpoint_is_finished_a_step_after_all_ranks_have_written_it(driver: Driver) -> None:
    for _ in range(3):
        driver.step(1.0, 2.0)
    assert driver.finished_at == []
    driver.is_writing = False
    driver.step(1.0, 2.0)
    driver.is_writing = True
    assert driver.finished_at == []
    driver.step(1.0, 2.0)
    driver.step(1.0, 2.0)
    assert driver.finished_at == [5]


def test_a_checkpoint_is_finished_before_a_bad_number_ends_the_run(driver: Driver) -> None:
    driver.step(NAN, 1.0)
    with pytest.raises(NonFiniteLossError):
        driver.step(1.0, 1.0)
    assert driver.finished_at == [2]

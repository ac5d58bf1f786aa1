"""`indictune train --strategy auto`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from indictune.cli import main
from indictune.commands.plan import choose_strategy
from indictune.errors import UserError
from indictune.planning import hardware

RECIPE = ["--config", "recipes/sentiment/demo.yaml", "--output_dir", "out"]
GB = 10**9


def on_gpus(monkeypatch: pytest.MonkeyPatch, count: int, memory: float) -> None:
    """Let this machine seem to have GPUs."""
    properties = type("Properties", (), {"total_memory": memory})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L40S")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def test_a_cpu_runs_one_process_with_the_micro_batch_of_the_recipe() -> None:
    choice = choose_strategy("classification", RECIPE, None)
    assert (choice.strategy, choice.processes, choice.flags) == ("single_gpu", 1, {})


def test_several_processes_of_a_cpu_share_the_rows() -> None:
    choice = choose_strategy("classification", RECIPE, 2)
    assert (choice.strategy, choice.processes, choice.flags) == ("ddp", 2, {})
    assert choose_strategy("classification", RECIPE, 8).flags == {"per_device_train_batch_size": "4"}


def test_all_gpus_take_the_first_row_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 4, 48 * GB)
    choice = choose_strategy("classification", RECIPE, None)
    assert (choice.strategy, choice.processes) == ("ddp", 4)
    assert choice.flags == {"per_device_train_batch_size": "8"}
    assert "48.0 GB" in choice.reason


def test_a_micro_batch_that_was_typed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 4, 48 * GB)
    assert choose_strategy("classification", [*RECIPE, "--per_device_train_batch_size", "2"], None).flags == {}


def test_a_machine_that_is_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 1, 0.1 * GB)
    with pytest.raises(UserError, match="plan-nothing-fits"):
        choose_strategy("classification", RECIPE, None)


def test_the_longest_name_of_a_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, 2, 48 * GB)
    assert hardware.this_machine(2, 2).flops == 362e12  # an L40S, not an L4


def test_train_says_what_it_takes_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["recipes/sentiment/demo.yaml", "--strategy", "auto", "--output_dir", str(tmp_path / "out"), "--dry_run"]
    assert main(["train", *words]) == 0
    captured = capsys.readouterr()
    (line,) = [each for each in captured.err.splitlines() if "--strategy auto takes" in each]
    assert "--strategy single_gpu --num_processes 1" in line
    assert "an estimated" in line
    assert "single on 1 process(es)" in captured.out

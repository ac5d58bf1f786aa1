"""What a run draws goes on where it was, on each of the GPUs that a process draws on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from indictune.checkpoint import train_state
from indictune.checkpoint.train_state import RandomStates


class Gpus:
    """The generators of a machine with GPUs, which stand on the host there too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, current: int = 0) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
        monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)
        monkeypatch.setattr("torch.cuda.current_device", lambda: current)
        monkeypatch.setattr("torch.cuda.get_rng_state", lambda gpu=current: self.generators[gpu].get_state())
        monkeypatch.setattr(
            "torch.cuda.set_rng_state", lambda state, gpu=current: self.generators[gpu].set_state(state)
        )

    def draw(self) -> list[float]:
        """A number of each."""
        return [torch.rand((), generator=each).item() for each in self.generators]


@pytest.fixture
def args(tmp_path: Path) -> TrainingArguments:
    return TrainingArguments(str(tmp_path), use_cpu=True)


def as_one_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)


@pytest.mark.parametrize("gpus", [0, 1, 3])
def test_one_process_goes_on_on_all_gpus_that_its_layers_may_be_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: TrainingArguments, gpus: int
) -> None:
    """`--device_map` spreads them."""
    machine = Gpus(monkeypatch, gpus)
    machine.draw()
    train_state.save_generators(tmp_path, args)
    drawn = machine.draw(), torch.rand(()).item()
    again = Gpus(monkeypatch, gpus)
    train_state.restore_generators(tmp_path, args, True)
    assert (again.draw(), torch.rand(()).item()) == drawn
    before = RandomStates()
    drawn_since = again.draw()
    before.restore()
    assert again.draw() == drawn_since


@pytest.mark.parametrize(("wrote", "goes_on"), [(3, 2), (2, 3), (2, 0), (0, 2)])
def test_it_goes_on_on_those_that_are_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: TrainingArguments, wrote: int, goes_on: int
) -> None:
    machine = Gpus(monkeypatch, wrote)
    machine.draw()
    train_state.save_generators(tmp_path, args)
    drawn = machine.draw()
    afresh = Gpus(monkeypatch, goes_on).draw()
    again, both = Gpus(monkeypatch, goes_on), min(wrote, goes_on)
    train_state.restore_generators(tmp_path, args, True)
    assert again.draw() == drawn[:both] + afresh[both:]


@pytest.mark.parametrize("current", [0, 1])
def test_a_rank_of_several_keeps_to_its_own_gpu(monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    as_one_of_two_ranks(monkeypatch)
    machine = Gpus(monkeypatch, 2, current)
    states = RandomStates()
    first = machine.draw()
    second = machine.draw()
    states.restore()
    third = machine.draw()
    assert third[current] == first[current]
    assert third[1 - current] not in (first[1 - current], second[1 - current])


def test_ranks_of_another_split_draw_alike(tmp_path: Path, args: TrainingArguments) -> None:
    """Whatever each of them has drawn before."""
    folder = tmp_path / "checkpoint-4"
    train_state.save_generators(folder, args)
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        train_state.restore_generators(folder, args, False)
        drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[1]
    train_state.restore_generators(folder.rename(tmp_path / "checkpoint-5"), args, False)
    assert torch.rand(()).item() != drawn[0]

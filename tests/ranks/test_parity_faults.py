"""`indictune parity` finds each planted fault on 2 and 3 ranks, and names its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from indictune.parity_traces import TRACE, RunComparison, Traced, compare_traces
from tests.ranks import mutants
from tests.ranks.launching import SCRIPT, python, torchrun, train

pytestmark = pytest.mark.slow

# SGD, because AdamW hides a factor of the gradient; a norm that every step is clipped to.
STEPS = ("--max_steps", "4", "--save_strategy", "no", "--warmup_steps", "0", "--bf16", "false")
FLAGS = (*STEPS, "--optim", "sgd", "--learning_rate", "0.05", "--max_grad_norm", "0.1")
ROWS = ("--per_device_train_batch_size", "4")
FAULTS = {
    "scaled_loss": "loss scaling: at step 1 the loss is {ranks} times and the gradient {ranks} times",
    "scaled_gradients": "loss scaling: at step 1 the loss is 1 times and the gradient 2 times",
    "shuffled_rank": "data order: step 1 has other rows",
    "other_start": "initial weights: classifier.",
    "unclipped": "clipping: step 1 leaves a norm of",
}


def traced(folder: Path, job: Path, ranks: int, *flags: str, mutant: str | None = None) -> Traced:
    variables = {"INDICTUNE_PARITY_TRACE": str(folder / TRACE), "MUTANT": str(mutant)}
    launcher = python() if ranks == 1 else torchrun(ranks)
    script = SCRIPT if mutant is None else mutants.__file__
    folder.mkdir()
    train(launcher, folder, "--config", str(job), *FLAGS, *ROWS, *flags, script=script, **variables)
    return Traced(mutant or "sound", folder)


@pytest.fixture(scope="module")
def reference(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return traced(tmp_path_factory.mktemp("one") / "run", job, 1)


def compared(one: Traced, other: Traced) -> RunComparison:
    return compare_traces(one, other, 1e-4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sound_run_agrees(reference: Traced, job: Path, tmp_path: Path, ranks: int) -> None:
    found = compared(reference, traced(tmp_path / "run", job, ranks))
    assert (found.agrees, found.causes, found.processes) == (True, (), ranks)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_planted_fault_is_named(reference: Traced, job: Path, tmp_path: Path, fault: str, ranks: int) -> None:
    found = compared(reference, traced(tmp_path / "run", job, ranks, mutant=fault))
    assert not found.agrees
    assert len(found.causes) == 1, found.causes
    assert found.causes[0].startswith(FAULTS[fault].format(ranks=ranks))


@pytest.mark.parametrize("ranks", [2, 3])
def test_masks_of_another_seed_are_named(job: Path, tmp_path: Path, ranks: int) -> None:
    dropout = ("--dropout", "0.1")
    one = traced(tmp_path / "one", job, 1, *dropout)
    found = compared(one, traced(tmp_path / "run", job, ranks, *dropout, mutant="other_masks"))
    assert found.causes == [f"dropout: rank {ranks - 1} has another seed at step 1"]


def test_dropout_and_half_precision_are_named(reference: Traced, job: Path, tmp_path: Path) -> None:
    found = compared(reference, traced(tmp_path / "run", job, 2, "--dropout", "0.1", "--bf16", "true"))
    assert [cause.partition(":")[0] for cause in found.causes] == ["dropout", "precision"]
    assert "compute bf16 instead of float32" in found.causes[1]

"""A run goes on under another strategy or number of processes as if nothing had changed, or says what to type."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.ranks import conftest, test_llama
from tests.ranks.launching import (
    SCRIPT,
    Run,
    accelerate,
    distance,
    python,
    start,
    train,
)

NOTING = "tests/faults/noting.py"
LLAMA = test_llama.SCRIPT
ROWS = 101
STOPPED_AT = 4  # in the first of three epochs of 5 steps; the last step of each has 5 rows
STEPS = 12
LOSS = 1e-5
OF_THE_CHANGE = 1e-3
slow = pytest.mark.slow

# The best loss is that of step 4, which the other launch saved and this one ends with: it rises from there.
FLAGS = (
    *("--max_steps", str(STEPS), "--save_steps", "4", "--eval_strategy", "steps", "--eval_steps", "4"),
    *("--load_best_model_at_end", "true", "--metric_for_best_model", "loss"),
)


class Runs:
    """Runs of one recipe; the first run under a launch is kept.

    Args:
        recipe: of all.
        folder: gets them.
        script: that trains.
        flags: of all.
    """

    def __init__(self, recipe: Path, folder: Path, script: str, *flags: str) -> None:
        self.recipe = recipe
        self.folder = folder
        self.command = [script, "--config", str(recipe), *FLAGS, *flags]
        self.unbroken: dict[tuple[str, int], Run] = {}

    def under(self, strategy: str, ranks: int) -> Run:
        """The run that was never stopped."""
        if (strategy, ranks) not in self.unbroken:
            self.unbroken[strategy, ranks] = self._train(strategy, ranks, self.folder / f"{strategy}-{ranks}")
        return self.unbroken[strategy, ranks]

    def stopped(self, source: Run, folder: Path) -> Path:
        """What a run that was stopped after step 4 has left."""
        later = [f"checkpoint-{step}" for step in range(STOPPED_AT + 1, STEPS + 1)]
        models = ("model.safetensors", "adapter_model.safetensors")
        shutil.copytree(
            source.folder, folder, ignore=shutil.ignore_patterns(*later, "metrics.json", "rows", "whole.pt")
        )
        for name in models:
            (folder / name).unlink(missing_ok=True)
        return folder

    def go_on(self, source: Run, strategy: str, ranks: int, folder: Path, mutant: str = "") -> Run:
        """The same run, stopped after step 4 and resumed under another launch."""
        self.stopped(source, folder)
        return self._train(strategy, ranks, folder, "--resume_from_checkpoint", "auto", mutant=mutant)

    def _train(self, strategy: str, ranks: int, folder: Path, *flags: str, mutant: str = "") -> Run:
        (folder / "rows").mkdir(parents=True)
        launcher = python() if strategy == "single" else accelerate(strategy, ranks)
        variables = {"ROWS": str(folder / "rows"), "MUTANT": mutant}
        return train(launcher, folder, *self.command, *flags, script=NOTING, **variables)


def rows_of(run: Run) -> list[list[int]]:
    """The training rows that each rank of a run has read."""
    files = sorted((run.folder / "rows").glob(f"{ROWS}-*"))
    return [[row for row in map(int, path.read_text(encoding="utf-8").split()) if row >= 0] for path in files]


def largest_difference(one: Run, other: Run) -> float:
    """Of the losses of the same step."""
    assert len(one.log) == len(other.log) == STEPS
    return max(abs(a - b) for a, b in zip(one.series("loss"), other.series("loss"), strict=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A classifier, whose active vocabulary is trained."""
    recipe = conftest.write_job(tmp_path_factory.mktemp("job"))
    return Runs(recipe, tmp_path_factory.mktemp("runs"), SCRIPT)


FAST = [("ddp", 2, "single", 1), pytest.param("single", 1, "ddp", 2, marks=pytest.mark.more)]
SLOW = [
    *(("ddp", 2, "fsdp2", 2), ("fsdp2", 2, "single", 1)),
    *(("single", 1, "fsdp2", 2), ("single", 1, "fsdp2", 1), ("fsdp2", 2, "ddp", 2)),
    *(("fsdp2", 2, "fsdp2", 1), ("fsdp2", 1, "fsdp2", 2), ("fsdp2", 1, "single", 1)),
]


@pytest.mark.parametrize(
    ("before", "processes", "after", "ranks"), [*FAST, *(pytest.param(*case, marks=slow) for case in SLOW)]
)
def test_a_run_goes_on_under_another_launch(
    runs: Runs, tmp_path: Path, before: str, processes: int, after: str, ranks: int
) -> None:
    unbroken = runs.under(before, processes)
    resumed = runs.go_on(unbroken, after, ranks, tmp_path / "out")
    assert (resumed.metrics["strategy"], resumed.metrics["world_size"]) == (after, ranks)

    assert largest_difference(unbroken, resumed) <= LOSS
    for name in ("learning_rate", "epoch"):
        assert resumed.series(name) == unbroken.series(name)
    read = rows_of(unbroken)
    counts = Counter(chain(*read))
    assert set(counts) == set(range(ROWS))
    assert set(counts.values()) == {2, 3}  # two epochs of 5 steps, and two steps
    before_the_stop = Counter(chain(*(rows[: 24 * STOPPED_AT // processes] for rows in read)))
    assert before_the_stop + Counter(chain(*rows_of(resumed))) == counts

    assert active_rows(resumed, STEPS) == active_rows(unbroken, STEPS) > 500
    moved = distance(unbroken.weights_at(STEPS), unbroken.weights_at(STOPPED_AT))
    assert distance(resumed.weights_at(STEPS), unbroken.weights_at(STEPS)) <= OF_THE_CHANGE * moved
    # The best model, which the other launch saved.
    assert distance(resumed.weights, unbroken.weights) == 0
    log = (resumed.folder / "logs/rank-0.log").read_text(encoding="utf-8")
    assert "The model is that of checkpoint-4, the best by loss" in log
    message = f"checkpoint-4 was written by {before} x {processes}, and {after} x {ranks} resumes it"
    assert log.count(message) == 1


@slow
@pytest.mark.parametrize(
    ("before", "after"),
    [(f"{stage}{a}", f"{stage}{b}") for stage in ("zero2", "zero3") for a, b in (("", "_offload"), ("_offload", ""))],
)
def test_what_zero_offloads_may_change(runs: Runs, tmp_path: Path, before: str, after: str) -> None:
    unbroken = runs.under(before, 2)
    resumed = runs.go_on(unbroken, after, 2, tmp_path / "out")
    assert resumed.metrics["strategy"] == after
    assert largest_difference(unbroken, resumed) <= LOSS
    log = (resumed.folder / "logs/rank-0.log").read_text(encoding="utf-8")
    assert f"was written by {before} x 2, and {after} x 2 resumes it" in log


def active_rows(run: Run, step: int) -> int:
    return len(run.row_ids_at(step))


@pytest.mark.parametrize(
    ("before", "mutant"),
    [
        pytest.param("fsdp2", "fresh_states", marks=slow),
        pytest.param("ddp", "fresh_states", marks=slow),
        pytest.param("fsdp2", "fresh_weights", marks=slow),
    ],
)
def test_a_run_that_forgets_something_differs_from_the_unbroken_one(
    runs: Runs, tmp_path: Path, before: str, mutant: str
) -> None:
    unbroken = runs.under(before, 2)
    assert largest_difference(unbroken, runs.go_on(unbroken, "single", 1, tmp_path / "out", mutant)) > 10 * LOSS


@slow
@pytest.mark.parametrize(
    ("before", "processes", "after", "ranks"),
    [("single", 1, "fsdp2", 2), ("fsdp2", 2, "single", 1), ("fsdp2", 2, "ddp", 2), ("ddp", 2, "single", 1)],
)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_language_model_goes_on_under_another_launch(
    llama_runs: dict[str, Runs], tmp_path: Path, method: str, before: str, processes: int, after: str, ranks: int
) -> None:
    """Of an adapted model, the adapter's weights and states go over."""
    unbroken = llama_runs[method].under(before, processes)
    resumed = llama_runs[method].go_on(unbroken, after, ranks, tmp_path / "out")
    assert largest_difference(unbroken, resumed) <= LOSS
    name = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    assert distance(load_file(resumed.folder / name), load_file(unbroken.folder / name)) == 0


@pytest.fixture(scope="module")
def llama_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    """6 steps an epoch, so that step 4 is amid the first. No training row has the answer's letter: its loss rises."""
    recipe = test_llama.write_job(tmp_path_factory.mktemp("llama_job"))
    chat = {"messages": [{"role": "user", "content": "Γράψε κάτι."}, {"role": "assistant", "content": 40 * "Ω"}]}
    (recipe.parent / "validation.jsonl").write_text(f"{json.dumps(chat)}\n", encoding="utf-8")
    flags = ("--global_batch_size", "8", "--per_device_train_batch_size", "2")
    folder = tmp_path_factory.mktemp("llama_runs")
    return {
        method: Runs(recipe, folder / method, LLAMA, *test_llama.METHODS[method], *flags)
        for method in ("lora", "full")
    }


@slow
def test_the_states_of_another_optimizer_are_refused(runs: Runs, tmp_path: Path) -> None:
    folder = runs.stopped(runs.under("fsdp2", 2), tmp_path / "out")
    assert refusal(runs, folder, "--optim", "sgd").startswith(
        "--optim sgd: checkpoint-4 was written with adamw_torch_fused, "
    )


def refusal(runs: Runs, folder: Path, *flags: str, **variables: str) -> str:
    """What a run says that does not go on from a checkpoint."""
    given = [*runs.command, *flags, "--output_dir", str(folder), "--resume_from_checkpoint", "auto"]
    result = start([*python(), *given], variables)
    assert result.returncode == 2, result.stderr
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == "user_error"
    assert status["message"] in result.stderr
    return str(status["message"])


@pytest.mark.more
def test_zero_does_not_resume_what_torch_keeps(runs: Runs, tmp_path: Path) -> None:
    folder = runs.stopped(runs.under("single", 1), tmp_path / "out")
    message = refusal(runs, folder, "--deepspeed", "ds_configs/zero2.json", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    assert "[resume-other-strategy]" in message
    assert f"--resume_from_checkpoint {folder / 'checkpoint-4'} was written by single x 1" in message


@pytest.mark.more
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--global_batch_size", "12"), "--global_batch_size 12: checkpoint-4 was written with 24"),
        (("--seed", "1"), "it was trained on other rows, or in another order"),
        (("--train_file", "{reversed}"), "it was trained on other rows, or in another order"),
    ],
)
def test_other_rows_are_refused(runs: Runs, tmp_path: Path, flags: tuple[str, ...], why: str) -> None:
    """Also under a launch that could go on."""
    folder = runs.stopped(runs.under("ddp", 2), tmp_path / "out")
    lines = (runs.recipe.parent / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "reversed.jsonl").write_text("".join(reversed(lines)), encoding="utf-8")
    given = [flag.format(reversed=tmp_path / "reversed.jsonl") for flag in flags]
    if "--train_file" in given:  # which drops all files of the recipe
        given += ["--validation_file", str(runs.recipe.parent / "validation.jsonl")]
    assert why in refusal(runs, folder, *given)

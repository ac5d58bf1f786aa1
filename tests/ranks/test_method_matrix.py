"""Every method and feature under every strategy file gives the run of one process, or is refused before it starts.

`make matrix` runs all of it, and writes the outcomes to `docs/method_matrix.json` and `docs/strategies.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from docs import method_matrix
from docs.method_matrix import PASSES
from tests.ranks.conftest import starter
from tests.ranks.launching import Run, accelerate, distance, train
from tests.ranks.matrix import (
    BF16,
    FILES,
    KINDS,
    METHODS,
    STEPS,
    launched_file,
    ranks_of,
    refusals,
)
from tests.ranks.test_evaluation import numbers
from tests.ranks.test_llama import trained_weights
from tests.ranks.test_resume import stopped_copy

# Relative, of losses and gradient norms. bf16 rounds to 8 bits.
BOUND = {"full": 1e-4, "LoRA": 1e-4, "QLoRA": 1e-2, "bf16": 1e-2}
OF_THE_CHANGE = 1e-3

# `make test` runs QUICK; `make test-more` runs MORE too. The others are slow.
QUICK = {("LLaMA", "zero2", "features")}
MORE = {("classifier", "zero2", "features"), ("classifier", "fsdp2", "full"), ("classifier", "tp", "full")}
MORE |= {("LLaMA", strategy, "full") for strategy in ("pipeline", "zero3")}

Note = Callable[[str, object], None]


def marks_of(cell: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    return [] if cell in QUICK else [pytest.mark.more if cell in MORE else pytest.mark.slow]


def every(*names: str) -> list[Any]:
    """Kind, file and one of the names, in groups that share runs."""
    return [
        pytest.param(
            *each,
            marks=[*marks_of(each), pytest.mark.xdist_group(f"{each[0]} {each[1]}")],
            id="-".join(each),
        )
        for each in product(KINDS, FILES, names)
    ]


class Runs:
    """The runs of one task; the same call gives the same run."""

    def __init__(self, kind: str, factory: pytest.TempPathFactory) -> None:
        self.kind = kind
        self.recipe = KINDS[kind].write_job(factory.mktemp("job"))
        self.folder = factory.mktemp("files")
        self._start = starter(self.recipe, factory, KINDS[kind].script)

    def of_one_process(self, *flags: str) -> Run:
        return self._start("single", 1, "--max_steps", str(STEPS), *flags)

    def under(self, file: str, *flags: str) -> Run:
        return self._start(launched_file(file, self.folder), ranks_of(file), "--max_steps", str(STEPS), *flags)

    def resumed(self, file: str, stopped: Path, *flags: str) -> Run:
        command = accelerate(launched_file(file, self.folder), ranks_of(file))
        flags = ("--config", str(self.recipe), "--max_steps", str(STEPS), *flags, "--resume_from_checkpoint", "auto")
        return train(command, stopped, *flags, script=KINDS[self.kind].script)

    def with_features(self, file: str) -> tuple[str, ...]:
        """Flags of a run of all weights, with all features that the file does not refuse."""
        job, codes = KINDS[self.kind], refusals(file, self.kind, self.recipe)
        features = [each.flags for name, each in job.features.items() if codes[name] is None]
        return (*job.methods["full"], *(flag for flags in features for flag in flags))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    return {kind: Runs(kind, tmp_path_factory) for kind in KINDS}


def noted(note: Note, runs: Runs, file: str, *columns: str) -> bool:
    """Note the outcomes of cells, which count if the test passes. Whether any of them can run."""
    codes = refusals(file, runs.kind, runs.recipe)
    for column in columns:
        note(f"{runs.kind}/{file}/{column}", codes[column] or PASSES)
    return not all(codes[column] for column in columns)


def departures(one: Run, other: Run, bound: float) -> list[str]:
    """Where the curve or the evaluation of a run leaves that of another one."""
    found = []
    for name in ("loss", "grad_norm"):
        for step, (a, b) in enumerate(zip(one.series(name), other.series(name), strict=True), 1):
            if not abs(a - b) <= bound * abs(a):
                found.append(f"{name} of step {step}: {a} and {b}")
    a, b = (run.metrics["eval"]["loss"] for run in (one, other))
    return found if abs(a - b) <= bound * a else [*found, f"eval loss: {a} and {b}"]


def moved(one: Run, method: str) -> float:
    """How far the trained weights of a run of one process moved."""
    return distance(trained_weights(one, method), trained_weights(one, method, "checkpoint-1"))


def moved_apart(one: Run, other: Run, method: str) -> float:
    """How far the trained weights of two runs are apart, as a share of how far those of one process moved."""
    return distance(trained_weights(one, method), trained_weights(other, method)) / moved(one, method)


@pytest.mark.parametrize(("kind", "file", "method"), every(*METHODS))
def test_a_method(
    runs: dict[str, Runs],
    record_property: Note,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    file: str,
    method: str,
) -> None:
    """Curve, evaluation and weights are those of one process. The saved model has the loss that the run computed."""
    of, flags, bound = runs[kind], KINDS[kind].methods[method], BOUND[method]
    shown = ("exact evaluation", "verified save") if method == "full" else ()
    if not noted(record_property, of, file, method, *shown):
        return
    one = of.of_one_process(*KINDS[kind].one[method], *flags)
    if KINDS[kind].measures_first:  # each strategy does so itself
        monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path))
    run = of.under(file, *flags, "--save_strategy", "no")
    strategy = {"single_gpu": "single", "fsdp2_qlora": "fsdp2"}.get(file, file)
    assert (run.metrics["strategy"], run.metrics["world_size"]) == (strategy, ranks_of(file))
    assert len(run.log) == STEPS
    assert departures(one, run, bound) == []
    assert numbers(run.metrics["eval"]) == pytest.approx(numbers(one.metrics["eval"]), rel=bound, abs=bound / 10)
    assert moved_apart(one, run, METHODS[method]) <= 10 * bound
    loss = KINDS[kind].loss_read_anew(run.folder, of.recipe.parent / "validation.jsonl")
    assert loss == pytest.approx(run.metrics["eval"]["loss"], rel=1e-3 if method == "QLoRA" else 1e-6)


@pytest.mark.parametrize(("kind", "file", "name"), every("features"))
def test_features_at_once(runs: dict[str, Runs], record_property: Note, kind: str, file: str, name: str) -> None:
    """A run has all features that the file does not refuse."""
    of, job = runs[kind], KINDS[kind]
    if not noted(record_property, of, file, *job.features):
        return
    flags = of.with_features(file)
    one, run = of.of_one_process(*job.one_with_features, *job.methods["full"]), of.under(file, *flags)
    log = (run.folder / "logs/rank-0.log").read_text(encoding="utf-8")
    asked = [each for each in job.features.values() if set(each.flags) <= set(flags)]
    assert [each for each in asked if each.logged not in log] == []
    assert departures(one, run, BOUND["full"]) == []
    assert moved_apart(one, run, "full") <= OF_THE_CHANGE


@pytest.mark.parametrize(("kind", "file", "name"), every("resume"))
def test_a_run_with_features_is_resumed(
    runs: dict[str, Runs], record_property: Note, tmp_path: Path, kind: str, file: str, name: str
) -> None:
    of = runs[kind]
    if not noted(record_property, of, file, "resume"):
        return
    flags = of.with_features(file)
    whole = of.under(file, *flags)
    resumed = of.resumed(file, stopped_copy(whole, tmp_path / "run", KINDS[kind].stopped_at), *flags)
    assert [entry["step"] for entry in resumed.log] == list(range(1, STEPS + 1))
    assert departures(whole, resumed, 1e-6) == []
    assert resumed.series("learning_rate") == whole.series("learning_rate")
    one = of.of_one_process(*KINDS[kind].one_with_features, *KINDS[kind].methods["full"])
    assert distance(whole.weights, resumed.weights) <= 1e-6 * moved(one, "full")


@pytest.mark.parametrize(("kind", "file", "name"), every("bf16"))
def test_bf16(runs: dict[str, Runs], record_property: Note, kind: str, file: str, name: str) -> None:
    of, flags = runs[kind], KINDS[kind].methods["full"]
    if not noted(record_property, of, file, "bf16"):
        return
    exact, one, run = of.of_one_process(*flags), of.of_one_process(*flags, *BF16), of.under(file, *flags, *BF16)
    assert departures(one, run, BOUND["bf16"]) == []
    assert departures(exact, run, 1e-6) != []


@pytest.mark.slow
def test_the_matrix_has_what_the_plans_say(runs: dict[str, Runs]) -> None:
    """Each cell is there. It is refused by the plan with the code that is written down, or it has passed."""
    found = {
        kind: {
            file: {column: code or PASSES for column, code in refusals(file, kind, runs[kind].recipe).items()}
            for file in FILES
        }
        for kind in KINDS
    }
    assert method_matrix.read() == found


def test_the_tables_are_those_of_the_outcomes() -> None:
    assert method_matrix.PAGE.read_text(encoding="utf-8") == method_matrix.page_with_tables()

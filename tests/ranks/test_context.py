"""Ranks that share the tokens of rows: other sizes, resuming, samples, evaluation, and refusals by a real launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed import token_sharing
from tests.ranks import test_llama
from tests.ranks.conftest import starter
from tests.ranks.launching import ROOT, SCRIPT, Run, accelerate, distance, python, start, train
from tests.ranks.test_llama import METHODS, MICRO_BATCH_OF_12
from tests.ranks.test_resume import stopped_copy

Start = Callable[..., Run]


FULL = METHODS["full"]
SAMPLES = ("--num_sample_generations", "2", "--max_new_tokens", "5")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job of `test_llama.py` in a folder of its own."""
    return test_llama.write_job(tmp_path_factory.mktemp("chats"))


@pytest.fixture(scope="module")
def run(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    return starter(chats, tmp_path_factory, test_llama.SCRIPT)


def assert_alike(one: Run, other: Run) -> None:
    for name in ("loss", "grad_norm"):
        assert other.series(name) == pytest.approx(one.series(name), rel=1e-4)
    assert other.metrics["eval"]["loss"] == pytest.approx(one.metrics["eval"]["loss"], rel=1e-4)
    assert distance(one.weights, other.weights) <= 1e-3 * distance(one.weights, one.weights_at(1))


@pytest.mark.more
def test_a_pair_trains_the_model_of_one_process(run: Start) -> None:
    """It computes tokens as often as one process does, and its model writes the same samples."""
    one, two = run("single", 1, *FULL, *MICRO_BATCH_OF_12, *SAMPLES), run("fsdp2_cp", 2, *FULL, *SAMPLES)
    assert_alike(one, two)
    assert two.metrics["train"]["padding_fraction"] == one.metrics["train"]["padding_fraction"] == 0
    assert (two.folder / "samples.jsonl").read_text() == (one.folder / "samples.jsonl").read_text()


@pytest.mark.slow
def test_four_ranks_share_a_row(run: Start, chats: Path, tmp_path: Path) -> None:
    """The last micro-batch of an epoch has a row of two tokens for four ranks."""
    shipped = (ROOT / "accelerate_configs/fsdp2_cp.yaml").read_text(encoding="utf-8")
    file = tmp_path / "four.yaml"
    file.write_text(shipped.replace("cp_size: 2", "cp_size: -1"), encoding="utf-8")
    flags = ("--config", str(chats), *FULL, "--per_device_train_batch_size", "1")
    four = train(accelerate(file, 4), tmp_path / "run", *flags, script=test_llama.SCRIPT)
    assert_alike(run("single", 1, *FULL, *MICRO_BATCH_OF_12, *SAMPLES), four)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("fsdp2_cp", "fsdp2"), ("fsdp2_cp", "single"), ("fsdp2", "fsdp2_cp")])
def test_another_split_resumes(run: Start, chats: Path, tmp_path: Path, before: str, after: str) -> None:
    stopped = stopped_copy(run(before, 2, *FULL, *SAMPLES), tmp_path / "run", 5)
    launch = python() if after == "single" else accelerate(after, 2)
    flags = ("--config", str(chats), *FULL, *SAMPLES, "--resume_from_checkpoint", "auto")
    resumed = train(launch, stopped, *flags, script=test_llama.SCRIPT)
    assert [entry["step"] for entry in resumed.log] == list(range(1, 9))
    assert_alike(run("single", 1, *FULL, *MICRO_BATCH_OF_12, *SAMPLES), resumed)


@pytest.mark.slow
def test_a_pair_evaluates_a_saved_model(run: Start, chats: Path, tmp_path: Path) -> None:
    one = run("single", 1, *FULL, *MICRO_BATCH_OF_12, *SAMPLES)
    files = ["--test_file", str(chats.parent / "validation.jsonl"), "--output_dir", str(tmp_path)]
    command = [*accelerate("fsdp2_cp", 2), "indictune/__main__.py", "evaluate", "--model", str(one.folder), *files]
    result = start(command)
    assert result.returncode == 0, result.stderr
    found, expected = Run(tmp_path).metrics["test"], one.metrics["eval"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["num_tokens"] == expected["num_tokens"]


@pytest.mark.slow
def test_classifiers_are_refused(job: Path, tmp_path: Path) -> None:
    command = [*accelerate("fsdp2_cp", 2), SCRIPT, "--config", str(job), "--output_dir", str(tmp_path)]
    result = start(command)
    assert result.returncode != 0
    assert result.stderr.count("not-under-context") == 1


@pytest.mark.slow
def test_the_comparison_sees_a_gradient_that_is_not_summed(run: Start, chats: Path, tmp_path: Path) -> None:
    mutant = token_sharing.unsummed_gradients.__name__
    flags = ("--config", str(chats), *FULL, "--max_steps", "3")
    broken = train(accelerate("fsdp2_cp", 2), tmp_path, *flags, script=token_sharing.__file__, MUTANT=mutant)
    one = run("single", 1, *FULL, *MICRO_BATCH_OF_12, *SAMPLES)
    assert broken.series("loss")[:2] == pytest.approx(one.series("loss")[:2], rel=1e-4)
    assert broken.series("grad_norm")[0] != pytest.approx(one.series("grad_norm")[0], rel=1e-2)

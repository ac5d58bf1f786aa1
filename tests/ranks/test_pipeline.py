"""Pipelines: copies of stages, schedules, resuming under another cut, evaluation, bad steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, BertModel

from indictune.models import builtin
from tests.ranks import test_llama
from tests.ranks.launching import ROOT, Run, accelerate, distance, python, start, train
from tests.ranks.test_parity import PLAIN, differences
from tests.ranks.test_resume import stopped_copy

Start = Callable[..., Run]

pytestmark = pytest.mark.slow


def two_stages(ranks: int, folder: Path, sharded: bool = False) -> list[str]:
    """A launch whose other ranks train copies of two stages, or share them by FSDP2."""
    shipped = (ROOT / "accelerate_configs/pipeline.yaml").read_text(encoding="utf-8")
    asked = "pp_degree: 2" + f"\n  megatron_lm_use_custom_fsdp: {str(sharded).lower()}"
    file = folder / "two_stages.yaml"
    file.write_text(shipped.replace("pp_degree: -1", asked), encoding="utf-8")
    return accelerate(file, ranks)


@pytest.mark.parametrize("sharded", [False, True])
def test_copies_of_stages_train_the_model_of_one_process(
    run_under: Start, job: Path, tmp_path: Path, sharded: bool
) -> None:
    four = train(two_stages(4, tmp_path, sharded), tmp_path / "run", "--config", str(job))
    assert (four.metrics["strategy"], four.metrics["world_size"]) == ("pipeline", 4)
    assert differences(run_under("single", 1, *PLAIN), four) == []


@pytest.mark.parametrize("strategy", ["pipeline", "3d"])
def test_four_ranks_train_the_llama_of_one_process(tmp_path: Path, strategy: str) -> None:
    launches = {"pipeline": two_stages(4, tmp_path), "3d": accelerate("3d", 4)}
    samples = ("--num_sample_generations", "2", "--max_new_tokens", "5")
    flags = ("--config", str(test_llama.write_job(tmp_path)), *test_llama.METHODS["full"], *samples)
    one, four = (
        train(launch, tmp_path / name, *flags, script=test_llama.SCRIPT)
        for name, launch in (("one", python()), ("four", launches[strategy]))
    )
    assert four.series("loss") == pytest.approx(one.series("loss"), rel=1e-4)
    assert four.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-4)
    assert distance(one.weights, four.weights) <= 1e-3 * distance(one.weights, one.weights_at(1))
    assert (four.folder / "samples.jsonl").read_text() == (one.folder / "samples.jsonl").read_text()


@pytest.mark.parametrize(("method", "is_tied"), [("full", True), ("lora", False)])
def test_sharded_stages_of_a_llama(tmp_path: Path, method: str, is_tied: bool) -> None:
    """Its embedding, tied to the head, is in shards at both ends; of an adapter one matrix is."""
    flags = ["--config", str(test_llama.write_job(tmp_path)), *test_llama.METHODS[method], "--max_steps", "4"]
    flags += test_llama.tied_llama(tmp_path / "model") if is_tied else ()
    one, four = (
        train(launch, tmp_path / name, *flags, script=test_llama.SCRIPT)
        for name, launch in (("one", python()), ("four", two_stages(4, tmp_path, sharded=True)))
    )
    assert four.series("loss") == pytest.approx(one.series("loss"), rel=1e-4)
    assert four.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-4)
    weights = test_llama.trained_weights(one, method)
    before = test_llama.trained_weights(one, method, "checkpoint-1")
    apart = distance(weights, test_llama.trained_weights(four, method))
    assert apart <= 1e-3 * distance(weights, before)


@pytest.fixture(scope="module")
def deeper(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A flag that names the built-in BERT with eight layers."""
    folder, source = tmp_path_factory.mktemp("deeper"), builtin.resolve("builtin:tiny-indic-bert")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(AutoConfig.from_pretrained(source, num_hidden_layers=8)).save_pretrained(folder)
    return "--model_name_or_path", str(folder)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_every_schedule_trains_the_model_of_one_process(
    run_under: Start, deeper: tuple[str, str], schedule: str
) -> None:
    one = run_under("single", 1, *PLAIN, *deeper)
    four = run_under("pipeline", 4, *deeper, "--pipeline_schedule", schedule)
    assert differences(one, four) == []
    expected = {"gpipe": 3 / 7, "1f1b": 3 / 7, "interleaved": 3 / 11}[schedule]  # four micro-batches
    assert four.series("bubble_formula") == pytest.approx([expected] * len(four.log))
    assert all(0 <= share < 1 for share in four.series("bubble"))


@pytest.mark.parametrize(
    ("before", "after"),
    [("pipeline", "single"), ("pipeline", "fsdp2"), ("ddp", "pipeline"), ("ddp", "sharded stages"), ("ddp", "3d")],
)
def test_another_cut_goes_on(run_under: Start, job: Path, tmp_path: Path, before: str, after: str) -> None:
    stopped = stopped_copy(run_under(before, 2), tmp_path / "run")
    launches = {"single": python(), "sharded stages": two_stages(4, tmp_path, sharded=True)}
    launches["3d"] = accelerate("3d", 4)
    launch = launches.get(after) or accelerate(after, 2)
    resumed = train(launch, stopped, "--config", str(job), "--resume_from_checkpoint", "auto")
    assert [entry["step"] for entry in resumed.log] == list(range(1, 13))
    assert differences(run_under("single", 1, *PLAIN), resumed) == []


def test_stages_evaluate_a_saved_model(run_under: Start, job: Path, tmp_path: Path) -> None:
    one = run_under("single", 1, *PLAIN)
    files = ["--test_file", str(job.parent / "validation.jsonl"), "--output_dir", str(tmp_path)]
    command = [*accelerate("pipeline", 2), "indictune/__main__.py", "evaluate", "--model", str(one.folder), *files]
    result = start(command)
    assert result.returncode == 0, result.stderr
    assert Run(tmp_path).metrics["test"]["loss"] == pytest.approx(one.metrics["eval"]["loss"], abs=1e-6)

"""Real runs of one process: what they leave, and how they end when the loss goes wrong."""

from __future__ import annotations

import json
import math
import os
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import pipeline

from indictune import __version__
from indictune.config.arguments import DataArguments, ModelArguments, SentimentTrainingArguments
from indictune.config.recipe import read_recipe
from tests.conftest import FinishedRun
from tests.ranks.launching import ROOT, SCRIPT, python, start


def test_a_finished_run_leaves_the_files_of_the_contract(finished_run: FinishedRun) -> None:
    names = {path.name for path in finished_run.folder.iterdir()}
    assert names >= {
        "config.json", "model.safetensors", "tokenizer.json", "recipe.yaml", "status.json", "train_log.jsonl", "logs",
        "metrics.json", "checkpoint-4", "checkpoint-8",
    }  # fmt: skip
    assert [path.name for path in (finished_run.folder / "logs").glob("*.log")] == ["rank-0.log"]
    assert json.loads((finished_run.folder / "status.json").read_text()) == {"state": "ok", "message": ""}


def test_who_may_read_the_configuration_may_read_the_weights(finished_run: FinishedRun) -> None:
    weights, configuration = (finished_run.folder / name for name in ("model.safetensors", "config.json"))
    assert weights.stat().st_mode == configuration.stat().st_mode


def test_metrics_hold_the_blocks_of_the_contract(finished_run: FinishedRun) -> None:
    metrics = finished_run.metrics
    assert {name: metrics[name] for name in ("strategy", "world_size", "global_batch_size")} == {
        "strategy": "single", "world_size": 1, "global_batch_size": 8,
    }  # fmt: skip
    assert metrics["train"].keys() == {
        "runtime_s", "time_to_first_step_s", "samples_per_second", "tokens_per_second", "padding_fraction",
        "peak_memory_bytes",
    }  # fmt: skip
    train = metrics["train"]
    assert train["samples_per_second"] * train["runtime_s"] == pytest.approx(2 * 31)
    assert train["tokens_per_second"] > 5 * train["samples_per_second"]
    assert 0 < train["time_to_first_step_s"] < 300
    assert train["padding_fraction"] == 0
    assert train["peak_memory_bytes"] > 100e6
    for block, rows in (("eval", 13), ("test", 11)):
        assert metrics[block].keys() == {
            "num_examples", "loss", "accuracy", "macro_f1", "worst_language_macro_f1", "per_language", "per_label",
            "ece",
        }  # fmt: skip
        assert metrics[block]["num_examples"] == rows
        assert metrics[block]["per_label"].keys() == {"negative", "neutral", "positive"}


def test_the_train_log_has_a_line_a_logged_step(finished_run: FinishedRun) -> None:
    assert finished_run.series("step") == [2, 4, 6, 8]
    assert finished_run.series("epoch") == [0.5, 1.0, 1.5, 2.0]
    for entry in finished_run.log:
        assert entry.keys() == {
            "step", "epoch", "loss", "grad_norm", "learning_rate", "tokens_per_second", "samples_per_second",
        }  # fmt: skip
        assert all(math.isfinite(value) for value in entry.values())
    assert finished_run.log[0]["loss"] == pytest.approx(math.log(3), abs=0.15)  # three labels, random weights


def test_the_console_shows_what_matters_and_the_rank_file_everything(finished_run: FinishedRun) -> None:
    assert "validation rows" in finished_run.stdout
    assert "test rows" in finished_run.stdout
    written, report = finished_run.stdout.strip().splitlines()[-2:]
    assert written == f"Written to {finished_run.folder}"
    assert str(finished_run.folder / "report.html") in report
    train_file = finished_run.folder.parent / "train.jsonl"
    dropped = f"--train_file {train_file}: 1 rows without text were dropped: {train_file}:31."
    leaked = f"{train_file}: 1 of 31 training rows also stand in "
    cut = f"--train_file {train_file}: 2 of 31 rows (6.5%) reach --max_length 32; "
    for warning in (dropped, leaked, cut):
        assert finished_run.stderr.count(f"warning: {warning}") == 1
    log = (finished_run.folder / "logs" / "rank-0.log").read_text(encoding="utf-8")
    assert dropped in log
    assert "INFO indictune.training.callbacks.every_step: step 8 of 8: loss " in log


def test_recipe_yaml_is_the_whole_run_and_reads_back(finished_run: FinishedRun) -> None:
    types = (ModelArguments, DataArguments, SentimentTrainingArguments)
    path = finished_run.folder / "recipe.yaml"
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert written["learning_rate"] == 1e-4
    assert written["seed"] == 42  # a default
    recipe = read_recipe(["--config", str(path)], types)
    assert recipe.problems == []
    assert recipe.build(ModelArguments).model_name_or_path == "builtin:tiny-indic-bert"
    assert recipe.build(DataArguments).train_file == str(finished_run.folder.parent / "train.jsonl")
    assert recipe.build(SentimentTrainingArguments).num_train_epochs == 2


def test_a_pipeline_on_the_output_gives_label_names(finished_run: FinishedRun) -> None:
    classify = pipeline("text-classification", model=str(finished_run.folder), device="cpu")
    for answer in classify(["फिल्म बहुत अच्छी थी", "फिल्म #बहुत_अच्छी थी! " * 150]):
        assert answer["label"] in {"negative", "neutral", "positive"}
    tokenizer = classify.tokenizer
    assert tokenizer is not None
    assert tokenizer.model_max_length == 32  # as the run's --max_length
    raw, cleaned = ("थी! #बहुत_अच्छी @someone https://t.co/x", "थी! बहुत अच्छी @user http")
    assert tokenizer(raw)["input_ids"] == tokenizer(cleaned)["input_ids"]


@pytest.mark.parametrize("save_steps", ["1", pytest.param("100", marks=pytest.mark.more)])
def test_a_loss_that_is_nan_stops_the_run_before_anything_more_is_saved(
    finished_run: FinishedRun, tmp_path: Path, save_steps: str
) -> None:
    out = tmp_path / "out"
    flags = [
        *("--config", str(finished_run.recipe), "--output_dir", str(out)),
        *("--learning_rate", "1e30", "--dropout", "0", "--eval_strategy", "no", "--load_best_model_at_end", "false"),
        *("--save_strategy", "steps", "--save_steps", save_steps, "--logging_steps", "1"),
    ]
    result = start([*python(), SCRIPT, *flags])
    assert result.returncode == 1, result.stderr
    status = json.loads((out / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == "failed"
    # The weights of step 1 are still those of the start; its update makes them about 1e30, and step 2 overflows.
    assert status["message"].startswith("The loss or the gradient of step 2 is NaN or infinite. Training has stopped")
    rows = status["message"].partition("The loss was nan, the rows ")[2]
    places = rows.partition(" and 3 more")[0].split(", ")
    lines = {int(place.removeprefix(f"{finished_run.recipe.parent / 'train.jsonl'}:")) for place in places}
    assert len(lines) == 5
    assert lines <= {*range(1, 31), 32}
    assert result.stderr.count(status["message"]) == 1
    assert "Traceback" not in result.stderr
    assert not (out / "metrics.json").exists()
    assert not (out / "model.safetensors").exists()
    saved = sorted(path.parent.name for path in out.glob("checkpoint-*/model.safetensors"))
    assert saved == (["checkpoint-1"] if save_steps == "1" else [])
    for name in saved:
        assert all(torch.isfinite(tensor).all() for tensor in load_file(out / name / "model.safetensors").values())


@pytest.mark.more
def test_a_copy_of_the_code_trains_where_not_every_package_is_installed(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    """DeepSpeed and bitsandbytes are to be had on Linux alone, and TRL is LLaMA's."""
    site, out = tmp_path / "site-packages", tmp_path / "out"  # dill tells a library by that name
    site.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.startswith(("indictune", "__editable__", "deepspeed", "bitsandbytes", "trl")):
            (site / each.name).symlink_to(each)
    flags = [
        *("--config", str(finished_run.recipe), "--output_dir", str(out), "--max_steps", "1", "--save_steps", "1"),
        *("--save_strategy", "steps", "--eval_strategy", "no", "--load_best_model_at_end", "false"),
    ]
    done = start([sys.executable, "-S", SCRIPT, *flags], {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"})
    assert done.returncode == 0, done.stderr
    versions = json.loads((out / "checkpoint-1/manifest.json").read_text(encoding="utf-8"))["versions"]
    assert (versions["indictune"], versions["torch"]) == (__version__, torch.__version__)
    assert versions.keys() == {"indictune", "torch", "transformers", "accelerate", "peft"}

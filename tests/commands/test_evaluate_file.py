"""What `indictune evaluate` refuses; the numbers are compared in tests/ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

from indictune.checkpoint import store
from indictune.commands.evaluate_file import _check_of_this_file, _take_from_training
from indictune.config.recipe import read_recipe
from indictune.config.shared_arguments import EvaluationArguments
from indictune.files import write_json
from tests.commands.random_models import of_pairs, random_classifier
from tests.conftest import FinishedRun
from tests.first_hour.saved_models import saved_classifier, saved_llama
from tests.ranks.launching import ROOT, python, start
from tests.refusals import refused
from tests.training.tiny import tiny_llama


@pytest.mark.more
@pytest.mark.parametrize("kind", ["tweets", "chats"])
def test_a_tokenizer_with_ids_beyond_the_embedding_is_reported_without_a_traceback(
    finished_run: FinishedRun, tmp_path: Path, kind: str
) -> None:
    model, test_file = tmp_path / "model", tmp_path / "t.jsonl"
    if kind == "tweets":
        shutil.copytree(finished_run.folder, model)
        test_file.write_text('{"text": "क्रिकेटर", "label": "positive"}\n', encoding="utf-8")
    else:
        tiny_llama(model)
        test_file.write_text('{"prompt": "a", "completion": "क्रिकेटर"}\n', encoding="utf-8")
    rows = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"word{number}" for number in range(rows - len(tokenizer))] + ["क्रिकेटर"])
    tokenizer.save_pretrained(model)
    flags = ["--model", str(model), "--test_file", str(test_file), "--output_dir", str(tmp_path / "out")]
    result = start([*python(), "indictune/__main__.py", "evaluate", *flags])
    assert result.returncode == 2, result.stderr
    assert f"--model {model}: " in result.stderr
    assert "[token-id-without-row]" in result.stderr
    assert "Traceback" not in result.stderr


ROWS: dict[str, dict[str, Any]] = {
    "single_label_classification": {"tweet": "अच्छी फिल्म", "label": "joy"},
    "multi_label_classification": {"tweet": "अच्छी फिल्म", "label": "joy"},
    "regression": {"tweet": "अच्छी फिल्म", "label": 0.5},
    "tokens": {"text": ["अच्छी", "फिल्म"], "label": ["joy", "neutral"]},
    "chat": {"prompt": "a", "completion": "b"},
}


@pytest.mark.parametrize(
    "kind", [each if not number else pytest.param(each, marks=pytest.mark.more) for number, each in enumerate(ROWS)]
)
def test_a_model_whose_scores_are_no_numbers_is_not_scored(tmp_path: Path, kind: str) -> None:
    model, out, test_file = tmp_path / "model", tmp_path / "out", tmp_path / "t.jsonl"
    if kind == "chat":
        saved_llama(model)
    elif kind == "tokens":
        random_classifier(model, "bert", of_tokens=True, layers=1)
    else:
        saved_classifier(model, kind)
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if name.endswith(("classifier.weight", "layers.0.mlp.up_proj.weight")))
    weights[name][0] = torch.nan if kind != "regression" else 3e38  # finite, and what it is multiplied with is not
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    test_file.write_text(json.dumps(ROWS[kind]), encoding="utf-8")
    flags = ["--model", str(model), "--test_file", str(test_file), "--output_dir", str(out)]
    result = start([*python(), "indictune/__main__.py", "evaluate", *flags])
    assert result.returncode == 2, result.stderr
    assert "[logits-not-finite]" in result.stderr
    assert not list(out.glob("*.json*l")) + list(out.glob("metrics.json"))


@pytest.mark.more
@pytest.mark.parametrize("name", ["evaluation", pytest.param("evaluation/t", marks=pytest.mark.more)])
def test_a_link_to_which_an_evaluation_would_go_is_refused(
    finished_run: FinishedRun, tmp_path: Path, name: str
) -> None:
    """It came with the model."""
    model, outside = tmp_path / "model", tmp_path / "outside"
    shutil.copytree(finished_run.folder, model)
    outside.mkdir()
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).symlink_to(outside)
    test_file = tmp_path / "t.jsonl"
    test_file.write_text(json.dumps({"text": "a " * 40, "label": "positive"}), encoding="utf-8")
    command = [*python(), "indictune/__main__.py", "evaluate", "--model", str(model), "--test_file", str(test_file)]
    result = start(command)
    assert result.returncode == 2, result.stderr
    assert "[evaluation-folder-elsewhere]" in result.stderr
    assert list(outside.iterdir()) == []
    named = start([*command, "--output_dir", str(tmp_path / "out")])
    assert named.returncode == 0, named.stderr
    assert f"--test_file {test_file}: 1 of 1 rows (100.0%) reach --max_length 32; " in named.stderr


@pytest.mark.more
def test_pairs_are_evaluated_as_pairs(tmp_path: Path) -> None:
    """Also by a folder without a recipe, such as that of a merged model."""
    pairs, single = of_pairs(random_classifier(tmp_path / "p", "bert", layers=1)), saved_classifier(tmp_path / "s")
    (pairs / "recipe.yaml").unlink()
    whole, half = tmp_path / "whole.jsonl", tmp_path / "half.jsonl"
    whole.write_text(json.dumps({"premise": "a b", "hypothesis": "c", "label": "joy"}), encoding="utf-8")
    half.write_text(json.dumps({"premise": "a b", "label": "joy"}), encoding="utf-8")

    def said(model: Path, file: Path, *flags: str) -> str:
        out = ["--output_dir", str(tmp_path / "out"), *flags]
        given = ["--model", str(model), "--test_file", str(file), *out]
        return start([*python(), "indictune/__main__.py", "evaluate", *given]).stderr

    said(pairs, whole)
    (row,) = (tmp_path / "out/predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(row)["length"] == 6  # with [CLS], and [SEP] twice
    message = said(pairs, half)
    assert f"{half}: " in message
    assert "hypothesis" in message
    assert "[column-missing]" in message
    columns = ["--text_column", "premise", "--text_pair_column", "hypothesis"]
    assert "[pair-not-expected]" in said(single, whole, *columns)


@pytest.mark.more
def test_a_checkpoint_stays_whole(finished_run: FinishedRun, tmp_path: Path) -> None:
    last = store.checkpoints_in(finished_run.folder)[0]
    checkpoint = Path(shutil.copytree(last, tmp_path / "run" / last.name))
    (tmp_path / "run" / "link").symlink_to(checkpoint)
    test_file = str(tmp_path / "t.jsonl")
    Path(test_file).write_text('{"text": "a", "label": "positive"}\n', encoding="utf-8")
    command = [*python(), "indictune/__main__.py", "evaluate", "--model", str(checkpoint), "--test_file", test_file]
    for name in (None, "evaluation", ".", "../link/new"):
        folder = checkpoint / (name or "evaluation/t")
        result = start([*command, *(["--output_dir", str(folder)] if name else [])])
        assert result.returncode == 2, result.stderr
        assert result.stderr.startswith(f"indictune: --output_dir {folder}: it is in the checkpoint {checkpoint}, ")
        assert result.stderr.endswith("[folder-in-checkpoint]\n")
        assert store.damage(checkpoint) == []
    elsewhere = start([*command, "--output_dir", str(tmp_path / "out")])
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert store.damage(checkpoint) == []


@pytest.mark.parametrize("kind", ["tweets", "chats"])
def test_a_broken_tokenizer_is_reported_with_its_flag_and_all_other_problems(
    finished_run: FinishedRun, tmp_path: Path, kind: str
) -> None:
    model, other = tmp_path / "model", tmp_path / "other.jsonl"
    other.write_text('{"text": "of another form"}\n')
    shutil.copytree(finished_run.folder if kind == "tweets" else tiny_llama(tmp_path / "llama"), model)
    (model / "tokenizer.json").write_text("{", encoding="utf-8")
    flags = ["--model", str(model), "--test_file", str(other), "--output_dir", str(tmp_path / "out")]
    result = start([*python(), "indictune/__main__.py", "evaluate", *flags])
    assert result.returncode == 2, result.stderr
    first, *shown = result.stderr.splitlines()
    assert first == "indictune: 2 problems:"
    assert shown[0].startswith(f"  1. --model {model}: ")
    assert shown[0].endswith("[model-unreadable]")
    assert shown[1].startswith(f"  2. --test_file {other}: ")


@pytest.mark.more
@pytest.mark.parametrize("kind", ["tweets", "chats"])
@pytest.mark.parametrize(
    ("flag", "value", "shown"),
    [
        ("--per_device_eval_batch_size", "0", ["--per_device_eval_batch_size 0: expected at least 1."]),
        ("--per_device_eval_batch_size", "-3", ["--per_device_eval_batch_size -3: expected at least 1."]),
        ("--max_length", "9000", ["--max_length 9000: ", "[max-length-over-positions]"]),
    ],
)
def test_values_that_no_model_can_take_are_reported_before_rows_are_read(
    finished_run: FinishedRun, tmp_path: Path, kind: str, flag: str, value: str, shown: list[str]
) -> None:
    model = str(finished_run.folder) if kind == "tweets" else tiny_llama(tmp_path / "model")
    (tmp_path / "t.jsonl").write_text("{")
    flags = ["--model", model, "--test_file", str(tmp_path / "t.jsonl"), "--output_dir", str(tmp_path / "out")]
    result = start([*python(), "indictune/__main__.py", "evaluate", *flags, flag, value])
    assert result.returncode == 2, result.stderr
    assert all(part in result.stderr for part in shown), result.stderr
    assert "Traceback" not in result.stderr


def test_answers_are_as_long_as_the_model_has_positions_whatever_it_calls_them(tmp_path: Path) -> None:
    """As after `indictune merge`, where no recipe tells how long they were in training."""
    model, test_file = Path(tiny_llama(tmp_path / "model")), tmp_path / "t.jsonl"
    (model / "model.safetensors").unlink()
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=16, n_layer=1, n_head=2)).save_pretrained(model)
    test_file.write_text(json.dumps({"prompt": "ok", "completion": "ok " * 100}), encoding="utf-8")
    flags = ["--model", str(model), "--test_file", str(test_file)]
    result = start([*python(), "indictune/__main__.py", "evaluate", *flags])
    assert result.returncode == 0, result.stderr
    assert "are longer than --max_length 64 and lose their ends" in result.stderr


def test_numbers_that_are_not_finite_are_written_as_valid_json(tmp_path: Path) -> None:
    """A run whose half precision overflows on a validation row ends, and its loss is no number."""
    write_json(tmp_path / "metrics.json", {"loss": float("nan")})
    written = (tmp_path / "metrics.json").read_text(encoding="utf-8")
    assert json.loads(written, parse_constant=pytest.fail) == {"loss": "nan"}


@pytest.mark.more
def test_the_metrics_of_another_file_are_not_written_over(finished_run: FinishedRun, tmp_path: Path) -> None:
    model = Path(shutil.copytree(finished_run.folder, tmp_path / "model"))
    files = [tmp_path / name / "t.jsonl" for name in ("hi", "ta")]
    for file in files:
        file.parent.mkdir()
        file.write_text('{"text": "a", "label": "positive"}\n', encoding="utf-8")

    def evaluate(file: str, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [*python(), "indictune/__main__.py", "evaluate", "--model", str(model)]
        return start([*command, "--test_file", file, *flags])

    first, metrics = evaluate(str(files[0])), model / "evaluation" / "t" / "metrics.json"
    assert first.returncode == 0, first.stderr
    before = metrics.read_bytes()
    assert json.loads(before)["test_file"] == "t.jsonl"
    assert str(tmp_path).encode() not in before  # it is pushed
    typed = os.path.relpath(files[1], ROOT)
    for test_file, flags in ((str(files[1]), ()), (typed, ("--output_dir", str(metrics.parent)))):
        other = evaluate(test_file, *flags)
        assert other.returncode == 2
        assert "[metrics-of-another-file]" in other.stderr
        assert metrics.read_bytes() == before
    again = evaluate(os.path.relpath(files[0], ROOT))
    assert again.returncode == 0, again.stderr


def test_metrics_name_the_file_and_its_path_stays_here(tmp_path: Path) -> None:
    def check(path: str) -> None:
        _check_of_this_file(tmp_path, path)

    check("/a/t.csv")
    (tmp_path / "metrics.json").write_text('{"test_file": "t.csv"}')
    check("/b/t.csv")  # a downloaded folder has the name alone
    with refused("metrics-of-another-file", flag="--test_file"):
        check("/b/u.csv")
    (tmp_path / ".test_file").write_text('{"test_file": "/a/t.csv"}')
    check("/a/t.csv")
    with refused("metrics-of-another-file", flag="--test_file"):
        check("/b/t.csv")


def test_what_training_computed_in_counts_whoever_decided_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    recipe = read_recipe(["--model", str(tmp_path)], [EvaluationArguments])
    (tmp_path / "recipe.yaml").write_text("max_length: 32\ndecided: {bf16: true}\n", encoding="utf-8")
    _take_from_training(recipe, tmp_path)
    assert recipe.values == {"model": str(tmp_path), "max_length": 32, "bf16": True}


def test_thoughts_count_as_in_training(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text("train_on_thinking: false\n")
    recipe = read_recipe([], (EvaluationArguments,))
    _take_from_training(recipe, tmp_path)
    assert recipe.values == {"train_on_thinking": False}


def test_labels_are_named_as_in_training(tmp_path: Path) -> None:
    given = {"label_map": ["pos=positive"], "keep_label_spellings": True, "label_column": ["joy", "anger"]}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text(json.dumps(given))
    recipe = read_recipe([], (EvaluationArguments,))
    _take_from_training(recipe, tmp_path)
    assert recipe.values == given


def test_a_template_that_was_a_file_is_the_one_that_was_saved_with_the_model(tmp_path: Path) -> None:
    """The file itself is out of reach from the current folder."""
    model, test_file = Path(tiny_llama(tmp_path / "model")), tmp_path / "t.jsonl"
    template = "{% for m in messages %}{% generation %}{{ m['content'] + ' ok ok ' }}{% endgeneration %}{% endfor %}"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    (model / "recipe.yaml").write_text("chat_template: chat.jinja\nmax_length: 32\n", encoding="utf-8")
    test_file.write_text('{"prompt": "ok", "completion": "ok"}\n', encoding="utf-8")
    result = start(
        [*python(), "indictune/__main__.py", "evaluate", "--model", str(model), "--test_file", str(test_file)]
    )
    assert result.returncode == 0, result.stderr
    metrics = json.loads((model / "evaluation" / "t" / "metrics.json").read_text(encoding="utf-8"))
    assert metrics["test"]["num_tokens"] == 5  # of a prompt and an answer, but the first, which nothing is before


def test_a_template_that_was_a_file_elsewhere_and_was_not_saved_is_not_read(tmp_path: Path) -> None:
    """A folder that somebody else made may name any file."""
    model = Path(tiny_llama(tmp_path / "model"))
    (model / "recipe.yaml").write_text(f"chat_template: {tmp_path}/secret.jinja\n", encoding="utf-8")
    recipe = read_recipe(["--model", str(model)], [EvaluationArguments])
    _take_from_training(recipe, model)
    assert recipe.values == {"model": str(model)}


def test_a_name_that_leads_out_of_the_model_names_no_folder(finished_run: FinishedRun, tmp_path: Path) -> None:
    name = "...jsonl"
    status = (finished_run.folder / "status.json").read_bytes()
    (tmp_path / name).write_text(json.dumps({"text": "a", "label": "positive"}), encoding="utf-8")
    flags = ["--model", str(finished_run.folder), "--test_file", str(tmp_path / name)]
    result = start([*python(), "indictune/__main__.py", "evaluate", *flags])
    assert result.returncode == 2, result.stderr
    assert "[evaluation-folder-elsewhere]" in result.stderr
    assert (finished_run.folder / "status.json").read_bytes() == status


# As accelerate leaves it with --cpu: it starts one process in place of several.
ONE_OF_TWO = {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "flags", "problems"),
    [
        ("tweets", ["--bf16", "8"], ["--bf16 8: ", "accelerate launch was asked for"]),
        ("tweets", [], ["accelerate launch was asked for"]),
        ("chats", [], ["accelerate launch was asked for"]),
        ("chats", ["--chat_template", "llama4"], ["accelerate launch was asked for", "--chat_template llama4: "]),
    ],
)
def test_what_is_refused_anyway_reads_no_more_than_the_first_of_many_rows(
    finished_run: FinishedRun, tmp_path: Path, kind: str, flags: list[str], problems: list[str]
) -> None:
    test_file = tmp_path / "t.jsonl"
    if kind == "tweets":
        model = str(finished_run.folder)
        good, bad, many = {"text": "a", "label": "positive"}, {"text": "a", "label": ""}, 20_000
    else:
        model = tiny_llama(tmp_path / "model")
        good, bad, many = {"prompt": "a", "completion": "b"}, {"prompt": "a"}, 2_000
    test_file.write_text(f"{json.dumps(good)}\n" * many + f"{json.dumps(bad)}\n", encoding="utf-8")
    given = ["--model", model, "--test_file", str(test_file), "--output_dir", str(tmp_path / "out"), *flags]
    result = start([*python(), "indictune/__main__.py", "evaluate", *given], ONE_OF_TWO)
    assert result.returncode == 2
    status = json.loads((tmp_path / "out" / "status.json").read_text(encoding="utf-8"))
    shown = status["message"].splitlines()
    shown = [line.partition(". ")[2] for line in shown[1:]] if len(shown) > 1 else shown
    assert len(shown) == len(problems), shown
    assert all(line.startswith(problem) for line, problem in zip(shown, problems, strict=True))
    assert "Reading only the first rows, because the run is refused in any case." in result.stderr

"""A run that resumes with other settings than those of its checkpoint reports them, or is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from indictune.checkpoint import store
from indictune.models.active_vocabulary import read_row_ids
from indictune.models.adapters import fingerprint
from tests.conftest import FinishedRun
from tests.faults.canaries import model_in
from tests.faults.runs import EXIT_RESUMABLE, STEP, Job, best_step
from tests.ranks.launching import ROOT, SCRIPT, Run, python, start, torchrun


@pytest.fixture(scope="module")
def stopped(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run with a checkpoint of its fourth step."""
    flags = ("--save_total_limit", "20", "--lr_scheduler_type", "constant", "--load_best_model_at_end", "false")
    job = Job(finished_run.recipe, tmp_path_factory.mktemp("stopped") / "out", flags=flags)
    assert job.start().returncode == 0
    (job.folder / "metrics.json").unlink()
    for step in (6, 8):
        shutil.rmtree(job.folder / f"checkpoint-{step}", ignore_errors=True)
    return job


@pytest.fixture
def job(stopped: Job, tmp_path: Path) -> Job:
    """It again, to go on with."""
    return replace(stopped, folder=shutil.copytree(stopped.folder, tmp_path / "out"))


def test_settings_that_differ_are_named_with_both_values(job: Job) -> None:
    more = ["--learning_rate", "0.5", "--weight_decay", "0.25", "--num_train_epochs", "1.5", "--class_weights"]
    more += [
        "balanced",
        "--padding_free",
        "off",
        "--per_device_train_batch_size",
        "2",
        "--logging_steps",
        "1",
        "--eval_steps",
        "3",
        "--dataloader_num_workers",
        "1",
        "--full_determinism",
        "true",
    ]
    result = replace(job, flags=(*job.flags, *more)).start()
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if "other settings" in line]
    changed, stays = sorted(lines, key=lambda line: "optimizer state" in line)
    both = {"num_train_epochs": "2.0, now 1.5", "class_weights": "None, now balanced", "padding_free": "auto, now off"}
    both |= {"full_determinism": "False, now True", "per_device_train_batch_size": "4, now 2"}
    assert sorted(re.findall(r"--(\w+) (.*?)[;.] ", changed)) == sorted(both.items())
    assert "--learning_rate 0.0001, now 0.5; --weight_decay 0.0, now 0.25. Its optimizer state keeps" in stays
    log = Run(job.folder).log
    assert (log[-1]["step"], log[-1]["learning_rate"]) == (6, 1e-4)
    recipe = yaml.safe_load((job.folder / "recipe.yaml").read_text(encoding="utf-8"))
    assert [recipe[name] for name in ("learning_rate", "weight_decay", "num_train_epochs")] == [0.0001, 0.0, 1.5]


@pytest.mark.slow
def test_class_weights_that_were_edited_between_two_starts_are_named_with_both_values(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    weights = tmp_path / "weights.json"
    of_labels = {"negative": 1.0, "neutral": 1.0, "positive": 2.0}
    weights.write_text(json.dumps(of_labels))
    job = Job(finished_run.recipe, tmp_path / "out", flags=("--class_weights", str(weights)))
    assert job.start(f"SIGTERM@{STEP}:1").returncode == EXIT_RESUMABLE
    weights.write_text(json.dumps({**of_labels, "positive": 3.0}))
    result = job.start(f"SIGTERM@{STEP}:1")
    assert result.returncode == EXIT_RESUMABLE, result.stderr
    shown = "--class_weights positive=2.0, now positive=3.0. "
    assert f"checkpoint-2 was written with other settings: {shown}" in result.stderr
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert "other settings" not in result.stderr  # the one before has trained by these


@pytest.mark.slow
def test_a_deepspeed_file_may_gain_or_lose_an_optimizer_and_a_schedule(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    """DeepSpeed's own would have states in other places and shapes; the flags' are used instead."""
    config = json.loads(Path("ds_configs/zero2.json").read_text(encoding="utf-8"))
    params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    blocks = {"optimizer": {"type": "AdamW", "params": params}, "scheduler": {"type": "WarmupDecayLR", "params": {}}}
    file = tmp_path / "deepspeed.json"
    job = Job(finished_run.recipe, tmp_path / "out", tuple(torchrun(1)), ("--deepspeed", str(file)))
    for content in (config, {**config, **blocks}):
        file.write_text(json.dumps(content))
        assert "is saved" in job.start(f"SIGTERM@{STEP}:1").stderr
        assert job.status["state"] == "resumable"
    file.write_text(json.dumps(config))
    result = job.start()
    assert (result.returncode, job.status["state"]) == (0, "ok"), result.stderr
    assert "other settings" not in result.stderr


@pytest.mark.slow
def test_how_often_a_run_logs_evaluates_and_saves_is_as_its_own_command_says(job: Job) -> None:
    flags = ("--logging_steps", "1", "--eval_steps", "4", "--save_steps", "4")
    result = replace(job, flags=(*job.flags, *flags)).start()
    assert result.returncode == 0, result.stderr
    assert [entry["step"] for entry in Run(job.folder).log] == [3, 5, 6, 7, 8]
    assert [path.name for path in store.checkpoints_in(job.folder)] == ["checkpoint-8", "checkpoint-4", "checkpoint-2"]


@pytest.mark.more
def test_the_same_settings_go_on_without_a_word(job: Job) -> None:
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert "other settings" not in result.stderr
    assert "other packages" not in result.stderr


@pytest.mark.more
def test_packages_of_other_versions_are_named_with_both(job: Job) -> None:
    """One that has gone, or has come, computes no step of both."""
    checkpoint = job.folder / "checkpoint-4"
    manifest = store.read_manifest(checkpoint)
    assert manifest is not None
    kept = {name: version for name, version in manifest.versions.items() if name != "peft"}
    others = replace(manifest, versions={**kept, "torch": "2.0", "accelerate": "1.0", "deepspread": "1"})
    (checkpoint / store.MANIFEST).write_text(others.to_json(), encoding="utf-8")
    result = job.start()
    assert result.returncode == 0, result.stderr
    (line,) = (line for line in result.stderr.splitlines() if "other packages" in line)
    assert f"torch 2.0, now {version('torch')}" in line
    assert f"accelerate 1.0, now {version('accelerate')}" in line
    assert "peft" not in line


def test_another_optimizer_or_method_is_refused_with_all_other_problems_and_before_the_model_is_read(job: Job) -> None:
    flags = ("--optim", "sgd", "--save_total_limit", "0", "--method", "lora", "--lora_r", "4")
    result = replace(job, flags=(*job.flags, *flags, "--lr_scheduler_type", "reduce_lr_on_plateau")).start()
    assert result.returncode == 2
    refused = sorted(line.split()[1] for line in job.status["message"].splitlines()[1:])
    assert refused == ["--lr_scheduler_type", "--method", "--optim", "--save_total_limit"]


@pytest.mark.more
def test_a_recipe_that_has_rotted_is_no_other_optimizer(job: Job) -> None:
    """It still reads as one."""
    recipe = job.folder / "checkpoint-4" / "recipe.yaml"
    whole = recipe.read_bytes()
    recipe.write_bytes(whole.replace(b"adamw_torch_fused", b"adamw_torch_fuSed"))
    assert recipe.read_bytes() != whole
    named = ("--resume_from_checkpoint", str(recipe.parent))
    assert replace(job, flags=(*job.flags, *named)).start().returncode == 2
    assert f"{' '.join(named)}: this is no whole checkpoint: {recipe} is not as" in job.status["message"]
    result = job.start()
    assert result.returncode == 0, result.stderr
    assert f"Passed over checkpoint-4: {recipe} is not as it was written" in result.stderr
    assert f"Resuming from {job.folder / 'checkpoint-2'}" in (job.folder / "logs/rank-0.log").read_text()


@pytest.mark.more
def test_a_command_that_is_refused_leaves_the_runs_files_as_they_were(job: Job) -> None:
    """By what only its rows tell, when they have been prepared."""
    (job.folder / "rejected.jsonl").write_text("{}\n")
    recipe = (job.folder / "recipe.yaml").read_bytes()
    assert replace(job, flags=(*job.flags, "--seed", "7")).start().returncode == 2
    assert "it was trained on other rows, or in another order" in job.status["message"]
    assert (job.folder / "rejected.jsonl").read_text() == "{}\n"
    assert (job.folder / "recipe.yaml").read_bytes() == recipe


@pytest.mark.more
def test_a_finished_run_changes_nothing_and_says_ok(finished_run: FinishedRun, tmp_path: Path) -> None:
    """Even after a command that was refused. It says that more epochs were asked for."""
    out = shutil.copytree(finished_run.folder, tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.name not in ("status.json", "logs")}
    command = [*python(), SCRIPT, "--config", str(finished_run.recipe), "--output_dir", str(out)]
    assert start([*command, "--learnin_rate", "3"]).returncode == 2
    more = ["--resume_from_checkpoint", "auto", "--num_train_epochs", "13", "--learning_rate", "1e-3"]
    result = start([*command, *more])
    assert result.returncode == 0
    assert result.stdout.startswith(f"{out}: this run is finished; there is nothing to resume. ")
    assert "--learning_rate 0.0001, now 0.001; --num_train_epochs 2.0, now 13.0." in result.stdout
    assert json.loads((out / "status.json").read_text()) == {"state": "ok", "message": ""}
    assert before.items() <= {path.name: path.stat().st_mtime_ns for path in out.iterdir()}.items()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "patience", "last"),
    [
        pytest.param(("--early_stopping_patience", "2"), 1, 4, marks=pytest.mark.slow),
        pytest.param(("--early_stopping_patience", "2"), 5, 8, marks=pytest.mark.slow),
        ((), 2, 6),
    ],
)
def test_the_patience_is_that_of_the_command_that_goes_on(
    finished_run: FinishedRun, tmp_path: Path, before: tuple[str, ...], patience: int, last: int
) -> None:
    """The evaluation of step 4 is no better than that of step 2; with a patience of 2 the run would end after 6."""
    job = Job(finished_run.recipe, tmp_path / "out", flags=("--learning_rate", "0", *before))
    assert job.start(f"SIGTERM@{STEP}:3").returncode == EXIT_RESUMABLE
    result = replace(job, flags=(*job.flags, "--early_stopping_patience", str(patience))).start()
    assert result.returncode == 0, result.stderr
    assert store.checkpoints_in(job.folder)[0].name == f"checkpoint-{last}"


@pytest.mark.slow
def test_the_best_by_another_metric_is_forgotten_and_so_is_the_patience(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    """Else no loss is ever better than a score, and a run with a patience of 1 ends after step 4, where it stands."""
    flags = ("--learning_rate", "0", "--early_stopping_patience", "2")
    job = Job(finished_run.recipe, tmp_path / "out", flags=flags)
    assert job.start(f"SIGKILL@{STEP}:5").returncode == -9
    more = ("--early_stopping_patience", "1", "--metric_for_best_model", "loss")
    result = replace(job, flags=(*job.flags, *more)).start()
    assert result.returncode == 0, result.stderr
    for change in ("--metric_for_best_model macro_f1, now loss", "--greater_is_better True, now False"):
        assert change in result.stderr
    assert "the best so far is forgotten" in result.stderr
    last = store.checkpoints_in(job.folder)[0]
    assert (last.name, best_step(last)) == ("checkpoint-8", 6)
    state = json.loads((last / "trainer_state.json").read_text())
    assert (state["best_metric"], state["best_global_step"]) == (evaluated(state, 6)["eval_loss"], 6)


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [True, False])
def test_the_best_on_other_validation_rows_is_forgotten_and_so_is_the_patience(
    finished_run: FinishedRun, tmp_path: Path, is_known: bool
) -> None:
    """They have the same texts and one other label. Else, and where an earlier version did not note which rows they
    were, the run ends after step 4, where it stands."""
    given = finished_run.recipe.parent
    rows = [json.loads(line) for line in (given / "validation.jsonl").read_text(encoding="utf-8").splitlines()]
    rows[0]["label"] = next(row["label"] for row in rows if row["label"] != rows[0]["label"])
    other = tmp_path / "validation.jsonl"
    other.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    flags = ("--learning_rate", "0", "--early_stopping_patience", "2")
    job = Job(finished_run.recipe, tmp_path / "out", flags=flags)
    assert job.start(f"SIGKILL@{STEP}:5").returncode == -9
    manifest = store.read_manifest(job.folder / "checkpoint-4")
    assert manifest is not None
    if not is_known:
        text = replace(manifest, validation=None).to_json()
        (job.folder / "checkpoint-4" / store.MANIFEST).write_text(text, encoding="utf-8")
    files = ("--train_file", str(given / "train.jsonl"), "--test_file", str(given / "test.jsonl"))
    more = (*files, "--validation_file", str(other), "--early_stopping_patience", "1")
    result = replace(job, flags=(*job.flags, *more)).start()
    assert result.returncode == 0, result.stderr
    shown = "checkpoint-4 was compared with others by another metric or on other validation rows: the best so far is"
    assert (shown in result.stderr) is is_known
    last = store.checkpoints_in(job.folder)[0]
    assert (last.name, best_step(last)) == (("checkpoint-8", 6) if is_known else ("checkpoint-4", 2))


@pytest.mark.slow
def test_a_run_without_validation_rows_keeps_what_the_best_was_compared_on(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    job = Job(finished_run.recipe, tmp_path / "out")
    assert job.start(f"SIGKILL@{STEP}:5").returncode == -9
    before = store.read_manifest(job.folder / "checkpoint-4")
    train_file = str(finished_run.recipe.parent / "train.jsonl")
    alone = (
        "--train_file",
        train_file,
        "--validation_split",
        "0",
        "--eval_strategy",
        "no",
        "--load_best_model_at_end",
        "false",
    )
    result = replace(job, flags=(*job.flags, *alone)).start()
    assert result.returncode == 0, result.stderr
    after = store.read_manifest(job.folder / "checkpoint-8")
    assert before is not None
    assert after is not None
    assert before.validation == after.validation is not None


@pytest.mark.slow
def test_rows_whose_tokens_the_run_trains_already_may_take_the_place_of_others(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    """A run that trains only some rows of the embedding resumes with the same rows, as if all were still used."""
    job, given = Job(finished_run.recipe, tmp_path / "out"), finished_run.recipe.parent
    assert job.start(f"SIGKILL@{STEP}:5").returncode == -9
    before = read_row_ids(job.folder / "checkpoint-4")
    known, new = tmp_path / "known.jsonl", tmp_path / "new.jsonl"
    lines = (given / "validation.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    known.write_text("".join(lines[:6]), encoding="utf-8")
    others = (ROOT / "indictune/data/samples/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    new.write_text("".join(others[100:110]), encoding="utf-8")
    files = ("--train_file", str(given / "train.jsonl"), "--validation_file")
    refused = replace(job, flags=(*files, str(new))).start()
    assert refused.returncode == 2, refused.stderr
    assert "[checkpoint-lacks-rows]" in refused.stderr
    result = replace(job, flags=(*files, str(known))).start()
    assert result.returncode == 0, result.stderr
    assert "other validation rows: the best so far is forgotten" in result.stderr
    after = read_row_ids(job.folder / "checkpoint-8")
    assert before is not None
    assert after is not None
    assert before.tolist() == after.tolist()
    whole = Job(finished_run.recipe, tmp_path / "whole")
    assert whole.start().returncode == 0
    found, unbroken = (each.folder / "checkpoint-8" / "model.safetensors" for each in (job, whole))
    assert found.read_bytes() == unbroken.read_bytes()


def evaluated(state: Mapping[str, Any], step: int) -> dict[str, float]:
    """What a state tells of the evaluation of a step."""
    (entry,) = (entry for entry in state["log_history"] if entry["step"] == step and "eval_loss" in entry)
    return dict(entry)


@pytest.mark.more
def test_another_model_is_refused_and_the_same_in_another_place_is_not(job: Job, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    moved.mkdir()
    for name in names:
        shutil.copy(job.folder / "checkpoint-4" / name, moved)
    again = replace(job, flags=(*job.flags, "--model_name_or_path", str(moved)))
    config = (moved / "config.json").read_text()
    (moved / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    assert again.start().returncode == 2
    assert again.status["message"].startswith(f"--model_name_or_path {moved}: ")
    assert again.status["message"].endswith("[resume-other-shape]")
    (moved / "config.json").write_text(config)
    result = again.start()
    assert result.returncode == 0, result.stderr
    assert f"--model_name_or_path builtin:tiny-indic-bert, now {moved}" in result.stderr


@pytest.mark.more
@pytest.mark.parametrize("method", ["lora", pytest.param("qlora", marks=pytest.mark.slow)])
def test_an_adapter_does_not_go_on_from_other_weights_in_the_same_folder(
    finished_run: FinishedRun, tmp_path: Path, method: str
) -> None:
    base = model_in(tmp_path / "base")
    flags = ("--method", method, "--model_name_or_path", str(base), "--bf16", "false")
    job = Job(finished_run.recipe, tmp_path / "out", flags=flags)
    result = job.start(f"SIGTERM@{STEP}:2")
    assert result.returncode == EXIT_RESUMABLE, result.stderr
    noted = json.loads((job.folder / "checkpoint-2" / "base_model.json").read_text())
    weights = load_file(base / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, base / "model.safetensors", {"format": "pt"})
    assert job.start().returncode == 2
    message = job.status["message"]
    assert message.startswith(f"--model_name_or_path {base}: checkpoint-2 is an adapter on {base} with ")
    assert noted["fingerprint"][:16] in message
    assert fingerprint(base)[:16] in message
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    moved = base.rename(tmp_path / "moved")
    result = replace(job, flags=(*flags, "--model_name_or_path", str(moved))).start()
    assert result.returncode == 0, result.stderr

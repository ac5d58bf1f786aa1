"""`indictune checkpoint` on the checkpoints of a real run of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from indictune.checkpoint import plain_model, store
from indictune.cli import main
from indictune.config.arguments import ModelArguments
from indictune.models import builtin
from indictune.models.task_models import TEMPERATURE
from tests.checkpoint.test_store import flip_a_bit, truncate, write
from tests.conftest import FinishedRun
from tests.ranks.launching import SCRIPT, python, start
from tests.refusals import refused as expect_refusal


@pytest.fixture
def run(finished_run: FinishedRun, tmp_path: Path) -> Path:
    """A run of 8 steps with checkpoints of steps 4 and 8, to be spoilt."""
    folder = tmp_path / "run"
    shutil.copytree(finished_run.folder, folder)
    return folder


def stopped(run: Path) -> Path:
    """The run, as if it had not ended yet."""
    (run / "metrics.json").unlink()
    return run


def best_step(run: Path) -> int:
    """4 or 8, whichever had the lower loss."""
    state = json.loads((run / "checkpoint-8" / "trainer_state.json").read_text(encoding="utf-8"))
    return int(state["best_global_step"])


def noted(line: str) -> tuple[str, list[str]]:
    """State and marks of a line of the table."""
    (state,) = (word for word in line.split() if word in ("whole", "damaged", "unfinished"))
    return state, line.partition(state)[2].replace(",", "").split()


def listed(capsys: pytest.CaptureFixture[str], folder: Path, code: int) -> list[str]:
    assert main(["checkpoint", str(folder)]) == code
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["checkpoint", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


class TestListing:
    def test_the_newest_comes_first_and_the_next_start_is_named(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        header, _, newest, oldest, auto = listed(capsys, stopped(run), 0)
        size = store.read_manifest(run / "checkpoint-8").bytes  # type: ignore[union-attr]
        assert header.split("  ")[0] == "step"
        assert newest.split()[:8] == ["8", "single", "x", "1", f"{size / 1e6:,.1f}", "MB", "0", "whole"]
        assert oldest.split()[0] == "4"
        best = best_step(run)
        assert noted(newest) == ("whole", ["best"] * (best == 8) + ["auto"])
        assert noted(oldest) == ("whole", ["best"] * (best == 4))
        assert auto == "--resume_from_checkpoint auto resumes checkpoint-8."

    def test_of_a_finished_run_nothing_is_resumed(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        lines = listed(capsys, run, 0)
        assert sorted(mark for line in lines[2:4] for mark in noted(line)[1]) == ["best"]
        assert lines[-1] == "The run is finished: --resume_from_checkpoint auto trains nothing."

    def test_a_damaged_one_is_reported_with_its_file_and_passed_over(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        flip_a_bit(stopped(run) / "checkpoint-8" / "optimizer.pt")
        _, _, newest, oldest, damage, *_, auto = listed(capsys, run, 1)
        assert noted(newest) == ("damaged", [])
        assert noted(oldest) == ("whole", ["best", "auto"])  # as far as step 4 knows
        assert damage == f"damaged: {run / 'checkpoint-8' / 'optimizer.pt'} is not as it was written"
        assert auto.endswith("resumes checkpoint-4.")

    @pytest.mark.parametrize("name", [".", "checkpoint-8/optimizer.pt"])
    def test_one_that_others_may_have_written_is_not_said_to_be_gone_on_from(
        self, run: Path, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        (stopped(run) / name).chmod(0o777)
        shown = listed(capsys, run, 0)[-1]
        assert shown.startswith(
            f"--resume_from_checkpoint auto would be refused: {run / 'checkpoint-8'}: {run / name}"
        )
        assert shown.endswith("[checkpoint-not-trusted]")

    def test_where_none_is_whole_auto_starts_afresh(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        stopped(run)
        for step in (4, 8):
            truncate(run / f"checkpoint-{step}" / "optimizer.pt")
        assert listed(capsys, run, 1)[-1] == "None is whole: --resume_from_checkpoint auto starts afresh."

    def test_one_without_a_manifest_is_damaged(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (run / "checkpoint-9").mkdir()
        lines = listed(capsys, run, 1)
        assert lines[2].split() == ["9", "-", "-", "-", "damaged"]
        assert f"damaged: {run / 'checkpoint-9' / 'manifest.json'} is missing or cannot be read" in lines

    def test_one_can_be_named(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        lines = listed(capsys, stopped(run) / "checkpoint-4", 0)
        assert [line.split()[0] for line in lines[2:]] == ["4"]
        assert "auto" not in lines[2]
        truncate(run / "checkpoint-4" / "trainer_state.json")
        assert noted(listed(capsys, run / "checkpoint-4", 1)[2]) == ("damaged", [])

    def test_a_folder_without_any_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "[no-checkpoints]" in refused(capsys, str(tmp_path / "no"))
        assert "[no-checkpoints]" in refused(capsys, str(tmp_path))
        assert "[argument-missing]" in refused(capsys)


class TestConverting:
    def test_the_best_one_becomes_the_model_of_the_run(
        self, run: Path, finished_run: FinishedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "model"
        assert main(["checkpoint", str(run), "--convert_to", str(folder)]) == 0
        assert capsys.readouterr().out == f"{folder}: the model of {run / f'checkpoint-{best_step(run)}'}.\n"
        assert (folder / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
        AutoModelForSequenceClassification.from_pretrained(folder)
        test_file = str(finished_run.recipe.parent / "test.jsonl")
        command = [*python(), "indictune/__main__.py", "evaluate", "--model", str(folder), "--test_file", test_file]
        result = start(command)
        assert result.returncode == 0, result.stderr
        metrics = json.loads((folder / "evaluation" / "test" / "metrics.json").read_text(encoding="utf-8"))
        assert metrics["test"] == finished_run.metrics["test"]

    def test_another_one_has_its_own_weights(self, run: Path, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        other = 12 - best_step(run)
        assert main(["checkpoint", str(run / f"checkpoint-{other}"), "--convert_to", str(folder)]) == 0
        converted, last = load_file(folder / "model.safetensors"), load_file(run / "model.safetensors")
        assert {name: each.shape for name, each in converted.items()} == {n: each.shape for n, each in last.items()}
        assert not torch.equal(converted["classifier.weight"], last["classifier.weight"])

    def test_one_keeps_the_recipe_that_it_was_written_with(
        self, run: Path, finished_run: FinishedRun, tmp_path: Path
    ) -> None:
        """Whatever settings the run has resumed with since."""
        (run / "recipe.yaml").write_text("seed: 7\n", encoding="utf-8")
        folder = tmp_path / "model"
        assert main(["checkpoint", str(run / "checkpoint-8"), "--convert_to", str(folder)]) == 0
        assert (folder / "recipe.yaml").read_bytes() == (finished_run.folder / "recipe.yaml").read_bytes()

    def test_a_damaged_one_is_refused_by_its_file(
        self, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        flip_a_bit(run / "checkpoint-4" / "model.safetensors")
        message = refused(capsys, str(run / "checkpoint-4"), "--convert_to", str(tmp_path / "model"))
        assert f"{run / 'checkpoint-4' / 'model.safetensors'} is not as it was written" in message
        assert not (tmp_path / "model").exists()

    def test_nothing_is_written_over(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        message = refused(capsys, str(run), "--convert_to", str(run))
        assert f"--convert_to {run}: " in message
        assert "[folder-not-empty]" in message

    def test_a_model_gets_no_checkpoints_name(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        message = refused(capsys, str(run), "--convert_to", str(run / "checkpoint-9"))
        assert f"--convert_to {run / 'checkpoint-9'}: " in message
        assert "[model-named-like-checkpoint]" in message

    @pytest.mark.more
    @pytest.mark.parametrize("name", ["checkpoint-8/model", "checkpoint-8", "link/model"])
    def test_a_checkpoint_gets_no_model(
        self, run: Path, finished_run: FinishedRun, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        """Nor one that is merged, nor another run."""
        checkpoint, folder = run / "checkpoint-8", run / name
        (run / "link").symlink_to(checkpoint)
        shown = f"{folder}: it is in the checkpoint {checkpoint}, "
        assert f"--convert_to {shown}" in refused(capsys, str(run), "--convert_to", str(folder))
        (adapter := run / "adapter").mkdir()
        (adapter / "adapter_config.json").write_text("{}")
        assert main(["merge", str(adapter), "--output_dir", str(folder)]) == 2
        assert f"--output_dir {shown}" in capsys.readouterr().err
        for recipe in (finished_run.recipe, run / "no.yaml"):
            flags = ["--config", str(recipe), "--output_dir", str(folder), "--resume_from_checkpoint", "auto"]
            result = start([*python(), SCRIPT, *flags])
            assert result.returncode == 2
            assert shown in result.stderr or "no.yaml: there is no such file" in result.stderr
        assert store.damage(checkpoint) == []


def test_pickles_are_trusted_in_the_folder_of_a_run(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 4)
    with expect_refusal("checkpoint-not-trusted", "has no recipe.yaml"):
        plain_model.check_run_folder(checkpoint, trust_checkpoint=False)
    (tmp_path / "recipe.yaml").touch()
    plain_model.check_run_folder(checkpoint, trust_checkpoint=False)
    tmp_path.chmod(0o777)
    with expect_refusal("checkpoint-not-trusted", "can be written by other users"):
        plain_model.check_run_folder(checkpoint, trust_checkpoint=False)


@pytest.mark.more
def test_an_adapter_stays_an_adapter(finished_run: FinishedRun, tmp_path: Path) -> None:
    flags = ["--method", "lora", "--num_train_epochs", "1", "--output_dir", str(tmp_path / "run")]
    result = start([*python(), SCRIPT, "--config", str(finished_run.recipe), *flags])
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "adapter"
    assert main(["checkpoint", str(tmp_path / "run"), "--convert_to", str(folder)]) == 0
    for name in ("adapter_model.safetensors", "adapter_config.json", "base_model.json", "recipe.yaml"):
        assert (folder / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    converted, own = (json.loads((each / "config.json").read_text("utf-8")) for each in (folder, tmp_path / "run"))
    own.pop(TEMPERATURE, None)  # fitted when the run had ended
    assert converted == own


def test_the_base_of_a_model_in_parts_may_be_a_bin(finished_run: FinishedRun, tmp_path: Path) -> None:
    base = shutil.copytree(builtin.resolve("builtin:tiny-indic-bert"), tmp_path / "base")
    torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    checkpoint = shutil.copytree(finished_run.folder / "checkpoint-8", tmp_path / "checkpoint-8")
    recipe = f"model_name_or_path: {base}\nmodel_revision: main\n"
    (checkpoint / "recipe.yaml").write_text(recipe, encoding="utf-8")
    config = AutoConfig.from_pretrained(checkpoint)
    about = ModelArguments(str(checkpoint))
    embedding = plain_model._embedding_at_start(checkpoint, AutoModelForSequenceClassification, config, about)
    assert embedding.shape == (config.vocab_size, config.hidden_size)

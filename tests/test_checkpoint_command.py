"""`indictune checkpoint` on the checkpoints of a real run of one process."""

from __future__ import annotations

import io
import json
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification, TrainingArguments
from transformers.utils.logging import get_verbosity, set_verbosity, set_verbosity_warning

from indictune.checkpoint import copying, export, resume, store
from indictune.checkpoint.store import UNFINISHED
from indictune.cli import main
from indictune.config.command_arguments import CheckpointArguments
from indictune.errors import UserError
from indictune.files import AUTO
from indictune.models import builtin
from tests.checkpoint.test_store import flip_a_bit, truncate, write
from tests.conftest import FinishedRun
from tests.ranks.launching import SCRIPT, python, start


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
    def test_the_newest_comes_first_and_the_next_start_is_told(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        header, _, newest, oldest, versions, auto = listed(capsys, stopped(run), 0)
        size = store.read_manifest(run / "checkpoint-8").bytes  # type: ignore[union-attr]
        assert header.split("  ")[0] == "step"
        assert newest.split()[:8] == ["8", "single", "x", "1", f"{size / 1e6:,.1f}", "MB", "0", "whole"]
        assert oldest.split()[0] == "4"
        best = best_step(run)
        assert noted(newest) == ("whole", ["best"] * (best == 8) + ["auto"])
        assert noted(oldest) == ("whole", ["best"] * (best == 4))
        assert f"torch {torch.__version__}" in versions
        assert auto == "--resume_from_checkpoint auto goes on from checkpoint-8."

    def test_of_a_finished_run_nothing_is_resumed(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        lines = listed(capsys, run, 0)
        assert sorted(mark for line in lines[2:4] for mark in noted(line)[1]) == ["best"]
        assert lines[-1] == "The run is finished: --resume_from_checkpoint auto trains nothing."

    def test_a_damaged_one_is_told_with_its_file_and_passed_over(
        self, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        flip_a_bit(stopped(run) / "checkpoint-8" / "optimizer.pt")
        _, _, newest, oldest, damage, *_, auto = listed(capsys, run, 1)
        assert noted(newest) == ("damaged", [])
        assert noted(oldest) == ("whole", ["best", "auto"])  # as far as step 4 knows
        assert damage == f"damaged: {run / 'checkpoint-8' / 'optimizer.pt'} is not as it was written"
        assert auto.endswith("checkpoint-4.")

    @pytest.mark.parametrize("name", [".", "checkpoint-8/optimizer.pt"])
    def test_one_that_others_may_have_written_is_not_said_to_be_gone_on_from(
        self, run: Path, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        (stopped(run) / name).chmod(0o777)
        told = listed(capsys, run, 0)[-1]
        assert told.startswith(f"--resume_from_checkpoint auto would be refused: {run / 'checkpoint-8'}: {run / name}")
        assert " can be written by other users" in told
        assert told.endswith("add --trust_checkpoint true.")

    @pytest.mark.parametrize("ends_with_best", [True, False])
    @pytest.mark.parametrize("whole", [(2, 4, 6, 8), (2, 4, 8), (4, 8), (8,)])
    def test_it_is_the_one_that_a_run_takes(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: tuple[int, ...], ends_with_best: bool
    ) -> None:
        """8 and 6 name 6 as the best, and 4 names 2; a run that ends with its best passes over those that lack it."""
        recipe = f"load_best_model_at_end: {ends_with_best}\n"
        for step in whole:
            state: dict[str, object] = {
                "best_model_checkpoint": "out/checkpoint-6" if step > 4 else "out/checkpoint-2"
            }
            write(tmp_path, step, state=state, recipe=recipe)
        args = TrainingArguments(str(tmp_path), use_cpu=True)
        args.load_best_model_at_end = ends_with_best
        taken, _ = resume.newest_whole(store.listed(tmp_path), AUTO, args, False)
        assert taken is not None
        expected = 4 if ends_with_best and whole == (2, 4, 8) else 8
        assert taken.name == f"checkpoint-{expected}"
        lines = listed(capsys, tmp_path, 0)
        assert lines[-1] == f"--resume_from_checkpoint auto goes on from checkpoint-{expected}."
        assert [line.split()[0] for line in lines if line.endswith("auto")] == [str(expected)]

    def test_where_none_is_whole_auto_starts_afresh(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        stopped(run)
        for step in (4, 8):
            truncate(run / f"checkpoint-{step}" / "optimizer.pt")
        assert listed(capsys, run, 1)[-1] == "None is whole: --resume_from_checkpoint auto starts afresh."

    def test_one_without_a_manifest_is_damaged(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (run / "checkpoint-9").mkdir()
        lines = listed(capsys, run, 1)
        assert lines[2].split() == ["9", "-", "-", "-", "damaged"]
        assert f"damaged: {run / 'checkpoint-9' / 'manifest.json'} is missing" in lines

    def test_one_that_is_being_written_is_unfinished(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (run / UNFINISHED / "checkpoint-12").mkdir(parents=True)
        lines = listed(capsys, run, 0)
        assert lines[2].split() == ["12", "-", "-", "-", "unfinished"]
        assert [noted(line)[0] for line in lines[3:5]] == ["whole", "whole"]

    def test_one_that_the_next_start_gives_its_name_is_what_it_goes_on_from(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The run was killed before it could."""
        unfinished = tmp_path / UNFINISHED / "checkpoint-4"
        written = write(tmp_path, 4)
        unfinished.parent.mkdir(exist_ok=True)
        written.rename(unfinished)
        *_, told, auto = listed(capsys, tmp_path, 0)
        assert told == f"unfinished: {unfinished} is written, and has yet to get its name"
        assert auto == "--resume_from_checkpoint auto gives it its name, and goes on from checkpoint-4."
        copying.recover(tmp_path)
        assert listed(capsys, tmp_path, 0)[-1].endswith("goes on from checkpoint-4.")
        write(tmp_path, 8)
        (tmp_path / "checkpoint-8").rename(tmp_path / UNFINISHED / "checkpoint-8")  # beside another it is none
        *_, told, _, auto = listed(capsys, tmp_path, 0)
        assert told.endswith("has yet to get its name; if that was cut, the run's next start removes it")
        assert auto.endswith("auto goes on from checkpoint-4.")

    def test_what_a_run_saves_and_removes_meanwhile_is_listed_as_it_is_then(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """To read gigabytes takes longer than a run needs for that."""
        for step in (4, 8, 12):
            write(tmp_path, step)
        unfinished = tmp_path / UNFINISHED / "checkpoint-12"
        (tmp_path / "checkpoint-12").rename(unfinished)
        damage = store.damage

        def damage_meanwhile(checkpoint: Path, **how: Any) -> list[str]:
            if unfinished.exists():
                store.give_name(unfinished, tmp_path / "checkpoint-12")
                store.rotate(tmp_path, 2, [])
                (tmp_path / UNFINISHED / "checkpoint-16").mkdir()
            return damage(checkpoint, **how)

        monkeypatch.setattr(store, "damage", damage_meanwhile)
        lines = listed(capsys, tmp_path, 0)
        assert [(line.split()[0], noted(line)[0]) for line in lines[2:5]] == [
            ("16", "unfinished"),
            ("12", "whole"),
            ("8", "whole"),
        ]
        assert lines[-1].endswith("goes on from checkpoint-12.")
        assert "checkpoint-4" not in str(lines)

    def test_one_that_is_saved_anew_meanwhile_is_looked_at_again(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A rollback, or a run that goes on, comes to a step again; the files that were read first are others now."""
        write(tmp_path, 4)
        unfinished = write(tmp_path / UNFINISHED, 4, state={"saved": "again"})
        digest, once = store.digest, threading.Lock()

        def digest_meanwhile(path: Path) -> store.FileDigest:
            if once.acquire(blocking=False):  # several files are read at once
                store.give_name(unfinished, tmp_path / "checkpoint-4")
            return digest(path)

        monkeypatch.setattr(store, "digest", digest_meanwhile)
        assert noted(listed(capsys, tmp_path, 0)[2]) == ("whole", ["auto"])

    def test_one_that_was_named_and_is_removed_meanwhile_is_not_there(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        named, damage = write(tmp_path, 4), store.damage

        def damage_meanwhile(checkpoint: Path, **how: Any) -> list[str]:
            store.remove(checkpoint)
            return damage(checkpoint, **how)

        monkeypatch.setattr(store, "damage", damage_meanwhile)
        assert f"{named}: there is no such folder." in refused(capsys, str(named))

    def test_one_that_will_be_given_back_is_told(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        told = "checkpoint-8 is being replaced; if that was cut, the run's next start gives it back."
        (run / "checkpoint-8").rename(run / ".replaced-checkpoint")
        assert listed(capsys, run, 0)[-1] == told
        shutil.rmtree(run / "checkpoint-4")
        assert told in refused(capsys, str(run))

    def test_one_can_be_named(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        lines = listed(capsys, stopped(run) / "checkpoint-4", 0)
        assert [line.split()[0] for line in lines[2:]] == ["4", "written"]
        assert "auto" not in lines[2]
        truncate(run / "checkpoint-4" / "trainer_state.json")
        assert noted(listed(capsys, run / "checkpoint-4", 1)[2]) == ("damaged", [])

    def test_a_folder_without_any_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert f"{tmp_path / 'no'}: there is no such folder." in refused(capsys, str(tmp_path / "no"))
        assert f"{tmp_path}: holds no checkpoint (no checkpoint-<step>)." in refused(capsys, str(tmp_path))
        assert "[checkpoint-folder-missing]" in refused(capsys)


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

    def test_one_that_was_left_behind_keeps_the_recipe_that_it_was_written_with(
        self, run: Path, finished_run: FinishedRun, tmp_path: Path
    ) -> None:
        """And so does any other, whatever the run has gone on with since."""
        (run / "abandoned-1").mkdir()
        left = (run / "checkpoint-4").rename(run / "abandoned-1" / "checkpoint-4")
        (run / "recipe.yaml").write_text("seed: 7\n", encoding="utf-8")
        for checkpoint in (left, run / "checkpoint-8"):
            folder = tmp_path / checkpoint.name
            assert main(["checkpoint", str(checkpoint), "--convert_to", str(folder)]) == 0
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
        assert f"--convert_to {run / 'checkpoint-9'}: has the name of a checkpoint of that run, and" in message

    @pytest.mark.parametrize("name", ["checkpoint-8/model", "checkpoint-8", "link/model"])
    def test_a_checkpoint_gets_no_model(
        self, run: Path, finished_run: FinishedRun, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        """Nor one that is merged, nor another run."""
        checkpoint, folder = run / "checkpoint-8", run / name
        (run / "link").symlink_to(checkpoint)
        told = f"{folder}: it is in the checkpoint {checkpoint}, "
        assert f"--convert_to {told}" in refused(capsys, str(run), "--convert_to", str(folder))
        assert main(["merge", str(checkpoint), "--output_dir", str(folder)]) == 2
        assert f"--output_dir {told}" in capsys.readouterr().err
        for recipe in (finished_run.recipe, run / "no.yaml"):
            flags = ["--config", str(recipe), "--output_dir", str(folder), "--resume_from_checkpoint", "auto"]
            result = start([*python(), SCRIPT, *flags])
            assert result.returncode == 2
            assert told in result.stderr or "no.yaml: there is no such file" in result.stderr
        assert store.damage(checkpoint) == []

    def test_an_unfinished_one_is_no_model(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / UNFINISHED / "checkpoint-2").mkdir(parents=True)
        message = refused(capsys, str(tmp_path), "--convert_to", str(tmp_path / "model"))
        assert "its only checkpoint is unfinished" in message


def test_pickles_that_were_left_behind_are_trusted_as_the_rest_of_the_run(tmp_path: Path) -> None:
    left = write(tmp_path / "abandoned-1", 4)
    with pytest.raises(UserError, match=r"is not in a run's --output_dir \(.* has no recipe.yaml\)"):
        export.check_trusted(left, trust_checkpoint=False)
    (tmp_path / "recipe.yaml").touch()
    export.check_trusted(left, trust_checkpoint=False)
    left.parent.chmod(0o777)
    with pytest.raises(UserError, match=r"abandoned-1 can be written by other users"):
        export.check_trusted(left, trust_checkpoint=False)


def test_an_adapter_stays_an_adapter(finished_run: FinishedRun, tmp_path: Path) -> None:
    flags = ["--method", "lora", "--num_train_epochs", "1", "--output_dir", str(tmp_path / "run")]
    result = start([*python(), SCRIPT, "--config", str(finished_run.recipe), *flags])
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "adapter"
    assert main(["checkpoint", str(tmp_path / "run"), "--convert_to", str(folder)]) == 0
    for name in ("adapter_model.safetensors", "adapter_config.json", "base_model.json", "config.json", "recipe.yaml"):
        assert (folder / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


def test_the_base_of_a_model_in_parts_may_be_a_bin_where_that_is_trusted(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    base = shutil.copytree(builtin.resolve("builtin:tiny-indic-bert"), tmp_path / "base")
    torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    checkpoint = shutil.copytree(finished_run.folder / "checkpoint-8", tmp_path / "checkpoint-8")
    recipe = f"model_name_or_path: {base}\nmodel_revision: main\n"
    (checkpoint / "recipe.yaml").write_text(recipe, encoding="utf-8")
    config = AutoConfig.from_pretrained(checkpoint)

    def embedding(trusts: bool) -> torch.Tensor:
        args = CheckpointArguments(str(checkpoint), trust_checkpoint=trusts)
        return export._embedding_at_start(args, checkpoint, AutoModelForSequenceClassification, config)

    with pytest.raises(UserError, match=r"\[pickle-not-trusted\]"):
        embedding(trusts=False)
    assert embedding(trusts=True).shape == (config.vocab_size, config.hidden_size)


def test_the_base_of_a_model_in_parts_is_read_without_a_word_of_the_head_that_it_lacks(
    finished_run: FinishedRun,
) -> None:
    """The head is the checkpoint's, and no random one."""
    checkpoint = finished_run.folder / "checkpoint-8"
    args, config = CheckpointArguments(str(checkpoint)), AutoConfig.from_pretrained(checkpoint)
    before, said = get_verbosity(), io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("transformers").addHandler(handler)
    set_verbosity_warning()  # type: ignore[no-untyped-call]
    try:
        export._embedding_at_start(args, checkpoint, AutoModelForSequenceClassification, config)
        assert said.getvalue() == ""
        assert get_verbosity() == logging.WARNING
    finally:
        set_verbosity(before)
        logging.getLogger("transformers").removeHandler(handler)

"""What may change between a checkpoint and the run that resumes it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from indictune.checkpoint import compatibility, store
from indictune.checkpoint.compatibility import (
    TRAIN_ROWS,
    changes_of_finished,
    check_fits,
    kept_settings,
    resume_warnings,
    train_file_digests,
)
from indictune.config.plan import Launch
from indictune.errors import UserError
from indictune.files import write_json
from tests.checkpoint.test_store import write
from tests.refusals import refused

SETTINGS: dict[str, Any] = {
    "global_batch_size": 8,
    "optim": "adamw_torch",
    "lr_scheduler_type": "linear",
    "method": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_target_modules": ["query", "value"],
    "use_dora": False,
    "modules_to_save": [],
    "model_name_or_path": "me/base",
    "metric_for_best_model": "loss",
    "logging_steps": 10,
}
DDP = Launch("ddp", 2)  # which wrote what `write` makes


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return written_with(tmp_path)


def written_with(folder: Path, **settings: Any) -> Path:
    checkpoint = write(folder, 4, recipe=yaml.safe_dump(SETTINGS | settings))
    manifest = store.read_manifest(checkpoint)
    assert manifest is not None
    text = replace(manifest, versions={}).to_json()
    (checkpoint / store.MANIFEST).write_text(text, encoding="utf-8")
    return checkpoint


def test_the_same_settings_resume_without_a_word(checkpoint: Path) -> None:
    check_fits(checkpoint, DDP, SETTINGS, {})
    assert resume_warnings(checkpoint, DDP, SETTINGS) == []


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("global_batch_size", 16), ("method", "qlora"), ("method", "full"), ("lora_r", 16), ("optim", "sgd")),
            *(("lora_target_modules", ["value"]), ("use_dora", True), ("modules_to_save", ["pooler"])),
            *(("lr_scheduler_type", "greedy"), ("lr_scheduler_type", "reduce_lr_on_plateau")),
        ],
    )
    def test_a_setting_that_fits_no_other_state(self, checkpoint: Path, name: str, value: Any) -> None:
        with refused("resume-other-setting", "checkpoint-4", flag=f"--{name}"):
            check_fits(checkpoint, DDP, SETTINGS | {name: value}, {})

    def test_another_metric_of_a_schedule_by_evaluations(self, tmp_path: Path) -> None:
        checkpoint = written_with(tmp_path, lr_scheduler_type="greedy")
        now = SETTINGS | {"lr_scheduler_type": "greedy", "metric_for_best_model": "accuracy"}
        with refused("resume-other-setting", flag="--metric_for_best_model"):
            check_fits(checkpoint, DDP, now, {})

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("lora_alpha", 32), ("lora_target_modules", ["value", "query"]), ("lr_scheduler_type", "cosine")),
            *(("optim", "adamw_torch_fused"), ("logging_steps", 1)),
        ],
    )
    def test_no_setting_whose_state_fits(self, checkpoint: Path, name: str, value: Any) -> None:
        check_fits(checkpoint, DDP, SETTINGS | {name: value}, {})

    def test_no_flag_of_adapters_without_one(self, tmp_path: Path) -> None:
        check_fits(written_with(tmp_path, method="full"), DDP, SETTINGS | {"method": "full", "lora_r": 16}, {})

    def test_all_at_once(self, checkpoint: Path) -> None:
        with pytest.raises(UserError) as raised:
            check_fits(checkpoint, Launch("zero3", 2), SETTINGS | {"optim": "sgd", "lora_r": 1}, {})
        assert {each.flag for each in raised.value.problems} == {"--optim", "--lora_r", "--resume_from_checkpoint"}

    @pytest.mark.parametrize("recipe", [None, "", "\t", "a: [", "- a", "decided: a"])
    def test_nothing_by_a_recipe_that_cannot_be_read(self, tmp_path: Path, recipe: str | None) -> None:
        checkpoint = write(tmp_path, 4, recipe=recipe)
        check_fits(checkpoint, DDP, SETTINGS | {"optim": "sgd"}, {})

    def test_zero_does_not_take_over_from_ddp(self, checkpoint: Path) -> None:
        with refused("resume-other-strategy", "ddp x 2", "zero3 x 2", flag="--resume_from_checkpoint"):
            check_fits(checkpoint, Launch("zero3", 2), SETTINGS, {})

    @pytest.mark.parametrize("optim", ["adafactor", "paged_adamw_8bit"])
    def test_optimizer_states_that_cannot_be_sharded(self, tmp_path: Path, optim: str) -> None:
        checkpoint, now = written_with(tmp_path, optim=optim), SETTINGS | {"optim": optim}
        with refused("resume-other-strategy", optim):
            check_fits(checkpoint, Launch("fsdp2", 2), now, {})
        check_fits(checkpoint, Launch("single", 1), now, {})

    @pytest.mark.parametrize("config", ["config.json", "base_config.json"])
    def test_a_model_of_another_shape(self, checkpoint: Path, config: str) -> None:
        (checkpoint / config).write_text('{"model_type": "bert", "hidden_size": 128, "vocab_size": 9}')
        same = {"model_type": "bert", "hidden_size": 128, "vocab_size": 10, "num_hidden_layers": 2}
        check_fits(checkpoint, DDP, SETTINGS, same)
        with refused("resume-other-shape", "hidden_size 128, here 256", flag="--model_name_or_path"):
            check_fits(checkpoint, DDP, SETTINGS, {**same, "hidden_size": 256})

    def test_another_commit_of_the_base(self, checkpoint: Path) -> None:
        base = {"name": "me/base", "revision": "main", "commit_hash": "abc", "fingerprint": None}
        (checkpoint / "base_model.json").write_text(json.dumps(base))
        for same in ("abc", None):
            check_fits(checkpoint, DDP, SETTINGS, {"_commit_hash": same})
        with refused("resume-other-base", "commit abc", "def", flag="--model_name_or_path"):
            check_fits(checkpoint, DDP, SETTINGS, {"_commit_hash": "def"})


class TestWarned:
    def test_of_a_setting_with_both_values(self, checkpoint: Path) -> None:
        (warning,) = resume_warnings(checkpoint, DDP, SETTINGS | {"lora_alpha": 32, "logging_steps": 1})
        assert "other settings: --lora_alpha 16, now 32. The new ones count" in warning

    def test_of_a_setting_that_the_optimizer_keeps(self, tmp_path: Path) -> None:
        checkpoint = written_with(tmp_path, learning_rate=0.1, optim_args=None)
        (warning,) = resume_warnings(checkpoint, DDP, SETTINGS | {"learning_rate": 0.2})
        assert "--learning_rate 0.1, now 0.2. Its optimizer state keeps the old ones" in warning
        assert kept_settings(checkpoint) == {"learning_rate": 0.1, "optim": "adamw_torch", "optim_args": None}

    @pytest.mark.parametrize("launch", [Launch("ddp", 4), Launch("fsdp2_offload", 2), Launch("single", 1)])
    def test_of_another_launch(self, checkpoint: Path, launch: Launch) -> None:
        (warning,) = resume_warnings(checkpoint, launch, SETTINGS)
        assert f"was written by ddp x 2, and {launch.strategy} x {launch.world_size} resumes it" in warning
        assert ("Dropout draws other numbers" in warning) == (launch.world_size != 2)

    def test_of_what_the_run_has_decided(self, tmp_path: Path) -> None:
        checkpoint = written_with(tmp_path, decided={"tf32": True})
        (warning,) = resume_warnings(checkpoint, DDP, SETTINGS | {"tf32": None})
        assert "--tf32 True, now None" in warning

    def test_of_the_content_of_files(self, checkpoint: Path) -> None:
        write_json(checkpoint / compatibility.FLAG_FILES, {"class_weights": {"no": 1.0, "yes": 2.0}})
        (warning,) = resume_warnings(checkpoint, DDP, SETTINGS | {"class_weights": {"no": 1.0, "yes": 3.0}})
        assert "--class_weights yes=2.0, now yes=3.0" in warning
        assert resume_warnings(checkpoint, DDP, SETTINGS) == []


class TestAFinishedRun:
    def test_the_same_rows_from_elsewhere_are_no_other_rows(self, checkpoint: Path, tmp_path: Path) -> None:
        rows, moved = tmp_path / "rows.csv", tmp_path / "moved.csv"
        rows.write_text("text,label\na,x\n")
        write_json(checkpoint / compatibility.FLAG_FILES, {TRAIN_ROWS: train_file_digests({"train_file": str(rows)})})
        rows.rename(moved)
        for gone_or_moved in (rows, moved):
            assert changes_of_finished(checkpoint, {"train_file": str(gone_or_moved)}) == ""
        assert "--global_batch_size 8, now 48" in changes_of_finished(checkpoint, {"global_batch_size": 48})
        moved.write_text("text,label\nb,x\n")
        for other in ({"train_file": [str(moved)]}, {"train_files": [json.dumps({"path": str(moved)})]}):
            with refused("finished-with-other-rows", f"rows in {moved}.", flag="--output_dir"):
                changes_of_finished(checkpoint, other)

    def test_of_an_older_version_only_the_flags_are_compared(self, checkpoint: Path, tmp_path: Path) -> None:
        rows = tmp_path / "rows.csv"
        rows.write_text("text,label\na,x\n")
        assert changes_of_finished(checkpoint, {"train_file": str(rows)}) == ""

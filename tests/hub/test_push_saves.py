"""A run that pushes each of its saves."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState

from indictune.config.arguments import IndicTrainingArguments
from indictune.hub import publish
from indictune.hub.publish import Destination
from indictune.training.callbacks.push_saves import PushSaves
from tests.faults.hub import Fault, Hub
from tests.hub.folders import model_folder


def saved(callback: PushSaves, folder: Path, step: int) -> None:
    """Save a checkpoint, and let the callback hear of it."""
    checkpoint = model_folder(folder / f"checkpoint-{step}")
    for name in ("model.safetensors", "optimizer.pt", "trainer_state.json"):
        (checkpoint / name).write_text(str(step))
    args = IndicTrainingArguments(output_dir=str(folder), use_cpu=True)
    callback.on_save(args, TrainerState(global_step=step), TrainerControl())


def test_the_model_of_a_checkpoint_is_pushed_and_one_that_is_saved_meanwhile_is_not(
    server: Hub, tmp_path: Path
) -> None:
    server.faults = [Fault("/commit/", "slow")]
    callback = PushSaves(tmp_path, Destination("me/out", private=True))
    saved(callback, tmp_path, 4)
    saved(callback, tmp_path, 8)
    for path in (tmp_path / "checkpoint-4").iterdir():
        path.unlink()  # as --save_total_limit does
    callback.on_train_end()
    assert server.commits == [("main", "Step 4", ["config.json", "metrics.json", "model.safetensors"])]
    assert server.files["model.safetensors"] == b"4"
    saved(callback, tmp_path, 12)
    callback.on_train_end()
    assert server.files["model.safetensors"] == b"12"
    assert not (tmp_path / ".push").exists()


def test_a_push_that_fails_is_a_warning(
    server: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "WAITS_S", ())
    monkeypatch.setattr(logging.getLogger("indictune"), "propagate", True)
    server.refuses = True
    callback = PushSaves(tmp_path, Destination("me/out"))
    saved(callback, tmp_path, 4)
    callback.on_train_end()
    assert server.commits == []
    assert "Step 4 is not pushed" in caplog.text
    server.refuses = False
    saved(callback, tmp_path, 8)
    callback.on_train_end()
    assert [title for _, title, _ in server.commits] == ["Step 8"]

"""A cache of the tests' own, and one small finished run, which many tests look at."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.ranks.forking import SERVERS
from tests.ranks.launching import ROOT, SCRIPT, Run, path, python, start


def pytest_configure() -> None:
    """Ask no Hub, before its package is imported: the tests need no network. All programs are of one environment.

    Hear Ctrl-C: where the tests run in the background it is ignored, and by all that they start.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["PATH"] = path()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary folder of all processes that test side by side."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What an earlier run of the tests prepared hides nothing; processes that test side by side share the cache."""
    folder = _shared_folder(tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INDICTUNE_CACHE", str(folder / "indictune_cache"))
        patch.setenv(SERVERS, str(folder))
        yield


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """A run that was begun in this process leaves these ignored when it ends, here and by all that is started next."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def tf32_as_before() -> Iterator[None]:
    """How fp32 is multiplied is the process's: the test finds torch's own setting, and leaves it."""
    import torch
    from transformers.utils.import_utils import enable_tf32  # not before `pytest_configure`

    def reset() -> None:
        enable_tf32.cache_clear()  # transformers sets nothing twice
        torch.set_float32_matmul_precision("highest")
        backends: Any = torch.backends
        for each in (backends.cuda.matmul, backends.mkldnn.matmul, backends):
            each.fp32_precision = "none"

    reset()
    yield
    reset()


@pytest.fixture(autouse=True)
def _own_log_level() -> None:
    """Forget the level that a command of an earlier test or fixture has set in this process."""
    logging.getLogger("indictune").setLevel(logging.NOTSET)


@dataclass(frozen=True)
class FinishedRun(Run):
    """A finished run, and what it said on the console."""

    recipe: Path
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """30 training rows in batches of 8 over two epochs: 8 steps. Line 31 has no text, line 32 is a validation row."""
    folder = _shared_folder(tmp_path_factory) / "finished"
    with FileLock(f"{folder}.lock"):
        if not (folder / "said.json").exists():
            _finish_run(folder)
    stdout, stderr = json.loads((folder / "said.json").read_text(encoding="utf-8"))
    return FinishedRun(folder / "out", folder / "job.yaml", stdout, stderr)


def _finish_run(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # what another process did not finish
    folder.mkdir()
    rows = {
        split: (ROOT / f"indictune/data/samples/{split}.jsonl").read_text(encoding="utf-8").splitlines()[:number]
        for split, number in (("train", 30), ("validation", 13), ("test", 11))
    }
    empty = json.dumps({"text": " ", "label": "neutral", "language": "hi", "script": "Deva"})
    rows["train"] += [empty, rows["validation"][0]]
    recipe = folder / "job.yaml"
    lines = [
        "model_name_or_path: builtin:tiny-indic-bert",
        "max_length: 32",
        "global_batch_size: 8",
        "per_device_train_batch_size: 4",
        "per_device_eval_batch_size: 4",
        "num_train_epochs: 2",
        "learning_rate: 1e-4",
        "logging_steps: 2",
    ]
    for split, texts in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        lines.append(f"{split}_file: {json.dumps(str(folder / f'{split}.jsonl'))}")
    recipe.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    command = [*python(), SCRIPT, "--config", str(recipe), "--output_dir", str(folder / "out"), "--report", "true"]
    result = start(command)
    assert result.returncode == 0, result.stderr
    (folder / "said.json").write_text(json.dumps([result.stdout, result.stderr]), encoding="utf-8")


@pytest.fixture(autouse=True)
def no_blocked_signals() -> Iterator[None]:
    """A command that a test calls in this process blocks signals first, and the next tests' programs inherit that."""
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def pytest_collection() -> None:
    """Look for no garbage among modules and tests, which all stay: that takes a third of the time of the imports."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files whose runs take longest, so that no worker waits for one of them at the end.

    The first file of all starts no run: one worker tests it while the first run of the other starts the fork server.
    """
    alone = "tests/models/test_merged_adapter.py"
    long = ("tests/faults/", "tests/ranks/", "tests/commands/", "tests/first_hour/")
    items.sort(key=lambda item: (not item.nodeid.startswith(alone), not item.nodeid.startswith(long)))


def pytest_collection_finish() -> None:
    """What a module that was imported holds back, every program that a test starts would hold back too."""
    gc.freeze()
    gc.enable()
    held_back = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert held_back == set(), f"a test's imports hold signals back: {held_back}"

"""What `make` would do: of the tests that need a GPU, which most machines have not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import build_operators, newest_upstream
from tests.ranks.launching import BIN, ROOT


def commands_of(folder: Path, *words: str) -> str:
    """What a target runs where nothing is installed yet."""
    make = ["make", "--dry-run", f"VENV={folder}", *words]
    return subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_tests_of_a_gpu_install_nothing_for_another_python(tmp_path: Path) -> None:
    """A GPU machine may have no network, and another build of torch."""
    assert " -m pip install " in commands_of(tmp_path, "test-gpu")
    others = commands_of(tmp_path, "test-gpu", "GPU_PYTHON=python3")
    assert " python3 -m pytest " in others
    assert "REQUIRE_GPU=1 " in others
    assert " tests/gpu\n" in others
    assert "pip" not in others
    assert str(tmp_path) not in others


def test_some_of_the_tests_of_a_gpu_can_be_named(tmp_path: Path) -> None:
    files = "tests/gpu/test_faults.py tests/gpu/test_runs.py"
    assert f" -m gpu {files}\n" in commands_of(tmp_path, "test-gpu", f"GPU_TESTS={files}")


def test_what_deepspeed_compiles_is_there_before_the_tests_and_the_demo_does_without(tmp_path: Path) -> None:
    """A test that ends a run early would end its compiler too, and each later one would begin anew."""
    for target in ("test", "test-more", "test-all", "test-faults"):
        before, _, after = commands_of(tmp_path, target).partition(" -m pytest ")
        assert " -m tests.build_operators\n" in before
        assert "build_operators" not in after
    assert "build_operators" not in commands_of(tmp_path, "demo")


def test_the_newest_releases_are_tried_in_an_environment_of_their_own(tmp_path: Path) -> None:
    """With neither our upper bounds nor our constraints, and without a second list of packages."""
    commands = commands_of(tmp_path, "test-upstream", f"UPSTREAM={tmp_path}/newest")
    assert f"{tmp_path}/newest/bin/python -m pip install --quiet --no-deps --editable .\n" in commands
    assert "DS_BUILD_OPS=0 " in commands
    assert "constraint" not in commands
    assert f"{tmp_path}/bin" not in commands
    assert " tests/ranks/test_golden.py " in commands
    wanted = {Requirement(each).name: Requirement(each) for each in newest_upstream.newest()}
    assert {"pytest", *newest_upstream.SHOWN} <= wanted.keys()
    assert {bound.operator for each in wanted.values() for bound in each.specifier} == {">="}


def test_the_demo_of_a_llama_says_how_to_take_real_weights(tmp_path: Path) -> None:
    assert "make demo-smollm2" in commands_of(tmp_path, "demo-llama")
    commands = commands_of(tmp_path, "demo-smollm2")
    assert " --model_name_or_path outputs/smollm2 " in commands
    assert (" --write_smollm2 outputs/smollm2\n" in commands) == (not (ROOT / "outputs/smollm2").exists())


def test_the_demo_of_preferences_writes_pairs_before_it_learns_them(tmp_path: Path) -> None:
    commands = commands_of(tmp_path, "demo-dpo")
    written, learned, counted = " --write outputs/preference_pairs\n", " train recipes/llama/pref", " --count outputs/"
    assert 0 < commands.index(written) < commands.index(learned) < commands.index(counted)
    assert " --model_name_or_path outputs/smollm2\n" in commands


def test_the_tests_take_the_ninja_that_has_compiled_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system has one of another version, each would compile again what the other has, two minutes a time."""
    assert shutil.which("ninja") == str(BIN / "ninja")
    monkeypatch.setattr(build_operators, "OPERATORS", ())
    monkeypatch.setenv("PATH", "/usr/bin")
    build_operators.build()
    assert shutil.which("ninja") == str(BIN / "ninja")


@pytest.mark.slow
def test_the_tests_of_a_gpu_fail_without_one_and_say_so_at_once() -> None:
    words = ["-m", "pytest", "--numprocesses", "1", "-k", "drops_at_the_given_rate", "tests/gpu"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "REQUIRE_GPU": "1"}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    before_the_end = done.stdout.partition("= ERRORS =")[0]
    assert before_the_end.count("torch finds no GPU, so nothing is tested.") == 2
    assert "skipped" not in done.stdout

"""LLaMA on one GPU: every method trains, is saved whole, and agrees with the CPU as far as bf16 allows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.gpu.paging import FOUND
from tests.ranks.launching import Run, python, start
from tests.ranks.test_llama import METHODS, MICRO_BATCH_OF_12, job, run_under

__all__ = ["job", "run_under"]

pytestmark = pytest.mark.gpu

Start = Callable[..., Run]
BF16 = ("--bf16", "true")


@pytest.mark.parametrize(
    ("strategy", "method"),
    [(strategy, method) for strategy in ("ddp", "fsdp2", "zero2", "zero3") for method in ("full", "lora")]
    + [("ddp", "qlora"), ("fsdp2_qlora", "qlora")],
)
def test_one_rank_under_a_strategy_is_one_process(run_under: Start, strategy: str, method: str) -> None:
    """In fp32 without tf32. The 4-bit base computes in bf16, which another kernel may round differently."""
    flags = (*METHODS[method], "--tf32", "false", "--optim", "adamw_torch")
    one, other = run_under("single", 1, *flags), run_under(strategy, 1, *flags)
    bound = 2e-2 if method == "qlora" else 1e-3
    assert other.series("loss") == pytest.approx(one.series("loss"), rel=bound)
    assert other.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=5 * bound)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_bf16_is_near_fp32(run_under: Start, method: str) -> None:
    one, other = run_under("single", 1, *METHODS[method]), run_under("single", 1, *METHODS[method], *BF16)
    assert other.series("loss") != one.series("loss")
    assert other.series("loss") == pytest.approx(one.series("loss"), rel=2e-2)


def paged(job: Path, folder: Path, *flags: str) -> list[bool]:
    """Whether the optimizer states of each weight are paged, under QLoRA of rank 512."""
    run = ("--config", str(job), "--output_dir", str(folder))
    done = start([*python(), "-m", "tests.gpu.paging", *run, *METHODS["qlora"], "--lora_r", "512", *flags])
    assert done.returncode == 0, done.stderr
    log = (folder / "logs/rank-0.log").read_text(encoding="utf-8")
    (found,) = (line.removeprefix(FOUND) for line in log.splitlines() if line.startswith(FOUND))
    states: list[tuple[int, bool]] = json.loads(found)
    assert len(states) == 28  # two of each of 7 linear layers, in 2 blocks
    assert sum(size >= 1e5 for size, _ in states) == 6
    assert all(size >= 1e5 for size, is_paged in states if is_paged)
    return [is_paged for _, is_paged in states]


def test_qlora_pages_the_states_of_large_matrices_until_it_resumes(job: Path, tmp_path: Path) -> None:
    """bitsandbytes 0.50; see `weights.default_optimizer`."""
    assert sum(paged(job, tmp_path / "new", "--max_steps", "2")) == 6
    recipe = yaml.safe_load((tmp_path / "new/recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["decided"]["optim"] == "paged_adamw_8bit"
    checkpoint = ("--resume_from_checkpoint", str(tmp_path / "new/checkpoint-1"), "--trust_checkpoint", "true")
    assert not any(paged(job, tmp_path / "on", "--max_steps", "2", *checkpoint))


def peak(run: Run) -> int:
    return int(run.metrics["train"]["peak_memory_bytes"])


def test_offloaded_activations_change_only_the_memory(run_under: Start) -> None:
    flags, offloads = (*METHODS["full"], *MICRO_BATCH_OF_12, "--tf32", "false"), ("--activation_offloading", "true")
    all_of_them = (*flags, "--gradient_checkpointing", "false")
    kept, offloaded = run_under("single", 1, *all_of_them), run_under("single", 1, *all_of_them, *offloads)
    for run in (offloaded, run_under("single", 1, *flags, *offloads)):
        assert run.series("loss") == pytest.approx(kept.series("loss"), rel=1e-5)
    assert peak(offloaded) < peak(kept)


def test_gradient_checkpointing_changes_only_the_memory(run_under: Start) -> None:
    flags = (*METHODS["lora"], *MICRO_BATCH_OF_12, "--tf32", "false")
    kept, again = run_under("ddp", 1, *flags, "--gradient_checkpointing", "false"), run_under("ddp", 1, *flags)
    assert again.series("grad_norm") == pytest.approx(kept.series("grad_norm"), rel=1e-4)
    assert peak(again) < peak(kept)

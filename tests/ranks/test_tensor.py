"""Ranks that split matrices: copies of what FSDP2 shards, and settings that groups must agree on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import mutants
from tests.ranks.launching import ROOT, Run, accelerate, python, train
from tests.ranks.test_parity import PLAIN, differences
from tests.ranks.test_resume import stopped_copy

pytestmark = pytest.mark.slow

Start = Callable[..., Run]


def two_copies(folder: Path) -> list[str]:
    """Eight ranks: pairs split the matrices, FSDP2 shards over two pairs, and there are two such copies."""
    shipped = (ROOT / "accelerate_configs/fsdp2_tp.yaml").read_text(encoding="utf-8")
    file = folder / "two_copies.yaml"
    file.write_text(re.sub(r"replicate_size: 1", "replicate_size: 2", shipped), encoding="utf-8")
    command = accelerate("fsdp2_tp", 8)
    command[command.index("--config_file") + 1] = str(file)
    return command


def test_copies_of_shards_of_split_matrices(run_under: Start, job: Path, tmp_path: Path) -> None:
    """They train the model of one process, which resumes their checkpoint."""
    one = run_under("single", 1, *PLAIN)
    eight = train(two_copies(tmp_path), tmp_path / "eight", "--config", str(job))
    assert (eight.metrics["strategy"], eight.metrics["world_size"]) == ("fsdp2_tp", 8)
    assert differences(one, eight) == []
    folder = stopped_copy(eight, tmp_path / "resumed")
    resumed = train(python(), folder, "--config", str(job), "--resume_from_checkpoint", "auto")
    assert differences(one, resumed) == []


@pytest.mark.parametrize("strategy", ["ddp_tp", "fsdp2_tp"])
def test_gradients_are_summed_in_bfloat16_where_asked(run_under: Start, strategy: str) -> None:
    one, four = run_under("single", 1, *PLAIN), run_under(strategy, 4, "--reduce_dtype", "bfloat16")
    assert differences(one, four) != []
    assert four.series("loss") == pytest.approx(one.series("loss"), rel=1e-3)
    assert four.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-2)


def digests_of_unsplit_weights(command: list[str], folder: Path, ranks: int, *flags: str) -> list[dict[str, str]]:
    """Train with dropout; returns the digests of the unsplit weights of each rank."""
    looks = {"MUTANT": "unsplit_weights", "NOTES": str(folder.parent / "digests")}
    train(command, folder, *flags, script=mutants.__file__, **looks)
    return [json.loads((folder.parent / f"digests-{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]


@pytest.mark.parametrize(("strategy", "ranks"), [("tp", 2), ("fsdp2_tp", 4)])
def test_dropout_leaves_unsplit_weights_alike(job: Path, tmp_path: Path, strategy: str, ranks: int) -> None:
    """The ranks of a matrix drop the same hidden values: their norms and embeddings stay the same, bit by bit."""
    flags = ("--config", str(job), "--dropout", "0.1", "--max_steps", "6")
    digests = digests_of_unsplit_weights(accelerate(strategy, ranks), tmp_path / "out", ranks, *flags)
    assert any("LayerNorm" in name for name in digests[0])
    assert not any("query.weight" in name for name in digests[0])
    assert digests[0::2] == digests[1::2]


def test_dropout_leaves_them_alike_after_a_resume_from_another_split(job: Path, tmp_path: Path) -> None:
    """The two processes of DDP have drawn different numbers."""
    flags = ("--config", str(job), "--dropout", "0.1")
    two = train(accelerate("ddp", 2), tmp_path / "ddp", *flags)
    folder = stopped_copy(two, tmp_path / "resumed")
    resumes = (*flags, "--resume_from_checkpoint", "auto")
    first, second = digests_of_unsplit_weights(accelerate("tp", 2), folder, 2, *resumes)
    assert first == second


@pytest.mark.parametrize(("strategy", "ranks"), [("tp", 2), ("ddp_tp", 4)])
def test_split_matrices_are_compiled(run_under: Start, strategy: str, ranks: int) -> None:
    flags = ("--max_steps", "4")
    one, several = (
        run_under("single", 1, *PLAIN, *flags),
        run_under(strategy, ranks, *flags, "--torch_compile", "true"),
    )
    assert differences(one, several) == []


@pytest.mark.parametrize(("strategy", "ranks"), [("pipeline", 2), ("3d", 4)])
def test_stages_are_saved_while_training_continues(run_under: Start, strategy: str, ranks: int) -> None:
    one, several = run_under("single", 1, *PLAIN), run_under(strategy, ranks, "--async_save", "true")
    assert differences(one, several) == []

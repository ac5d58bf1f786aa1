"""Ranks that split matrices: copies of what FSDP2 shards, and settings that groups must agree on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

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

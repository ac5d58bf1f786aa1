"""Training towards the logits of a teacher."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from torch.nn import functional

from indictune.config.recipe import read_recipe
from indictune.data.bad_rows import LINES_PER_FILE
from indictune.data.cache import StoredRows
from indictune.data.collation import IGNORED_LABEL, PadToLongest
from indictune.data.text.tokenisation import with_soft_labels
from indictune.preflight.derive import plan_of_rows
from indictune.tasks.classification import Classification
from indictune.tasks.loss import SoftLabelLoss
from tests.refusals import refused


@pytest.mark.parametrize("parts", [1, 2, 5, 9])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_shares_of_micro_batches_add_up_to_the_mean_divergence(parts: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(7, 3, generator=generator), torch.randn(7, 3, generator=generator)
    loss, total = SoftLabelLoss(temperature), torch.zeros(())
    for rows in torch.arange(7).tensor_split(parts):
        given = (logits[rows], teacher[rows]) if len(rows) else (torch.full((1, 3), 9.0), torch.full((1, 3), -100.0))
        total += loss(SimpleNamespace(logits=given[0]), given[1], torch.tensor(7 * 3))  # as the Trainer counts labels
    soft = (teacher / temperature).softmax(-1)
    expected = functional.kl_div((logits / temperature).log_softmax(-1), soft, reduction="batchmean") * temperature**2
    torch.testing.assert_close(total, expected)


def test_at_temperature_1_the_gradient_is_that_of_cross_entropy_with_probabilities() -> None:
    """Which differs from the divergence by the teacher's entropy alone."""
    teacher = torch.tensor([[2.0, 0.0, -1.0]])
    ours, torchs = (torch.tensor([[0.3, 0.2, 0.1]], requires_grad=True) for _ in range(2))
    SoftLabelLoss(1.0)(SimpleNamespace(logits=ours), teacher, torch.tensor(3)).backward()  # type: ignore[no-untyped-call]
    functional.cross_entropy(torchs, teacher.softmax(-1)).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours.grad, torchs.grad)


def parquet(path: Path, logits: list[Any]) -> str:
    pq.write_table(pa.table({"logits": logits}), path)
    return str(path)


def test_each_row_gets_the_logits_of_its_line_also_of_several_files(tmp_path: Path) -> None:
    files = [
        parquet(tmp_path / "1.parquet", [[1.0, 2, 3], [4, 4, 9]]),
        parquet(tmp_path / "2.parquet", [[0.5, -100, 7]]),
    ]
    lines = [2 * LINES_PER_FILE + 1, LINES_PER_FILE + 2, LINES_PER_FILE + 2]
    rows = StoredRows(pa.table({"line": lines}), "two files", "--train_file", files)
    soft = with_soft_labels(Dataset.from_dict({"labels": [0, 1, 2]}), rows, "logits", 3)
    assert soft["labels"][:] == [[100.5, 0, 107], [0, 0, 5], [0, 0, 5]]
    one = StoredRows(pa.table({"line": [2]}), files[0], "--train_file")
    assert with_soft_labels(Dataset.from_dict({"labels": [0]}), one, "logits", 3)["labels"][:] == [[0, 0, 5]]


@pytest.mark.parametrize(
    ("column", "logits", "reason"),
    [
        ("logits", [[1.0, 2]], "3 finite numbers"),
        ("logits", [[1.0, 2, float("nan")]], "3 finite numbers"),
        ("logits", [[1.0, 2], [1.0, 2, 3, 4]], "3 finite numbers"),
        ("logits", [1.0, 2.0], "3 finite numbers"),
        ("other", [[1.0, 2, 3]], "other"),
    ],
)
def test_a_column_that_is_no_list_of_a_number_for_each_label_is_refused(
    tmp_path: Path, column: str, logits: list[Any], reason: str
) -> None:
    file = parquet(tmp_path / "a.parquet", logits)
    rows = StoredRows(pa.table({"line": [1]}), file, "--train_file")
    with refused("soft-labels-unreadable", reason, file, flag="--soft_label_column"):
        with_soft_labels(Dataset.from_dict({"labels": [0]}), rows, column, 3)


def test_padded_micro_batches_keep_the_fractions_of_soft_labels() -> None:
    rows = [{"input_ids": np.arange(3), "labels": np.array([0.25, 0, 7.5], np.float32), "row": 0} for _ in range(2)]
    labels = PadToLongest(0, "right")(rows)["labels"]
    torch.testing.assert_close(labels, torch.tensor([[0.25, 0, 7.5]] * 2))
    in_windows = [row | {"seq_lengths": np.array([2, 1])} for row in rows]
    at_windows = PadToLongest(0, "right")(in_windows)["labels"]
    assert at_windows[:, 0].tolist() == [0.25, IGNORED_LABEL, 0.25, IGNORED_LABEL]


def test_what_has_no_effect_with_soft_labels_is_refused_at_once() -> None:
    words = ["--train_file", "a.parquet", "--class_weights", "balanced", "--label_smoothing_factor", "0.1"]
    words += ["--baseline", "true", "--problem_type", "multi_label_classification"]
    plan, _ = plan_of_rows(
        read_recipe([*words, "--soft_label_column", "x"], Classification.arguments), Classification()
    )
    found = [(each.code, each.flag) for each in Classification().check(plan)]
    assert sorted(found) == [
        ("no-effect", "--baseline"),
        ("no-effect", "--class_weights"),
        ("no-effect", "--label_smoothing_factor"),
        ("no-effect", "--soft_label_column"),
        ("soft-labels-unnamed", "--soft_label_column"),
    ]
    plan, _ = plan_of_rows(
        read_recipe(["--train_file", "a.csv", "--soft_label_temperature", "3"], Classification.arguments),
        Classification(),
    )
    assert [each.flag for each in Classification().check(plan)] == ["--soft_label_temperature"]

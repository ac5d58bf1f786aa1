"""Soft labels of training rows: the logits of a teacher, towards whose distribution a model is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor
from torch.nn import functional

from indictune.config.plan import RunPlan
from indictune.data.bad_rows import LINES_PER_FILE
from indictune.data.cache import StoredRows
from indictune.data.collation import IGNORED_LABEL
from indictune.errors import Problem, UserError, problem
from indictune.models.task_models import known_labels
from indictune.tasks.loss import SharedLoss
from indictune.upstream import digest_of_split

if TYPE_CHECKING:
    from datasets import Dataset

FLAG = "--soft_label_column"


class SoftLabelLoss(SharedLoss):
    """Kullback-Leibler divergence of a teacher's distribution and the model's at a temperature, times its square.

    Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015), section 2: the square keeps the
    size of the gradients as the temperature changes.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of `logits` and the teacher's, `labels`, [rows, labels] each. The Trainer counts all labels of a row."""
        teacher, model = ((each / self.temperature).log_softmax(-1) for each in (labels.float(), logits))
        of_rows = functional.kl_div(model, teacher, reduction="none", log_target=True).sum(-1)
        return (of_rows * (labels[:, 0] != IGNORED_LABEL)).sum() * self.temperature**2 * labels.shape[1]


def check_soft_labels(plan: RunPlan[Any, Any]) -> list[Problem]:
    """Refuse a model that does not say which label a logit belongs to, and what has no effect."""
    training, mode, names = plan.training, plan.data.problem_type, ("class_weights", "label_smoothing_factor")
    if (column := training.soft_label_column) is None:
        given = training.soft_label_temperature
        return [problem("no-effect", "--soft_label_temperature", given, other=f"no {FLAG}")] if given != 2 else []
    useless = {name: value for name in names if (value := vars(training)[name])}
    useless |= {"baseline": "true"} if training.baseline and "baseline" in plan.recipe.values else {}
    found = [problem("no-effect", f"--{name}", value, other=f"{FLAG} {column}") for name, value in useless.items()]
    if mode not in (None, "single_label_classification"):
        found.append(problem("no-effect", FLAG, column, other=f"--problem_type {mode}"))
    if not known_labels(plan.model_config):
        found.append(problem("soft-labels-without-names", FLAG, column, model=plan.model.model_name_or_path))
    return found


def with_soft_labels(dataset: Dataset, rows: StoredRows, column: str, labels: Sequence[str]) -> Dataset:
    """The dataset of tokenised `rows` with their soft labels as `labels`, float32 [rows, labels].

    They are the logits in a column of the rows' parquet files, less the smallest of each row: the distribution is the
    same, and none of them is `IGNORED_LABEL`. Raises `UserError` if a row has no list of a number for each label.
    """
    from datasets import Dataset as Tokenised  # slow to import

    logits = [_logits(file, column, len(labels)) for file in rows.files or [rows.source]]
    lines, starts = rows.table["line"].to_numpy(), np.cumsum([0, *map(len, logits)])
    of_rows = np.concatenate(logits)[starts[np.maximum(lines // LINES_PER_FILE - 1, 0)] + lines % LINES_PER_FILE - 1]
    soft = (of_rows - of_rows.min(1, keepdims=True)).reshape(-1)
    table = dataset.data.table
    array, at = pa.FixedSizeListArray.from_arrays(soft, len(labels)), table.schema.get_field_index("labels")
    return Tokenised(table.set_column(at, "labels", array), fingerprint=f"{digest_of_split(dataset)}-{column}")


def _logits(file: str, column: str, labels: int) -> np.ndarray:
    """The column of a parquet file, float32 [rows, labels]."""
    try:
        lists = pq.read_table(file, columns=[column])[column].to_pylist()
        is_whole = all(len(row or ()) == labels for row in lists)
        if not is_whole or not np.isfinite(found := np.array(lists, np.float32)).all():
            raise ValueError(f"not every row has {labels} finite numbers, one for each label of the model")
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise UserError("soft-labels-unreadable", FLAG, column, file=file, reason=str(error).split("\n")[0]) from error
    return found

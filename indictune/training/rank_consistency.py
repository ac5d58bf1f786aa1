"""Compare before the first step what all ranks must have alike: each node reads its own files."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from datasets import Dataset

from indictune.checkpoint import compatibility, flag_files
from indictune.checkpoint.digests import validation_digest
from indictune.config.recipe import UNRECORDED_FIELDS
from indictune.distributed import collectives, sharding
from indictune.errors import Problem, UserError, problem
from indictune.models.active_vocabulary import active_embedding
from indictune.training.exact_trainer import ExactTrainer

# Names of files may differ between nodes: their content is compared. Launchers give each rank its own --local_rank.
_FILES = (
    *("model_name_or_path", "class_weights"),
    *("train_file", "train_files", "validation_file", "dataset_name"),
)
_NOT_COMPARED = {*_FILES, *UNRECORDED_FIELDS}
# They change no step, but all ranks act on them together.
_TOGETHER = {"on_nonfinite", "max_nonfinite_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps"}
_TOGETHER |= {"logging_strategy", "logging_steps"}


def check_alike(
    trainer: ExactTrainer, test: Dataset | None, given: Mapping[str, Any], in_files: flag_files.Content
) -> None:
    """Refuse to train if a rank has other rows or flags than rank 0. All ranks must call it.

    Each rank takes its micro-batches from its own rows: some rows would be trained on twice and others never.

    Args:
        trainer: of the run, before it trains.
        test: rows that are evaluated after the training, or None.
        given: the flags of this rank, by field.
        in_files: the contents of files that flags name.

    Raises:
        UserError: on all ranks, with all differences.
    """
    if trainer.args.world_size == 1:
        return
    own = _contents(trainer) | {
        "test rows": None if test is None else validation_digest(test),
        "class weights": str(in_files.get("class_weights", given.get("class_weights"))),
        "settings in --deepspeed": str(in_files.get("deepspeed")),
        **{f"--{name}": given.get(name) for name in compared_flags(given)},
    }
    everyone = collectives.gather_from_all((socket.gethostname(), own))
    host_of_0, expected = everyone[0]
    problems: dict[Problem, None] = {}  # each once, though several ranks of a node have it
    for rank, (host, values) in enumerate(everyone):
        place = f"rank {rank}" if host == host_of_0 else f"rank {rank} on {host}"
        for name in sorted({*expected, *values}):
            if values.get(name) != expected.get(name):
                value = f" {values.get(name)}" if name.startswith("--") else ""  # others are long
                problems[problem("ranks-differ", name, value, rank=place, host=host_of_0)] = None
    if problems:
        raise UserError(problems=list(problems))


def compared_flags(given: Iterable[str]) -> set[str]:
    """The given flags that must have equal values on all ranks."""
    return {name for name in given if compatibility.changes_steps(name) and name not in _NOT_COMPARED} | _TOGETHER


def _contents(trainer: ExactTrainer) -> dict[str, Any]:
    """Digests of what this rank has made of its files."""
    model: Any = sharding.unwrapped(trainer)
    active = active_embedding(model)
    trained_rows = None if active is None else hashlib.sha256(active[1].row_ids.numpy().tobytes()).hexdigest()
    return {
        "training rows": trainer.data_digest,
        "validation rows": trainer.validation_digest,
        "labels": str(model.config.to_dict().get("id2label")),
        "tokens that are trained": trained_rows,
    }

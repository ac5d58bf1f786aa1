"""What all ranks must have alike, compared before the first step: each node reads files of its own."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping
from typing import Any

from datasets import Dataset

from indictune.checkpoint import compatibility, flag_files
from indictune.checkpoint.digests import validation_digest
from indictune.distributed import collectives, sharding
from indictune.errors import UserError
from indictune.models.active_vocabulary import active_embedding
from indictune.train.exact_trainer import ExactTrainer

# Flags by which steps, or what all ranks do together, would not be the same. Names of files are not among them: what
# the files hold is compared.
FLAGS = (
    *(
        name for name in compatibility.OF_THE_STEPS if name not in ("model_name_or_path", "class_weights")
    ),  # files, often
    *(
        *compatibility.IN_THE_STATES,
        *compatibility.OF_THE_DEALING,
        *compatibility.OF_THE_BEST,
        *compatibility.OF_THE_ADAPTER,
    ),
    *("method", "seed", "data_seed", "global_batch_size", "active_vocabulary"),
    *("on_nonfinite", "max_nonfinite_steps"),
    *("eval_strategy", "eval_steps", "save_strategy", "save_steps", "logging_strategy", "logging_steps"),
)


def check_alike(
    trainer: ExactTrainer, test: Dataset | None, given: Mapping[str, Any], in_files: flag_files.Content
) -> None:
    """Refuse to train where a rank has other rows or flags than rank 0. All ranks must call it.

    Each would take its micro-batches from rows of its own: some would be trained on twice and others never.

    Args:
        trainer: of the run, before it trains.
        test: rows that are evaluated when it is trained, or None.
        given: the flags of this rank, by field.
        in_files: what files of this rank say of the steps.

    Raises:
        UserError: on all ranks, with all that differs.
    """
    if trainer.args.world_size == 1:
        return
    flags = {f"--{name}": given.get(name) for name in FLAGS}
    own = _digests(trainer) | {
        "test rows": None if test is None else validation_digest(test),
        "class weights": str(in_files.get("class_weights", given.get("class_weights"))),
        "settings in --deepspeed": str(in_files.get("deepspeed")),
    }
    everyone = collectives.gather_from_all((socket.gethostname(), own, flags))
    here, digests, flags = everyone[0]
    problems: dict[str, None] = {}  # each once, though several ranks of a node have it
    for rank, (host, its_digests, its_flags) in enumerate(everyone):
        of_rank = f"rank {rank}" if host == here else f"rank {rank} on {host}"
        if others := [name for name, digest in its_digests.items() if digest != digests[name]]:
            problems[
                f"{of_rank} has other {', '.join(others)} than rank 0 on {here}: each node prepares its own. Give all "
                "nodes the same files, flags and packages."
            ] = None
        for name, value in its_flags.items():
            if value != flags[name]:
                problems[f"{name} {value} on {of_rank} and {flags[name]} on rank 0: give all nodes the same."] = None
    if problems:
        raise UserError(list(problems))


def _digests(trainer: ExactTrainer) -> dict[str, str | None]:
    """What the files and packages of this rank have led to."""
    model: Any = sharding.unwrapped(trainer)
    active = active_embedding(model)
    used = None if active is None else hashlib.sha256(active[1].row_ids.numpy().tobytes()).hexdigest()
    return {
        "training rows": trainer.data_digest,
        "validation rows": trainer.validation_digest,
        "labels": str(model.config.to_dict().get("id2label")),
        "tokens that are trained": used,
    }

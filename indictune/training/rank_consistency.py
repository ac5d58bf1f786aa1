"""Compare what all ranks must have alike: each node has its own packages and files."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset

from indictune.checkpoint import compatibility
from indictune.checkpoint.compatibility import validation_digest
from indictune.config.plan import AnyPlan
from indictune.config.recipe import UNRECORDED_FIELDS
from indictune.data.read.row_sources import SPLITS
from indictune.distributed import agreement, sharding
from indictune.distributed.agreement import Values
from indictune.errors import Problems
from indictune.files import content_digest
from indictune.models.active_vocabulary import active_embedding
from indictune.tasks.protocol import Tokens
from indictune.training.exact_trainer import ExactTrainer
from indictune.upstream import versions_of
from indictune.versions import __version__, code_digest

# Names of files may differ between nodes: their content is compared. Launchers give each rank its own --local_rank.
_FILES = (*("model_name_or_path", "class_weights"), *("train_file", "train_files", "validation_file", "dataset_name"))
_NOT_COMPARED = {*_FILES, *UNRECORDED_FIELDS}
# They change no step, but all ranks act on them together.
_TOGETHER = {"on_nonfinite", "max_nonfinite_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps"}
_TOGETHER |= {"logging_strategy", "logging_steps", "pipeline_schedule", "divergence_check_steps"}
_PACKAGES = (
    *("torch", "transformers", "accelerate", "deepspeed", "peft"),
    *("trl", "datasets", "tokenizers", "bitsandbytes"),
)
_DIGITS = 12  # of a digest in a message


def check_ranks_agree(
    trainer: ExactTrainer, test: Dataset | None, given: Mapping[str, Any], in_files: compatibility.Content
) -> None:
    """Refuse to train if a rank has other rows or flags than rank 0. All ranks must call it.

    Each rank takes its micro-batches from its own rows: some rows would be trained on twice and others never. `given`
    are the flags of this rank, by field, and `in_files` the contents of files that flags name.
    """
    values = _contents(trainer) | {"test rows": None if test is None else validation_digest(test)[:_DIGITS]}
    values |= flags_of_steps(given, in_files)
    launch, timeout_s = trainer.parallelism.launch, trainer.args.ddp_timeout
    Problems(agreement.agree("before the training", lambda: values, launch, os.environ, timeout_s)).raise_any()


def flags_of_steps(given: Mapping[str, Any], in_files: compatibility.Content) -> dict[str, Any]:
    """The flags that all ranks must have alike, and the contents of files that flags name."""
    return {
        "class weights": in_files.get("class_weights", given.get("class_weights")),
        "settings in --deepspeed": in_files.get("deepspeed"),
        **{f"--{name}": given.get(name) for name in compared_flags(given)},
    }


def compared_flags(given: Iterable[str]) -> set[str]:
    """The given flags that must have equal values on all ranks."""
    return {name for name in given if compatibility.changes_steps(name) and name not in _NOT_COMPARED} | _TOGETHER


def values_of_node(plan: AnyPlan, in_files: compatibility.Content) -> Values:
    """What all nodes must have alike before a row is read: code, packages, flags, strategy file and model."""
    model = plan.model_values | {"_name_or_path": ""}
    return {
        "version of indictune": f"{__version__}, files {code_digest()[:_DIGITS]}",
        f"content of {Path(sys.argv[0]).name}": content_digest(sys.argv[0])[:_DIGITS],
        "version of python": platform.python_version(),
        **{f"version of {name}": version for name, version in versions_of(_PACKAGES).items()},
        **flags_of_steps(plan.recipe.values, in_files),
        **agreement.of_strategy(plan.launch, plan.environ),
        "commit of the model": model.pop("_commit_hash", None),
        "configuration of the model": _digest_of(json.dumps(model, sort_keys=True, default=str)),
    }


def values_of_rows(tokens: Tokens) -> Values:
    """What all nodes must have alike before a model is loaded: the tokens and labels of each split."""
    return {
        f"{split} rows": None if rows is None else f"{len(rows):,}, digest {validation_digest(rows)[:_DIGITS]}"
        for split, rows in zip(SPLITS, (tokens.train, tokens.validation, tokens.test), strict=True)
    }


def _contents(trainer: ExactTrainer) -> dict[str, Any]:
    """Digests of what this rank has made of its files."""
    model: Any = sharding.unwrapped(trainer)
    # Only the first stage of a pipeline has the embedding. Its tokens follow from the rows, which are compared.
    active = active_embedding(model) if trainer.parallelism.pipeline is None else None
    rows = {"training rows": trainer.data_digest, "validation rows": trainer.validation_digest}
    return {
        **{name: None if digest is None else digest[:_DIGITS] for name, digest in rows.items()},
        "labels": model.config.to_dict().get("id2label"),
        "tokens that are trained": None if active is None else _digest_of(active[1].row_ids.numpy().tobytes()),
    }


def _digest_of(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:_DIGITS]

"""Find out whether the weights of a checkpoint belong to the model of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indictune.errors import Problem, UserError, problem
from indictune.models.adapter_base import RECORD, base_of, config_file, other_fingerprint

# Of a model's configuration. Not the vocabulary: a tokenizer may have added to it.
_SHAPE = (
    *("model_type", "hidden_size", "embedding_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)


def other_model(checkpoint: Path, name_or_path: Any, model: Mapping[str, Any]) -> list[Problem]:
    """Why the weights of a checkpoint do not belong to the run's model, as far as both are known."""
    try:
        config = config_file(checkpoint)
        before = dict(json.loads(config.read_text(encoding="utf-8"))) if config.is_file() else {}
        base = base_of(checkpoint) if (checkpoint / RECORD).is_file() else None
    except (OSError, ValueError, TypeError, UserError):  # missing or damaged: digests show that
        return []
    pairs = {name: (before.get(name), model.get(name)) for name in _SHAPE}
    others = [f"{name} {was}, here {is_now}" for name, (was, is_now) in pairs.items() if _differ(was, is_now)]
    flag, details = "--model_name_or_path", {"checkpoint": checkpoint.name}
    if others:
        return [problem("resume-other-shape", flag, name_or_path, shape="; ".join(others), **details)]
    if base is None or not model:
        return []
    if (found := other_fingerprint(base, name_or_path)) is not None:
        was, is_now = f"fingerprint {str(base.fingerprint)[:16]}", found[:16]
    elif _differ(base.commit_hash, model.get("_commit_hash")):
        was, is_now = f"commit {base.commit_hash}", model["_commit_hash"]
    else:
        return []
    return [problem("resume-other-base", flag, name_or_path, base=base.name, before=was, now=is_now, **details)]


def _differ(was: Any, is_now: Any) -> bool:
    """Whether two values differ, if both are known."""
    return None not in (was, is_now) and was != is_now

"""Compare the rows, settings, files and packages of a run with those that a checkpoint was written with."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import yaml

from indictune.checkpoint.store import Manifest, read_manifest
from indictune.config.arguments import BY_EVALUATIONS
from indictune.config.command_line import DATASET_FIELDS
from indictune.config.plan import Launch
from indictune.config.recipe import recorded_values
from indictune.credentials import NOT_YAML
from indictune.data.batching import TrainingBatches
from indictune.data.cache import forget_mapped
from indictune.data.read.open_files import files_named
from indictune.data.read.row_sources import entries_of
from indictune.distributed import strategy
from indictune.distributed.launch import shown_axes
from indictune.errors import Problem, UserError, problem
from indictune.files import RECIPE, content_digest, json_or_nothing
from indictune.models.adapters import RECORD, base_of, config_file, other_fingerprint
from indictune.versions import versions_of_steps

if TYPE_CHECKING:
    from datasets import Dataset

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
    except (OSError, ValueError, TypeError, RecursionError, UserError):  # missing or damaged: digests show that
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
    return None not in (was, is_now) and was != is_now


FLAG_FILES = "flag_files.json"  # next to `recipe.yaml`: the values in files that flags name
TRAIN_ROWS = "train_digests"  # in it: `train_file_digests`

Content = dict[str, Any]  # by flag, without dashes, and by name in its file


def data_digest(dataset: Dataset, batches: TrainingBatches) -> str:
    """Of the rows, as tokens and labels, and of the order in which they are dealt."""
    return _rows_digest([batches.global_batch_size, batches.seed], dataset)


def validation_digest(dataset: Dataset) -> str:
    """Of the rows, as tokens, labels and languages, that a run compares its checkpoints on."""
    return _rows_digest(dataset["language"][:], dataset)


def _rows_digest(beginning: Sequence[object], dataset: Dataset) -> str:
    digest = hashlib.sha256(json.dumps(beginning).encode())
    more = ("other_input_ids", "other_labels", "is_good")  # of answers that are marked
    for name in ("length", "input_ids", "labels", *(each for each in more if each in dataset.column_names)):
        for chunk in dataset.data[name].chunks:
            values = chunk.flatten() if pa.types.is_nested(chunk.type) else chunk
            digest.update(values.to_numpy(zero_copy_only=False).tobytes())
            forget_mapped()
    return digest.hexdigest()


# Checkpoints are compared by these.
COMPARES = ("metric_for_best_model", "greater_is_better")

# In the optimizer's state, which restores them (torch 2.13, `Optimizer.load_state_dict`).
_KEPT = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args")

# In the position in the rows, and in the names and shapes of weights.
_OF_THE_STATE = ("global_batch_size", "method", "vocabulary_from_train")

# In the names and shapes of an adapter's weights.
_OF_THE_ADAPTER = ("lora_r", "lora_target_modules", "use_dora", "modules_to_save")

# A change of these changes no step, or is reported elsewhere.
_HOUSEKEEPING = re.compile(
    "(output_dir|resume_from_checkpoint|(hub|logging|log|save|eval|dataloader|trackio|trust)_.*|push_to_hub|"
    "max_(unknown|collision|near_duplicate|conflict)_share|async_save|bad_rows|baseline|max_bad_fraction|debug|device_map|disable_tqdm|do_.*|metrics|parallelism_config|report_to|"
    "profile_steps|snapshot_steps|divergence_check_steps|run_name|project|verbose|ignore_data_skip|prediction_loss_only|per_device_eval_batch_size|batch_eval_metrics|"
    "(activation|gradient)_(checkpointing|accumulation).*|on_nonfinite|max_nonfinite_steps|skip_memory_metrics|"
    "include_.*|num_sample_generations|report|test_file|use_cache|torch_empty_cache_steps|restore_callback_.*|"
    f"{strategy.FLAGS_OF_STRATEGIES})"
)

# Values of --optim with the same state.
_SAME_STATE = {"adamw_torch_fused": "adamw_torch", "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit"}


def manifest_of(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint that was chosen by it."""
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    return manifest


def settings_of(folder: Path) -> dict[str, Any]:
    """The configuration that a run or checkpoint was written with; empty if it cannot be read."""
    try:
        return recorded_values(yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8")))
    except (OSError, TypeError, *NOT_YAML):
        return {}


def kept_settings(checkpoint: Path) -> dict[str, Any]:
    """The settings that a resumed run takes from its checkpoint, whatever its flags say."""
    before = settings_of(checkpoint)
    return {name: before[name] for name in _KEPT if isinstance(before.get(name, ()), int | float | str | None)}


def changes_steps(name: str) -> bool:
    """Whether a flag may change the steps of a run."""
    return not _HOUSEKEEPING.fullmatch(name)


def changed_flags(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The flags of two configurations that differ, with both values, without mere housekeeping."""
    now = yaml.safe_load(yaml.safe_dump(dict(now)))
    both = [name for name in now if name in before and changes_steps(name)]
    return {name: (before[name], now[name]) for name in both if _comparable(before[name]) != _comparable(now[name])}


def train_file_digests(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Of the files of training rows, by the name that a recipe gives them; empty if it names none, or one is gone."""
    try:
        given = values.get("train_file") or []
        names = [given] if isinstance(given, str) else given
        files = {name: list(files_named(name, "train")[1]) for name in names}
        files |= {each.path: list(each.files) for each in entries_of(values.get("train_files") or [])}
    except UserError:
        return {}
    if not all(map(os.path.isfile, chain.from_iterable(files.values()))):
        return {}
    return {name: sorted(map(content_digest, of_name)) for name, of_name in files.items()}


def changed_files(folder: Path, now: Mapping[str, list[str]]) -> str:
    """Which training files, of `train_file_digests`, a run or checkpoint did not have, as a sentence or ""."""
    before = {*chain.from_iterable(json_or_nothing(folder / FLAG_FILES).get(TRAIN_ROWS, now).values())}
    others = [name for name, digests in now.items() if not before.issuperset(digests)]
    more = f" and {len(others) - 3} more files" if others[3:] else ""
    return f" It had other rows in {', '.join(others[:3])}{more}." if others else ""


def changes_of_finished(output_dir: Path, now: Mapping[str, Any]) -> str:
    """What a command gives otherwise than the finished run in its folder, as a sentence or "". Other rows are refused.

    Args:
        now: the values that the command gives.
    """
    before = settings_of(output_dir) | json_or_nothing(output_dir / FLAG_FILES)
    differing, is_now = changed_flags(before, now), train_file_digests(now)
    digests = [sorted(chain.from_iterable(each.values())) for each in (before.get(TRAIN_ROWS, is_now), is_now)]
    if (is_now and digests[0] != digests[1]) or {*DATASET_FIELDS} & differing.keys():
        changed = changed_files(output_dir, is_now)
        raise UserError("finished-with-other-rows", "--output_dir", output_dir, changed=changed)
    differing.pop("train_file", None)  # the same rows elsewhere, or rows that are gone
    return f"It was trained with other settings: {_listed(differing)}." if differing else ""


def check_fits(checkpoint: Path, launch: Launch, now: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Refuse a checkpoint, with all reasons, whose state this run cannot take over.

    Args:
        now: configuration of this run, as far as it is known.
        model: configuration of its model, and the `_commit_hash` of one from the Hub; empty if unknown.
    """
    manifest, before = manifest_of(checkpoint), settings_of(checkpoint)
    differing = changed_flags({"global_batch_size": manifest.global_batch_size} | before, now)
    found = [
        problem("resume-other-setting", f"--{name}", _shown(is_now), checkpoint=checkpoint.name, before=_shown(was))
        for name, (was, is_now) in differing.items()
        if _fits_no_other(name, was, is_now, before)
    ]
    optim = None if "optim" in [each.flag[2:] for each in found] else before.get("optim")
    parts = strategy.parts_of_matrices(manifest.files)
    lost = strategy.not_carried_over(manifest.strategy, manifest.world_size, launch, optim, parts)
    if lost is not None:
        now_parts = 1 if launch.deepspeed is None else launch.axes.tensor
        names = {"before": _launch_name(manifest, parts), "now": _launch_name(launch, now_parts)}
        found.append(problem("resume-other-strategy", "--resume_from_checkpoint", checkpoint, states=lost, **names))
    found += other_model(checkpoint, now.get("model_name_or_path"), model)
    if found:
        raise UserError(problems=found)


def _fits_no_other(name: str, was: Any, is_now: Any, before: Mapping[str, Any]) -> bool:
    """Whether the state of a checkpoint fits no other value of a flag."""
    if name == "optim":
        return bool(_SAME_STATE.get(was, was) != _SAME_STATE.get(is_now, is_now))
    if name == "lr_scheduler_type":
        return bool({was, is_now} & set(BY_EVALUATIONS))  # the others only count steps
    if name in (*COMPARES, "lr_scheduler_kwargs"):
        return before.get("lr_scheduler_type") in BY_EVALUATIONS  # the state holds both
    return name in _OF_THE_STATE or (name in _OF_THE_ADAPTER and before.get("method") != "full")


def resume_warnings(checkpoint: Path, launch: Launch, now: Mapping[str, Any]) -> list[str]:
    """What has changed since a checkpoint, in a sentence each; arguments as for `check_fits`."""
    manifest, before = manifest_of(checkpoint), settings_of(checkpoint) | json_or_nothing(checkpoint / FLAG_FILES)
    name, differing, found = checkpoint.name, changed_flags(before, now), []
    sizes = launch.world_size, shown_axes(launch)
    if (manifest.strategy, manifest.world_size, manifest.axes) != (launch.strategy, *sizes):
        drawn = "" if (manifest.world_size, manifest.axes) == sizes else " Dropout draws other numbers."
        found.append(f"{name} was written by {_launch_name(manifest)}, and {_launch_name(launch)} resumes it.{drawn}")
    kept = {flag: differing.pop(flag) for flag in _KEPT if flag in differing}
    if differing:
        found.append(f"{name} was written with other settings: {_listed(differing)}. The new ones count from here on.")
    if kept:
        end = "Its optimizer state keeps the old ones."
        found.append(f"{name} was written with other settings: {_listed(kept)}. {end}")
    was, is_now = manifest.versions, versions_of_steps()
    packages = {each: (was[each], is_now[each]) for each in is_now if was.get(each, is_now[each]) != is_now[each]}
    if packages:
        found.append(f"{name} was written by other packages: {_listed(packages, '')}.")
    return found


def _listed(differing: Mapping[str, tuple[Any, Any]], dashes: str = "--") -> str:
    return "; ".join(f"{dashes}{name} {_shown(*both)}, now {_shown(*both[::-1])}" for name, both in differing.items())


def _launch_name(of: Manifest | Launch, parts: int = 1) -> str:
    return f"{of.strategy} x {of.world_size}" + (f" with autotp_size {parts}" if parts > 1 else "")


def _comparable(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, list) else value


def _shown(value: Any, other: Any = None) -> str:
    """A value for a message; of a mapping only what differs from the other one."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        value = [f"{key}={value.get(key)}" for key in sorted({*value, *other}) if value.get(key) != other.get(key)]
    return " ".join(map(str, value)) or "(none)" if isinstance(value, list) else str(value)

"""Whether a run goes on with the settings, and the packages, that its checkpoint was written with."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from indictune.checkpoint import flag_files
from indictune.checkpoint.store import Manifest, listed, read_manifest
from indictune.config.arguments import BY_EVALUATIONS
from indictune.config.plan import Launch
from indictune.config.recipe import recorded_values
from indictune.distributed.strategy_limits import runs_optimizer
from indictune.errors import UserError
from indictune.files import RECIPE
from indictune.models.adapter_base import CONFIG, RECORD, base_of, other_fingerprint
from indictune.versions import versions_of_steps

# They are in the optimizer's states and the schedule's, which take those of the command's place (torch 2.13,
# `Optimizer.load_state_dict`, `LambdaLR.load_state_dict`).
IN_THE_STATES = (
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("optim", "optim_args"),  # of the same states
)

# They are in the names and shapes of an adapter's weights, and so in the optimizer's states.
OF_THE_ADAPTER = ("lora_r", "lora_target_modules", "use_dora", "modules_to_save")

# Others that decide what is learnt. Rows, their order and their tokens are compared by a digest, and
# `--global_batch_size`, an `--optim` of other states, `--method`, those of the adapter's weights, and a schedule by
# evaluations in place of another, are refused.
OF_THE_STEPS = (
    *("model_name_or_path", "model_revision", "dropout"),
    *("lora_alpha", "lora_dropout", "use_rslora"),
    *("num_train_epochs", "max_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("optim_target_modules", "max_grad_norm", "label_smoothing_factor", "class_weights"),
    *("bf16", "fp16", "tf32", "reduce_dtype", "attn_implementation", "torch_compile", "padding_free"),
    *("use_liger_kernel", "full_determinism"),
    *("load_best_model_at_end", "early_stopping_patience"),
)

# How rows are dealt to the ranks, by which dropout draws. Another number of ranks is told by itself.
OF_THE_DEALING = ("per_device_train_batch_size", "max_tokens_per_device")

# By which checkpoints are compared.
OF_THE_BEST = ("metric_for_best_model", "greater_is_better")

# By which a schedule that goes by evaluations compares them.
OF_SUCH_A_SCHEDULE = (*OF_THE_BEST, "lr_scheduler_kwargs")

# By which the end of a run is planned.
OF_THE_END = ("max_steps", "num_train_epochs")

# What counts for nothing where the run is finished. It stands in its recipe as it is typed.
OF_A_FINISHED_RUN = (
    *("train_file", "validation_file", "test_file", "dataset_name", "max_length", "chat_template", "packing"),
    *("train_on_prompts", "num_sample_generations", "global_batch_size", "seed", "data_seed", "method"),
    *("push_to_hub", "hub_model_id", "hub_revision"),
    *OF_THE_ADAPTER,
    *(name for name in OF_THE_STEPS if name not in ("load_best_model_at_end", "lr_scheduler_kwargs")),
    *IN_THE_STATES,
    *OF_THE_BEST,
)

# What is read of a checkpoint here, all of it small.
STATE = "trainer_state.json"
READ = (RECIPE, flag_files.NAME, CONFIG, "config.json", RECORD, STATE)

# Of a model's configuration. Not the vocabulary, to which a tokenizer may have added.
_SHAPE = (
    *("model_type", "hidden_size", "embedding_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)

# Values of --optim that take over the states of another.
_SAME_STATES = {"adamw_torch_fused": "adamw_torch", "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit"}


def settings_of(checkpoint: Path) -> dict[str, Any]:
    """The configuration that a checkpoint was written with; empty where it does not tell.

    One that cannot be read tells nothing here: comparing files with their digests tells that.
    """
    try:
        return recorded_values(yaml.safe_load((checkpoint / RECIPE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return {}


def in_the_states(checkpoint: str | None) -> dict[str, Any]:
    """The settings that a run has from the checkpoint that it goes on from, whatever it was given."""
    before = {} if checkpoint is None else settings_of(Path(checkpoint))
    return {name: before[name] for name in IN_THE_STATES if isinstance(before.get(name, ()), int | float | str | None)}


def differences(checkpoint: Path, now: Mapping[str, Any], in_files: flag_files.Content, world_size: int) -> list[str]:
    """What the user should know of settings and packages that have changed since a checkpoint, in a sentence each.

    Args:
        checkpoint: to go on from.
        now: the configuration of the run, as for `recipe.yaml`.
        in_files: what files that it names say.
        world_size: processes of the run.
    """
    manifest = read_manifest(checkpoint)
    as_many_ranks = manifest is not None and manifest.world_size == world_size
    before, now = settings_of(checkpoint), yaml.safe_load(yaml.safe_dump(dict(now)))
    notes = []
    for names, of_files, outcome in (
        (
            (*OF_THE_STEPS, *(OF_THE_DEALING if as_many_ranks else ())),
            flag_files.differences(checkpoint, in_files),
            "the steps from here on are by the new ones",
        ),
        (IN_THE_STATES, [], "the old ones stay, which are part of its optimizer's states"),
        (OF_THE_BEST, [], "what was the best until now is forgotten, and --early_stopping_patience counts anew"),
    ):
        changed = "; ".join([*_told(_changed(names, before, now), before, now), *of_files])
        if changed:
            notes.append(f"{checkpoint.name} was written with other settings: {changed}: {outcome}.")
    return notes + _other_versions(checkpoint, manifest)


def _other_versions(checkpoint: Path, manifest: Manifest | None) -> list[str]:
    """That other packages go on than have written a checkpoint, in at most one sentence."""
    before, now = {} if manifest is None else manifest.versions, versions_of_steps()
    changed = "; ".join(f"{name} {before[name]}, now {now[name]}" for name in _changed(list(now), before, now))
    told = f"{checkpoint.name} was written by other packages: {changed}: the steps from here on are by the new ones."
    return [told] if changed else []


def differences_when_finished(output_dir: Path, given: Mapping[str, Any]) -> list[str]:
    """What the user should know of settings that a finished run does not have, in at most one sentence.

    Args:
        output_dir: of the run.
        given: by the recipe and the command line.
    """
    before = settings_of(output_dir)
    changed = "; ".join(_told(_changed(OF_A_FINISHED_RUN, before, given), before, given))
    if not changed:
        return []
    scored = ["indictune", "evaluate", "--model", str(output_dir), "--test_file", str(given.get("test_file"))]
    way_out = f" `{shlex.join(scored)}` scores the model as it is." if "--test_file" in changed else ""
    newest = [f"name a checkpoint, such as --resume_from_checkpoint {path}, or" for path in listed(output_dir)[:1]]
    return [
        f"{output_dir} was trained with other settings: {changed}: they count for nothing, because the run is "
        f"finished. To train by them, {' '.join([*newest, 'give another --output_dir'])}.{way_out}"
    ]


def past_the_end(checkpoint: Path, now: Mapping[str, Any]) -> list[str]:
    """Why a run would train nothing more after a checkpoint, in at most one sentence; a run that it finishes may.

    Args:
        checkpoint: to go on from.
        now: the configuration of the run, or the part of it that is known.
    """
    before = settings_of(checkpoint)
    changed = _changed(OF_THE_END, before, now)
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        done = {"max_steps": state["global_step"], "num_train_epochs": state["epoch"]}
        name = "max_steps" if now.get("max_steps", -1) > 0 else "num_train_epochs"
        if not changed or not done[name] > now[name]:
            return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # it is damaged, or does not tell
        return []
    told = "; ".join(_told(changed, before, now))
    return [
        f"--{name} {_shown(now[name])}: {checkpoint.name} is past that end ({told}). Give what it was written with, "
        f"or start afresh in another --output_dir; `indictune checkpoint {checkpoint} --convert_to FOLDER` makes a "
        "model of it as it is."
    ]


def has_others(checkpoint: Path, now: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was written with other settings.

    Args:
        checkpoint: to go on from.
        now: those of the run that are compared, as for `recipe.yaml`.
    """
    return bool(_changed(list(now), settings_of(checkpoint), now))


def _changed(names: Sequence[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name in names if name in before and name in now and before[name] != now[name]]


def _told(names: Sequence[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [f"--{name} {_shown(before[name])}, now {_shown(now[name])}" for name in names]


def misfits(checkpoint: Path, now: Mapping[str, Any]) -> list[str]:
    """Why the weights of a checkpoint do not fit the model of a run, in a sentence for each flag.

    Args:
        checkpoint: to go on from.
        now: the configuration of the run, or the part of it that is known.
    """
    before = settings_of(checkpoint)
    method = before.get("method")
    names = ("method",) if method == "full" or method != now.get("method") else OF_THE_ADAPTER
    return [
        f"--{name} {_shown(now[name])}: {checkpoint.name} was written with --{name} {_shown(before[name])}, and its "
        "weights fit no other; give that, or start afresh in another --output_dir."
        for name in names
        if name in before and name in now and _in_any_order(before[name]) != _in_any_order(now[name])
    ]


def other_shape(checkpoint: Path, model: Mapping[str, Any]) -> str | None:
    """How the model of a checkpoint differs in shape from that of a run; None where it does not, or does not tell.

    Args:
        checkpoint: to go on from.
        model: the run's configuration of its model, as for `config.json`.
    """
    found = next((checkpoint / name for name in (CONFIG, "config.json") if (checkpoint / name).is_file()), None)
    try:
        before = {} if found is None else dict(json.loads(found.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    others = [
        f"{name} {before[name]}, here {model[name]}"
        for name in _SHAPE
        if None not in (before.get(name), model.get(name)) and before[name] != model[name]
    ]
    return "; ".join(others) or None


def other_base(checkpoint: Path, name_or_path: str, commit_hash: str | None) -> str | None:
    """How the weights below a checkpoint's adapter differ from those of a run; None where nothing tells that they do.

    Args:
        checkpoint: to go on from.
        name_or_path: of the run's model.
        commit_hash: of the run's model on the Hub; None where it is a folder.
    """
    try:
        base = base_of(checkpoint) if (checkpoint / RECORD).is_file() else None
    except UserError:  # damaged: see `settings_of`
        return None
    if base is None:
        return None
    found = other_fingerprint(base, name_or_path)
    if found is not None:
        return (
            f"--model_name_or_path {name_or_path}: {checkpoint.name} is an adapter on {base.name} when its files had "
            f"the fingerprint {str(base.fingerprint)[:16]}; those that are there now have {found[:16]}. Give the "
            "folder with the weights that it was trained on, or start afresh in another --output_dir."
        )
    if None not in (base.commit_hash, commit_hash) and base.commit_hash != commit_hash:
        return (
            f"--model_name_or_path {name_or_path}: {checkpoint.name} is an adapter on commit {base.commit_hash} of "
            f"{base.name}, and this is commit {commit_hash}. Give --model_name_or_path {base.name} --model_revision "
            f"{base.commit_hash}, or start afresh in another --output_dir."
        )
    return None


def _in_any_order(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def other_optimizer(checkpoint: Path, optim: str, wrote: str, launch: Launch) -> list[str]:
    """Why a run's optimizer cannot take over the states of a checkpoint's, in at most one sentence.

    Args:
        checkpoint: to go on from.
        optim: `--optim` of the run.
        wrote: strategy that wrote the checkpoint.
        launch: that would go on.
    """
    before = settings_of(checkpoint).get("optim")
    if before is None or _states(before) == _states(optim):
        return []
    way_out = f"give --optim {before}"
    if not runs_optimizer(launch, before):
        way_out = f"{launch.strategy} cannot run that one: go on under {wrote}, which wrote it"
    return [
        f"--optim {optim}: {checkpoint.name} was written with {before}, whose states are others; {way_out}, or start "
        "afresh in another --output_dir."
    ]


def other_schedule(checkpoint: Path, now: Mapping[str, Any]) -> list[str]:
    """Why a run's schedule cannot take over the state of a checkpoint's, in at most one sentence.

    One that goes by evaluations has a state of its own kind; all others count steps.

    Args:
        checkpoint: to go on from.
        now: the configuration of the run, or the part of it that is known.
    """
    before = settings_of(checkpoint)
    if not _changed(["lr_scheduler_type"], before, now):
        return []
    was, is_now = (str(each["lr_scheduler_type"]) for each in (before, now))
    if not {was, is_now} & set(BY_EVALUATIONS):
        return []
    return [
        f"--lr_scheduler_type {is_now}: {checkpoint.name} was written with {was}, whose state is another; give "
        f"--lr_scheduler_type {was}, or start afresh in another --output_dir."
    ]


def _states(optim: str) -> str:
    return _SAME_STATES.get(optim, optim)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "(none)" if isinstance(value, list) else str(value)

"""Convert a checkpoint of any strategy to a plain model, as other programs read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from indictune.checkpoint import model_state, resume, store
from indictune.config.arguments import ModelArguments
from indictune.config.recipe import configuration_of
from indictune.errors import UserError
from indictune.files import RECIPE
from indictune.models import atomic_folder
from indictune.models.active_vocabulary import began_with_others, read_row_ids, unused_digest
from indictune.models.adapters import CONFIG, RECORD, config_file
from indictune.models.load import read_tokenizer, read_weights, trained_config
from indictune.models.serving_model import serve_as_trained
from indictune.models.trusted_files import ADAPTER, ADAPTER_CONFIG, INDEX, weights_files
from indictune.tasks.all_tasks import task_of

FLAG = "--convert_to"
COMMAND = "indictune checkpoint"
GENERATION = "generation_config.json"
# Which model the weights belong to, and the recipe by which `indictune evaluate` reads rows as training did.
DESCRIPTION = ("config.json", CONFIG, RECORD, ADAPTER_CONFIG, GENERATION, *atomic_folder.TOKENIZER_FILES, RECIPE)


def convert(
    checkpoint: Path, damage: Sequence[str], folder: Path, trust_remote_code: bool, trust_checkpoint: bool
) -> str:
    """Write a checkpoint's model to a folder, whole or not at all; returns a line that says so.

    `damage` is as of `store.damage`, and the rest as in `ModelArguments`. A checkpoint that is damaged or not trusted,
    and a folder that cannot be written, are refused.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call]
    set_verbosity_error()  # type: ignore[no-untyped-call]  # a head that the base lacks is the checkpoint's
    atomic_folder.check_output_folder(folder, FLAG)
    if store.step_of(folder) >= 0 and (folder.parent / RECIPE).is_file():
        raise UserError("model-named-like-checkpoint", FLAG, folder)
    if damage:
        raise UserError("checkpoint-damaged", COMMAND, checkpoint, reason="; ".join(damage[:3]))
    if not config_file(checkpoint).is_file():
        raise UserError("no-model", COMMAND, checkpoint)
    is_adapter = (checkpoint / ADAPTER_CONFIG).is_file()
    names, weights, model = [], {}, None
    if not model_state.is_in_parts(checkpoint) or (checkpoint / ADAPTER).is_file():
        files = [checkpoint / ADAPTER] if is_adapter else weights_files(checkpoint, str(checkpoint))
        names = [path.name for path in files]
        names += [INDEX] * (not is_adapter and (checkpoint / INDEX).is_file())
    else:
        check_run_folder(checkpoint, trust_checkpoint)
        weights = model_state.whole_weights(checkpoint)
        about = ModelArguments(str(checkpoint), trust_remote_code=trust_remote_code)
        model = None if is_adapter else _model(checkpoint, weights, about)
    size_bytes = sum((checkpoint / name).stat().st_size for name in names)
    size_bytes += sum(weight.nbytes for weight in weights.values())
    with atomic_folder.whole_folder(folder, FLAG, size_bytes) as written:
        written.mkdir()
        _describe(checkpoint, written)
        atomic_folder.copy_model_files(checkpoint, names, written)
        if model is not None:
            model.save_pretrained(written)
        elif weights:
            save_file(weights, written / ADAPTER, metadata={"format": "pt"})
        _finish_tokenizer(checkpoint, written)
        atomic_folder.match_config_mode(written)
    return f"{folder}: the {'adapter' if is_adapter else 'model'} of {checkpoint}."


def _finish_tokenizer(checkpoint: Path, folder: Path) -> None:
    """Let the tokenizer of a classifier of texts clean and cut as training did, as that of a finished run."""
    max_length = configuration_of(checkpoint).get("max_length")
    config = json.loads(config_file(checkpoint).read_text(encoding="utf-8"))
    if task_of(config).name == "classification" and max_length is not None:
        about = ModelArguments(str(folder))
        tokenizer = read_tokenizer(about, COMMAND)
        serve_as_trained(folder, tokenizer, trained_config(about), max_length)


def check_run_folder(checkpoint: Path, trust_checkpoint: bool) -> None:
    """Refuse a checkpoint that is in no run's folder, or that others could have written.

    Nothing in the folder can prove whose run it was: an unpacked download passes (SECURITY.md).
    """
    run = checkpoint.parent
    if not trust_checkpoint and not (run / RECIPE).is_file():
        reason = f"it is not in a run's --output_dir ({run} has no {RECIPE})"
        raise UserError("checkpoint-not-trusted", COMMAND, checkpoint, reason=reason)
    resume.check_trusted(checkpoint, run, trust_checkpoint, COMMAND)


def _describe(checkpoint: Path, folder: Path) -> None:
    atomic_folder.copy_model_files(checkpoint, DESCRIPTION, folder)
    if "auto_map" in json.loads(config_file(checkpoint).read_text(encoding="utf-8")):
        atomic_folder.copy_model_files(checkpoint, ["*.py"], folder)
        for script in folder.glob("zero_to_*.py"):  # DeepSpeed's, not the model's
            script.unlink()


def _model(checkpoint: Path, weights: dict[str, Tensor], about: ModelArguments) -> PreTrainedModel:
    """The model with all of `weights`, and with the embedding rows that were not trained."""
    config = trained_config(about, COMMAND)
    kind = getattr(transformers, f"AutoModel{task_of(config.to_dict()).head}")
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(config, trust_remote_code=about.trust_remote_code)
    if (checkpoint / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint)
    row_ids = read_row_ids(checkpoint)
    if row_ids is not None:
        embedding = cast(nn.Embedding, model.get_input_embeddings()).weight
        (name,) = (name for name, parameter in model.named_parameters() if parameter is embedding)
        whole = _embedding_at_start(checkpoint, kind, config, about)
        if began_with_others(checkpoint, unused_digest(whole, row_ids)):
            raise UserError("embedding-of-another-model", COMMAND, checkpoint)
        whole[row_ids] = weights[name].to(whole.dtype)
        weights[name] = whole.to(weights[name].dtype)
    unexpected = model.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    missing = [name for name, weight in model.state_dict().items() if weight.is_meta]
    if unexpected or missing:
        raise RuntimeError(f"{checkpoint}: missing weights {missing[:3]}, unexpected weights {unexpected[:3]}.")
    return model


def _embedding_at_start(checkpoint: Path, kind: Any, config: PreTrainedConfig, about: ModelArguments) -> Tensor:
    """[vocabulary, width], fp32: the embedding of the model that the run started from, which its recipe names."""
    path = checkpoint / RECIPE
    if not path.is_file():
        raise UserError("embedding-without-recipe", COMMAND, checkpoint)
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    names = {name: recipe[name] for name in ("model_name_or_path", "model_revision")}
    model, _ = read_weights(kind, replace(about, **names), config, torch.float32, f"{checkpoint}, whose base is")
    return cast(nn.Embedding, model.get_input_embeddings()).weight.detach()

"""A checkpoint of any strategy becomes a plain model, as other programs read it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar, get_verbosity, set_verbosity, set_verbosity_error

from indictune.checkpoint import abandoned, resume, store
from indictune.config.arguments import ModelArguments
from indictune.config.command_arguments import CheckpointArguments
from indictune.distributed import merge_shards
from indictune.errors import UserError
from indictune.files import RECIPE
from indictune.models.active_vocabulary import began_with_others, read_row_ids, unused_digest
from indictune.models.adapter_base import CONFIG, RECORD, config_file, continues_texts
from indictune.models.atomic_folder import TOKENIZER_FILES, check_free, copy_files, match_config_mode, whole_folder
from indictune.models.load import read_weights
from indictune.models.load_errors import explained
from indictune.models.trust import ADAPTER
from indictune.models.weight_files import INDEX, weights_files

FLAG = "--convert_to"
GENERATION = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
# What says which model the weights are of.
DESCRIPTION = ("config.json", CONFIG, RECORD, ADAPTER_CONFIG, GENERATION, *TOKENIZER_FILES)


def convert(args: CheckpointArguments, checkpoint: Path, damage: Sequence[str]) -> str:
    """Write a checkpoint's model to `args.convert_to`, whole or not at all; returns a line that says what was written.

    Args:
        args: of the command.
        checkpoint: that was asked for.
        damage: what is wrong with it, from `checkpoints.damage`.

    Raises:
        UserError: the checkpoint is damaged or not trusted, or the folder cannot be written.
    """
    assert args.convert_to is not None
    disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = Path(args.convert_to)
    check_free(folder, FLAG)
    if store.step_of(folder) >= 0 and (folder.parent / RECIPE).is_file():
        raise UserError(
            f"{FLAG} {folder}: has the name of a checkpoint of that run, and would be taken for one; choose another."
        )
    if damage:
        raise UserError(f"{checkpoint}: is damaged: {'; '.join(damage[:3])}. Convert another checkpoint-<step>.")
    if not config_file(checkpoint).is_file():
        raise UserError(f"{checkpoint}: holds no config.json, so it does not say of what model it is.")
    is_adapter = (checkpoint / ADAPTER_CONFIG).is_file()
    if not merge_shards.is_in_parts(checkpoint) or (checkpoint / ADAPTER).is_file():
        weights_names = [ADAPTER] if is_adapter else _weights_names(checkpoint)
        _copy(checkpoint, weights_names, folder)
    else:
        check_trusted(checkpoint, args.trust_checkpoint)
        weights = merge_shards.whole_weights(checkpoint)
        model = None if is_adapter else _model(args, checkpoint, weights)
        _write(checkpoint, weights, model, folder)
    return f"{folder}: the {'adapter' if is_adapter else 'model'} of {checkpoint}."


def check_trusted(checkpoint: Path, trust_checkpoint: bool) -> None:
    """`resume.check_trusted`, where a checkpoint stands in a run's `--output_dir`, or was left behind there.

    Whose run it was nothing in the folder can prove: an unpacked download passes (SECURITY.md).

    Raises:
        UserError: it is in no run's folder, or others could have written it.
    """
    run = abandoned.run_of(checkpoint)
    if not trust_checkpoint and not (run / RECIPE).is_file():
        raise UserError(
            f"{checkpoint}: is not in a run's --output_dir ({run} has no {RECIPE}), and it holds pickles, which can "
            "run code when they are read. If you trust whoever wrote it, add --trust_checkpoint true."
        )
    resume.check_trusted(checkpoint, run, trust_checkpoint, flag="indictune checkpoint")


def _recipe(checkpoint: Path) -> Path:
    """That of a checkpoint itself; else the run's, which is that of the last command."""
    own = checkpoint / RECIPE
    return own if own.is_file() else abandoned.run_of(checkpoint) / RECIPE


def _weights_names(checkpoint: Path) -> list[str]:
    names = [path.name for path in weights_files(checkpoint, str(checkpoint))]
    return names + [INDEX] * (checkpoint / INDEX).is_file()


def _copy(checkpoint: Path, names: Sequence[str], folder: Path) -> None:
    """The model of a checkpoint that holds it whole, in the files of some names."""
    size_bytes = sum((checkpoint / name).stat().st_size for name in names)
    with whole_folder(folder, FLAG, size_bytes, "name a folder on another disk") as model:
        model.mkdir()
        _describe(checkpoint, model)
        copy_files(checkpoint, names, model)


def _write(checkpoint: Path, weights: dict[str, Tensor], plain: PreTrainedModel | None, folder: Path) -> None:
    """A model that has been put together; an adapter where there is no `plain` one."""
    size_bytes = sum(weight.nbytes for weight in weights.values())
    with whole_folder(folder, FLAG, size_bytes, "name a folder on another disk") as model:
        model.mkdir()
        _describe(checkpoint, model)
        if plain is None:
            save_file(weights, model / ADAPTER, metadata={"format": "pt"})
        else:
            plain.save_pretrained(model)
        match_config_mode(model)


def _describe(checkpoint: Path, folder: Path) -> None:
    """Configuration, tokenizer, and the recipe by which `indictune evaluate` reads rows as training did."""
    copy_files(checkpoint, DESCRIPTION, folder)
    copy_files(_recipe(checkpoint).parent, [RECIPE], folder)
    if "auto_map" in json.loads(config_file(checkpoint).read_text(encoding="utf-8")):
        copy_files(checkpoint, ["*.py"], folder)
        for script in folder.glob("zero_to_*.py"):  # DeepSpeed's, not the model's
            script.unlink()


def _model(args: CheckpointArguments, checkpoint: Path, weights: dict[str, Tensor]) -> PreTrainedModel:
    """The model with all of `weights`, whose embedding gets the rows that training left as they were.

    Raises:
        RuntimeError: the weights are not those of the checkpoint's configuration.
        UserError: the model that the run started from is not there any more, or not as it was.
    """
    about = ModelArguments(str(checkpoint), trust_remote_code=args.trust_remote_code)
    with explained(about, OSError, ValueError, KeyError, flag="indictune checkpoint"):
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=args.trust_remote_code)
    answers = continues_texts(config.architectures)
    kind: Any = AutoModelForCausalLM if answers else AutoModelForSequenceClassification
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(config, trust_remote_code=args.trust_remote_code)
    if (checkpoint / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint)
    row_ids = read_row_ids(checkpoint)
    if row_ids is not None:
        embedding = cast(nn.Embedding, model.get_input_embeddings()).weight
        (name,) = (name for name, parameter in model.named_parameters() if parameter is embedding)
        whole = _embedding_at_start(args, checkpoint, kind, config)
        if began_with_others(checkpoint, unused_digest(whole, row_ids)):
            raise UserError(
                f"{checkpoint}: holds only the embedding rows that were trained, and the model that "
                f"{_recipe(checkpoint)} names for the others (model_name_or_path, model_revision) has other weights "
                "now. Convert it where that names those of the training."
            )
        whole[row_ids] = weights[name].to(whole.dtype)
        weights[name] = whole.to(weights[name].dtype)
    unexpected = model.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    missing = [name for name, weight in model.state_dict().items() if weight.is_meta]
    if unexpected or missing:
        raise RuntimeError(f"{checkpoint}: its weights lack {missing[:3]} and have {unexpected[:3]} too much.")
    return model


def _embedding_at_start(
    args: CheckpointArguments, checkpoint: Path, kind: type[Any], config: PreTrainedConfig
) -> Tensor:
    """[vocabulary, width], fp32: the embedding of the model that the run started from, which its recipe names.

    Raises:
        UserError: there is no recipe, or no such model any more.
    """
    path = _recipe(checkpoint)
    if not path.is_file():
        raise UserError(
            f"{checkpoint}: holds only the embedding rows that were trained, and {path}, which names the model that "
            "they belong to, is not there. Convert it where the run has written it."
        )
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    base = ModelArguments(
        recipe["model_name_or_path"],
        model_revision=recipe["model_revision"],
        trust_remote_code=args.trust_remote_code,
        trust_checkpoint=args.trust_checkpoint,
    )
    flag = f"{checkpoint}, whose base is"
    with _without_reports():  # a head that the base lacks is the checkpoint's
        model, _ = read_weights(kind, base, config, torch.float32, flag)
    return cast(nn.Embedding, model.get_input_embeddings()).weight.detach()


@contextmanager
def _without_reports() -> Iterator[None]:
    """A block in which transformers does not tell of weights that a model lacks."""
    before = get_verbosity()
    set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        set_verbosity(before)

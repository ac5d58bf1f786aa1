"""Load a finished run's model, or an adapter on the base that it was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError
from indictune.models.adapters import base_of, check_base, config_file
from indictune.models.load import Model, read_config, read_weights, stored_quantisation
from indictune.models.trusted_files import ADAPTER_CONFIG, check_adapter, explained, first_line


def load_trained(
    folder: str | Path,
    trust_remote_code: bool = False,
    trust_checkpoint: bool = False,
    device_map: str | None = None,
    kind: type[Any] = AutoModelForSequenceClassification,
    dtype: torch.dtype = torch.float32,
) -> Model:
    """A finished run's model for inference, quantised as in training.

    Args:
        trust_checkpoint: read pickled weights. An adapter's own weights are never a pickle.
        device_map: "cpu" loads it there even if there is a GPU.
        dtype: of the weights, unless they are quantised.

    Raises:
        UserError: the folder holds no finished model, or the adapter's base is unreadable.
    """
    args = ModelArguments(
        str(folder), trust_remote_code=trust_remote_code, trust_checkpoint=trust_checkpoint, device_map=device_map
    )
    config = trained_config(args)
    if not (Path(folder) / ADAPTER_CONFIG).exists():
        model, new = read_weights(kind, args, config, dtype, "--model")
        if new:
            raise UserError("model-not-trained", "--model", folder, weight=min(new))
        return model
    check_adapter(Path(folder), "--model")
    base = base_of(folder)
    check_base(folder, base.name)
    args.model_name_or_path, args.model_revision = base.name, base.commit_hash or base.revision
    flag = f"--model {folder}: its base"
    quantisation = take_quantisation(config, read_config(args, flag))
    model, new = read_weights(kind, args, config, dtype, flag, quantisation)
    return add_adapter(model, new, Path(folder), "--model")


def trained_config(args: ModelArguments) -> PreTrainedConfig:
    """The configuration of a finished run's model, or of the base of an adapter on a language model."""
    folder = Path(args.model_name_or_path)
    source = folder if (folder / "config.json").is_file() else config_file(folder)
    with explained(args, Exception, flag="--model"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=args.trust_remote_code)
    return config


def take_quantisation(config: PreTrainedConfig, base_config: PreTrainedConfig) -> BitsAndBytesConfig | None:
    """How an adapter's base is quantised while it is read; None if it is not, or if its files are quantised.

    The quantisation is removed from the adapter's configuration, unless the base's files are quantised.
    """
    settings = stored_quantisation(config)
    if not settings or stored_quantisation(base_config):
        return None
    del config.quantization_config
    return cast(BitsAndBytesConfig, BitsAndBytesConfig.from_dict(settings))  # type: ignore[no-untyped-call]


def add_adapter(base: PreTrainedModel, new_weights: set[str], folder: Path, flag: str) -> PeftModel:
    """The base with the adapter of a folder, for inference.

    `new_weights` are names of the base's weights that are random, and that the adapter must replace.

    Raises:
        UserError: `adapter-does-not-fit`.
    """
    try:
        model = PeftModel.from_pretrained(base, str(folder))
        result = model.load_adapter(str(folder), model.active_adapter)  # again, for what does not fit
    except Exception as error:  # broken files raise any error
        raise UserError("adapter-does-not-fit", flag, folder, reason=first_line(error)) from error
    replaced = tuple(name for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper))
    random = [name for name in new_weights if not f"base_model.model.{name}".startswith(replaced)]
    wrong = sorted([*result.missing_keys, *result.unexpected_keys, *random])
    if wrong:
        raise UserError("adapter-does-not-fit", flag, folder, reason=f"for example {wrong[0]}")
    return model

"""Load a finished run's model, an adapter on the base that it was trained on, or merge the two into one model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftConfig, PeftModel
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from indictune.config.arguments import ModelArguments
from indictune.errors import Problems, UserError
from indictune.models.adapters import base_of, check_base, config_file, nf4_config
from indictune.models.atomic_folder import (
    TOKENIZER_FILES,
    check_output_folder,
    copy_model_files,
    match_config_mode,
    whole_folder,
)
from indictune.models.config_shapes import KINDS
from indictune.models.load import Model, read_config, read_tokenizer, read_weights, stored_quantisation
from indictune.models.trusted_files import ADAPTER_CONFIG, check_adapter, check_links, explained, first_line
from indictune.upstream import set_weight_conversions


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
        folder: of the run.
        trust_remote_code: run Python code that comes with the model.
        trust_checkpoint: read pickled weights. An adapter's own weights are never a pickle.
        device_map: "cpu" loads it there even if there is a GPU.
        kind: transformers' Auto class of the model.
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
    """The configuration of a finished run's model, or of the base of an adapter on a language model.

    Raises:
        UserError: it cannot be read.
    """
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

    Args:
        base: the model.
        new_weights: names of the base's weights that are random, and that the adapter must replace.
        folder: of the adapter.
        flag: that names the folder, for messages.

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


_BASE_FLAG = "--base_model"

_KINDS: dict[str, Any] = {task: kind for kind, task in KINDS.values()}


def merge(
    adapter: str,
    output_dir: str,
    *,
    base_model: str | None = None,
    base_revision: str | None = None,
    base_weights: str | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    to_4bit: bool = False,
    trust_remote_code: bool = False,
) -> str:
    """Write the merged model to `output_dir`, whole or not at all. Returns a line for the user.

    The arguments are the flags of `indictune merge`.

    Raises:
        UserError: the adapter, its base and the flags do not fit together.
    """
    target, source = Path(output_dir), Path(adapter)
    problems = Problems()
    problems.attempt(check_output_folder, target, "--output_dir")
    with problems.collecting():
        check_adapter(source, "--adapter")
        check_links(source, "--adapter")
    problems.raise_any()
    base = _base(source, base_model, base_revision, trust_remote_code)
    model = _merged(source, base, base_weights, dtype)
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    way_out = "Use a folder on another disk, or --dtype bfloat16."
    with whole_folder(target, "--output_dir", size_bytes, way_out) as folder:
        unrounded = folder.with_name("unrounded") if to_4bit else folder
        model.save_pretrained(unrounded, max_shard_size=max_shard_size)
        _check_written(model, unrounded)
        if to_4bit:
            print("--to_4bit rounds the merged weights again. Evaluate this model before you use it.", file=sys.stderr)
            _read_again(model, unrounded, quantization_config=nf4_config()).save_pretrained(folder)
        _copy_description(source, base, folder)
        match_config_mode(folder)
    form = "4 bit" if to_4bit else str(model.dtype).removeprefix("torch.")
    merged_from = f"{source} and {base.model_name_or_path}"
    return f"{target}: {type(model).__name__} in {form}, merged from {merged_from}."


def _base(adapter: Path, base_model: str | None, base_revision: str | None, trust_remote_code: bool) -> ModelArguments:
    """The base, at the commit that the adapter was trained on.

    Raises:
        UserError: `base-unknown`, or as `check_base`.
    """
    trained_on = base_of(adapter)
    name, revision = base_model or trained_on.name, base_revision or trained_on.revision
    if not name:
        raise UserError("base-unknown", "--adapter", adapter)
    check_base(adapter, name, base_revision)
    if (name, revision) == (trained_on.name, trained_on.revision):
        revision = trained_on.commit_hash or revision
    return ModelArguments(
        name, model_revision=revision, trust_remote_code=trust_remote_code, device_map="cpu", method="lora"
    )


def _merged(adapter: Path, base: ModelArguments, base_weights: str | None, dtype: str | None) -> PreTrainedModel:
    """The base, as it was in training, with the adapter merged into it."""
    with explained(ModelArguments(str(adapter)), Exception, flag="--adapter"):
        peft_config = PeftConfig.from_pretrained(str(adapter))
    if peft_config.task_type not in _KINDS:
        raise UserError("adapter-task", "--adapter", adapter, task=peft_config.task_type, known=" or ".join(_KINDS))
    model, new = _read_base(adapter, base, base_weights, dtype, _KINDS[peft_config.task_type])
    was_tied = not peft_config.to_dict().get("ensure_weight_tying") and _untie(model)
    merged = cast(PreTrainedModel, add_adapter(model, new, adapter, "--adapter").merge_and_unload())
    if was_tied:
        _tie_equal(merged)
    for name, tensor in merged.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise UserError("merged-weights-not-finite", "--dtype", merged.dtype, weight=name)
    return merged


def _read_base(
    adapter: Path, base: ModelArguments, base_weights: str | None, dtype_name: str | None, kind: type[Any]
) -> tuple[PreTrainedModel, set[str]]:
    """The base in the type of the merged weights, and the names of its weights that are new."""
    base_config = config = read_config(base, _BASE_FLAG)
    if config_file(adapter).is_file():  # other tools save none
        with explained(ModelArguments(str(adapter)), Exception, flag="--adapter"):
            config = AutoConfig.from_pretrained(config_file(adapter), trust_remote_code=base.trust_remote_code)
    if base_weights == "dequantised" and not stored_quantisation(config):
        raise UserError("base-was-not-quantised", "--base_weights", base_weights, adapter=adapter)
    dtype = cast(torch.dtype, getattr(torch, dtype_name) if dtype_name else base_config.dtype or torch.float32)
    quantisation = take_quantisation(config, base_config)
    if base_weights == "original":
        quantisation = None
    model, new = read_weights(kind, base, config, dtype, _BASE_FLAG, quantisation)
    if any(getattr(module, "source_cls", None) is Conv1D for module in model.modules()):
        # transformers (5.23) would dequantise these layers of GPT-2 to transposed weights.
        raise UserError("adapter-cannot-be-merged", "--adapter", adapter, found="a quantised base with Conv1D layers")
    if getattr(model, "hf_quantizer", None) is not None:
        model.dequantize()  # type: ignore[no-untyped-call]
        # Saving reverses what reading did to the weights, which fails for weights stored in 4 bit (transformers 5.23).
        set_weight_conversions(model, None)
        nn.Module.to(model, dtype)
    return model, new


def _untie(model: PreTrainedModel) -> bool:
    """Whether the output layer was tied to the input embedding, whose copy it gets: an adapter may change only one."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    is_tied = head is not None and head.weight is cast(nn.Embedding, model.get_input_embeddings()).weight
    if is_tied:
        head.weight = nn.Parameter(head.weight.detach().clone())
    return is_tied


def _tie_equal(model: PreTrainedModel) -> None:
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weight = cast(nn.Embedding, model.get_input_embeddings()).weight
    model.config.tie_word_embeddings = torch.equal(head.weight, weight)
    if model.config.tie_word_embeddings:
        head.weight = weight


def _check_written(model: PreTrainedModel, folder: Path) -> None:
    """Compare a saved model with the model."""
    written = _read_again(model, folder).state_dict()
    wrong = [name for name, tensor in model.state_dict().items() if not torch.equal(written[name], tensor)]
    if wrong:
        raise RuntimeError(f"{folder}: the written weights differ from the merged ones, first {wrong[0]}.")


def _read_again(model: PreTrainedModel, folder: Path, **settings: Any) -> PreTrainedModel:
    return type(model).from_pretrained(folder, dtype=model.dtype, device_map="cpu", **settings)


def _copy_description(adapter: Path, base: ModelArguments, folder: Path) -> None:
    """Save tokenizer, chat template, generation settings and recipe of the adapter, or else of the base."""
    if any((adapter / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        copy_model_files(adapter, TOKENIZER_FILES, folder)
    else:
        read_tokenizer(base, _BASE_FLAG).save_pretrained(folder)
    copy_model_files(adapter, ["generation_config.json", "recipe.yaml"], folder)  # for `evaluate`

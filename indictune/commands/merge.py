"""`indictune merge`: make an adapter and its base one model."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from peft import PeftConfig
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from indictune.config.arguments import ModelArguments
from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import Checked, flag
from indictune.console_text import printable
from indictune.errors import Problem, Problems, UserError, problem
from indictune.hub.card import write_card
from indictune.models import atomic_folder, load
from indictune.models.adapters import base_of, check_base, config_file, nf4_config
from indictune.models.atomic_folder import match_config_mode
from indictune.models.config_shapes import KINDS
from indictune.models.trusted_files import check_adapter, check_links, explained
from indictune.upstream import set_weight_conversions

_BASE_FLAG = "--base_model"


@dataclass
class MergeFlags(Checked):
    """Which adapter becomes a complete model, and how it is written."""

    needed = ("model", "indictune merge FOLDER --output_dir FOLDER")

    model: str = flag("", "Folder of the adapter. May be given as a bare first word.")
    output_dir: str = flag("", "Gets the merged model. Must not exist, or be empty.")
    base_model: str | None = flag(
        None, "The base model, as a folder or a Hub name. Default: the one the adapter was trained on."
    )
    base_revision: str | None = flag(
        None, "Branch, tag or commit of the base model. Default: the one the adapter was trained on."
    )
    base_weights: Literal["dequantised", "original"] | None = flag(
        None,
        "What an adapter of `--method qlora` is added to: `dequantised` (default) rounds the base model to 4 bit and "
        "back, as in training; `original` takes the weights of its checkpoint.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = flag(
        None, "Type of the merged weights. Default: that of the base model's checkpoint."
    )
    max_shard_size: str = flag("5GB", "Largest size of one file, such as 500MB or 5GB.")
    to_4bit: bool = flag(False, "Write the merged model in 4 bit, which rounds it again.")
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model.")

    def check(self) -> Iterator[Problem]:
        """Refuse no output folder, and a malformed size."""
        yield from super().check()
        if not self.output_dir:
            yield problem("output-dir-missing", "--output_dir")
        if re.fullmatch(r"[1-9]\d*[KMGT]B", self.max_shard_size) is None:
            yield problem("shard-size", "--max_shard_size", self.max_shard_size)


def run_merge(flags: Mapping[str, list[str]]) -> int:
    """Write the merged model, with a card that has the scores of the adapter."""
    args = read_arguments(flags, MergeFlags, "model")
    print(printable(merge_adapter(args)))
    write_card(Path(args.output_dir), run=Path(args.model))
    return 0


def merge_adapter(args: MergeFlags) -> str:
    """Write the merged model to `args.output_dir`, whole or not at all. Returns a line for the user.

    Raises:
        UserError: the adapter, its base and the flags do not fit together.
    """
    target, source = Path(args.output_dir), Path(args.model)
    problems = Problems()
    problems.attempt(atomic_folder.check_output_folder, target, "--output_dir")
    with problems.collecting():
        check_adapter(source, "--model")
        check_links(source, "--model")
    problems.raise_any()
    base = _base(args)
    model = _merged(args, base)
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    way_out = "Use a folder on another disk, or --dtype bfloat16."
    with atomic_folder.whole_folder(target, "--output_dir", size_bytes, way_out) as folder:
        unrounded = folder.with_name("unrounded") if args.to_4bit else folder
        model.save_pretrained(unrounded, max_shard_size=args.max_shard_size)
        _check_written(model, unrounded)
        if args.to_4bit:
            print("--to_4bit rounds the merged weights again. Evaluate this model before you use it.", file=sys.stderr)
            _read_again(model, unrounded, quantization_config=nf4_config()).save_pretrained(folder)
        _copy_description(source, base, folder)
        match_config_mode(folder)
    form = "4 bit" if args.to_4bit else str(model.dtype).removeprefix("torch.")
    return f"{target}: {type(model).__name__} in {form}, merged from {source} and {base.model_name_or_path}."


def _base(args: MergeFlags) -> ModelArguments:
    """The base, at the commit that the adapter was trained on."""
    adapter = Path(args.model)
    trained_on = base_of(adapter)
    name, revision = args.base_model or trained_on.name, args.base_revision or trained_on.revision
    if not name:
        raise UserError("base-unknown", "--model", adapter)
    check_base(adapter, name, args.base_revision)
    if (name, revision) == (trained_on.name, trained_on.revision):
        revision = trained_on.commit_hash or revision
    return ModelArguments(
        name, model_revision=revision, trust_remote_code=args.trust_remote_code, device_map="cpu", method="lora"
    )


def _merged(args: MergeFlags, base: ModelArguments) -> PreTrainedModel:
    """The base, as it was in training, with the adapter merged into it."""
    adapter, kinds = Path(args.model), {task: kind for kind, task in KINDS.values()}
    with explained(ModelArguments(str(adapter)), Exception, flag="--model"):
        peft_config = PeftConfig.from_pretrained(str(adapter))
    task = peft_config.task_type
    if task not in kinds:
        raise UserError("adapter-task", "--model", adapter, task=task, known=" or ".join(kinds))
    model, new = _read_base(args, base, kinds[task])
    was_tied = not peft_config.to_dict().get("ensure_weight_tying") and _untie(model)
    merged = cast(PreTrainedModel, load.add_adapter(model, new, adapter, "--model").merge_and_unload())
    if was_tied:
        _tie_equal(merged)
    for name, tensor in merged.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise UserError("merged-weights-not-finite", "--dtype", merged.dtype, weight=name)
    return merged


def _read_base(args: MergeFlags, base: ModelArguments, kind: type[Any]) -> tuple[PreTrainedModel, set[str]]:
    """The base in the type of the merged weights, and the names of its weights that are new."""
    adapter = Path(args.model)
    base_config = config = load.read_config(base, _BASE_FLAG)
    if config_file(adapter).is_file():  # other tools save none
        named = ModelArguments(str(adapter), trust_remote_code=base.trust_remote_code)
        config = load.trained_config(named, "--model")
    if args.base_weights == "dequantised" and not load.stored_quantisation(config):
        raise UserError("base-was-not-quantised", "--base_weights", args.base_weights, adapter=adapter)
    dtype = cast(torch.dtype, getattr(torch, args.dtype) if args.dtype else base_config.dtype or torch.float32)
    quantisation = load.take_quantisation(config, base_config)
    if args.base_weights == "original":
        quantisation = None
    model, new = load.read_weights(kind, base, config, dtype, _BASE_FLAG, quantisation)
    if any(getattr(module, "source_cls", None) is Conv1D for module in model.modules()):
        # transformers (5.23) would dequantise these layers of GPT-2 to transposed weights.
        raise UserError("adapter-cannot-be-merged", "--model", adapter, found="a quantised base with Conv1D layers")
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
    written = _read_again(model, folder).state_dict()
    wrong = [name for name, tensor in model.state_dict().items() if not torch.equal(written[name], tensor)]
    if wrong:
        raise RuntimeError(f"{folder}: the written weights differ from the merged ones, first {wrong[0]}.")


def _read_again(model: PreTrainedModel, folder: Path, **settings: Any) -> PreTrainedModel:
    return type(model).from_pretrained(folder, dtype=model.dtype, device_map="cpu", **settings)


def _copy_description(adapter: Path, base: ModelArguments, folder: Path) -> None:
    """Save tokenizer, chat template, generation settings and recipe of the adapter, or else of the base."""
    if any((adapter / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        atomic_folder.copy_model_files(adapter, atomic_folder.TOKENIZER_FILES, folder)
    else:
        load.read_tokenizer(base, _BASE_FLAG).save_pretrained(folder)
    atomic_folder.copy_model_files(adapter, ["generation_config.json", "recipe.yaml"], folder)  # for `evaluate`

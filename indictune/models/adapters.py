"""Quantise a base, add LoRA adapters to it, and save what belongs to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError
from indictune.models import builtin
from indictune.models.adapter_base import CONFIG, record_base

ALL_LINEAR = "all-linear"

# peft trains and saves modules of these names whole in every sequence classifier.
HEAD_NAMES = ("classifier", "score")

# Heads and poolers stay unquantised: if the checkpoint has no weights for them, they are trained whole.
UNQUANTISED = [*HEAD_NAMES, "head", r".*\.pooler"]


def nf4_config() -> BitsAndBytesConfig:
    """The quantisation of QLoRA's base: NF4 with double quantisation, computed in bf16.

    Packed weights are stored as bf16, so that all weights have one type and can be sharded together.
    """
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
        llm_int8_skip_modules=UNQUANTISED,
    )


def freeze_quantised(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Freeze a quantised base, and cast its unquantised weights (norms, embedding, head) to `dtype`."""
    from bitsandbytes.nn.modules import Linear4bit  # not available on every platform, and slow to import

    quantised = set()
    for module in model.modules():
        if isinstance(module, Linear4bit):
            quantised.add(module.weight)
            # On a CPU with AVX512-BF16 the first evaluation packs the weights and rounds their scales to bf16 in
            # place. The model changes, and layers narrower than a block crash (bitsandbytes 0.50.2). Remove this when
            # test_evaluating_leaves_the_base_as_it_was passes without it.
            module.support_avx512bf16_for_cpu = False
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter not in quantised and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def add_lora(
    model: PreTrainedModel, args: ModelArguments, task: TaskType, trained_whole: Sequence[str] = ()
) -> PeftModel:
    """Wrap the model so that LoRA matrices and some modules are trained, and the rest is frozen.

    Args:
        model: any model of transformers.
        args: size and modules of the matrices.
        task: peft's name for the task. For a classifier, peft trains the head whole by itself.
        trained_whole: modules to train and save whole, in addition to `args.modules_to_save`.
    """
    config = LoraConfig(
        task_type=task,
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout if args.dropout is None else args.dropout,
        use_dora=args.use_dora,
        use_rslora=args.use_rslora,
        target_modules=ALL_LINEAR if ALL_LINEAR in args.lora_target_modules else args.lora_target_modules,
        modules_to_save=[*trained_whole, *args.modules_to_save],
    )
    return cast(PeftModel, get_peft_model(model, config, revision=args.model_revision))


def check_published_base(args: ModelArguments, push_to_hub: bool) -> None:
    """Refuse to push an adapter on a local base: its files and card would name a path of this machine.

    Raises:
        UserError: `push-of-local-base`.
    """
    if push_to_hub and args.method != "full" and Path(builtin.resolve(args.model_name_or_path)).is_dir():
        raise UserError("push-of-local-base", "--push_to_hub", model=args.model_name_or_path)


def save_adapter_extras(model: nn.Module, folder: str | Path) -> None:
    """Write what peft leaves out of an adapter's folder: configuration, generation settings, and record of the base.

    Call it on one process after every `save_pretrained`. It does nothing for a model without an adapter.
    """
    if isinstance(model, PeftModel):
        (Path(folder) / "README.md").unlink(missing_ok=True)  # peft's card (0.21) says nothing; `hub.card` writes one
        base = cast(PreTrainedModel, model.get_base_model())
        base.config.architectures = [type(base).__name__]
        if base.can_generate():
            base.config.to_json_file(Path(folder) / CONFIG)
            base.generation_config.save_pretrained(folder)
        else:
            base.config.save_pretrained(folder)
        commit_hash = vars(base.config).get("_commit_hash")  # set only if the base came from the Hub
        revision = model.peft_config[model.active_adapter].revision or "main"
        record_base(folder, builtin.name_of(str(base.name_or_path)), revision, commit_hash)

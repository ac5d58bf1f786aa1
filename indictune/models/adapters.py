"""LoRA adapters: which modules get one, which are trained whole beside it, and what is saved with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from indictune.arguments import ModelArguments
from indictune.errors import UserError

ALL_LINEAR = "all-linear"

# peft trains and saves modules of these names whole in every sequence classifier.
HEAD_NAMES = ("classifier", "score")

# Heads and poolers stay unquantised: where the checkpoint has no weights for them they are new and trained whole.
UNQUANTISED = [*HEAD_NAMES, "head", r".*\.pooler"]


def nf4_config() -> BitsAndBytesConfig:
    """The base of QLoRA: NF4, the scales quantised too, computed in bf16.

    Stored as bf16, so that quantised and other weights have one type and can be sharded together.
    """
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
        llm_int8_skip_modules=UNQUANTISED,
    )


def freeze_quantised(model: PreTrainedModel) -> None:
    """Freeze a quantised base and put what is not quantised (norms, embedding, head) into fp32.

    Gradient checkpointing is the trainer's to switch on.
    """
    from bitsandbytes.nn.modules import Linear4bit  # not to be had on every platform, and slow to import

    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # type: ignore[no-untyped-call]
    for module in model.modules():
        if isinstance(module, Linear4bit):
            # On a CPU with AVX512-BF16 the first evaluation would pack the weights and round their scales to bf16, in
            # place: the model changes, and layers narrower than a block crash (bitsandbytes 0.50.2). Remove this when
            # test_evaluating_leaves_the_base_as_it_was passes without.
            module.support_avx512bf16_for_cpu = False


def add_lora(model: PreTrainedModel, args: ModelArguments, new_weights: Iterable[str]) -> PeftModel:
    """Wrap the model so that LoRA matrices, the head and every module with new weights are trained, the rest frozen.

    Args:
        new_weights: names of the parameters that the checkpoint did not hold. A pooler among them (a checkpoint of
            masked language modelling has none) must be saved with the adapter: frozen at random numbers that are
            drawn again on loading, the trained model would never come back.

    Raises:
        UserError: a name of `--lora_target_modules` matches no linear layer.
    """
    new_modules = sorted({name.rpartition(".")[0] for name in new_weights})
    beside_head = [name for name in new_modules if name.partition(".")[0] not in HEAD_NAMES]
    _check_targets(model, args.lora_target_modules, [*beside_head, *HEAD_NAMES])
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout if args.dropout is None else args.dropout,
        target_modules=ALL_LINEAR if ALL_LINEAR in args.lora_target_modules else args.lora_target_modules,
        modules_to_save=beside_head,
    )
    return cast(PeftModel, get_peft_model(model, config, revision=args.model_revision))


def save_adapter_extras(model: nn.Module, folder: str | Path) -> None:
    """Write what peft leaves out of an adapter's folder: `config.json`, with the label names and the quantisation.

    A model that is no adapter is left alone; its own `save_pretrained` writes everything. Call it on one process,
    beside every `save_pretrained` of the model.
    """
    if isinstance(model, PeftModel):
        base = cast(PreTrainedModel, model.get_base_model())
        base.config.architectures = [type(base).__name__]
        base.config.save_pretrained(folder)


def _check_targets(model: PreTrainedModel, targets: Sequence[str], trained_whole: Sequence[str]) -> None:
    """peft passes over a name that matches nothing as long as another one does."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    candidates = [name for name in linear if not name.startswith(tuple(trained_whole))]
    unmatched = [
        target
        for target in targets
        if target != ALL_LINEAR and not any(name == target or name.endswith(f".{target}") for name in candidates)
    ]
    if unmatched:
        names = ", ".join(sorted({name.rpartition(".")[2] for name in candidates}))
        raise UserError(
            f"--lora_target_modules {' '.join(unmatched)}: the model has no linear layer of that name; "
            f"it has {names} ({ALL_LINEAR} takes them all)."
        )

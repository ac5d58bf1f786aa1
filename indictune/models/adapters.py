"""LoRA adapters: which modules get one, which are trained whole beside it, and what is saved with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from indictune.config.arguments import ModelArguments
from indictune.errors import Problems, UserError
from indictune.models import builtin
from indictune.models.adapter_base import CONFIG, record_base

ALL_LINEAR = "all-linear"

# What a recipe for an adapter says of its matrices, which may well stand beside `--method full`.
OF_MATRICES = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")

# peft trains and saves modules of these names whole in every sequence classifier.
HEAD_NAMES = ("classifier", "score")

# Heads and poolers stay unquantised: where the checkpoint has no weights for them they are new and trained whole.
UNQUANTISED = [*HEAD_NAMES, "head", r".*\.pooler"]
# transformers leaves the output layer of a language model as it is, too.
_STAYS = re.compile(rf"(^|\.)({'|'.join(HEAD_NAMES)}|head|pooler|lm_head)(\.|$)")


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


def freeze_quantised(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Freeze a quantised base, and put what is not quantised (norms, embedding, head) into `dtype`."""
    from bitsandbytes.nn.modules import Linear4bit  # not to be had on every platform, and slow to import

    quantised = set()
    for module in model.modules():
        if isinstance(module, Linear4bit):
            quantised.add(module.weight)
            # On a CPU with AVX512-BF16 the first evaluation would pack the weights and round their scales to bf16, in
            # place: the model changes, and layers narrower than a block crash (bitsandbytes 0.50.2). Remove this when
            # test_evaluating_leaves_the_base_as_it_was passes without.
            module.support_avx512bf16_for_cpu = False
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter not in quantised and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def add_lora(
    model: PreTrainedModel,
    args: ModelArguments,
    task: TaskType,
    trained_whole: Sequence[str] = (),
    untouched: Sequence[str] = (),
) -> PeftModel:
    """Wrap the model so that LoRA matrices and some modules are trained, and the rest is frozen.

    Args:
        model: of any kind.
        args: say how large the matrices are and where they go.
        task: peft's name for what the model does. It trains a classifier's head whole by itself.
        trained_whole: modules that are trained and saved whole, beside `args.modules_to_save`.
        untouched: modules that get no matrices.

    Raises:
        UserError: a name of `--lora_target_modules` matches no linear layer.
    """
    trained_whole = [*trained_whole, *args.modules_to_save]
    _check_targets(model, args.lora_target_modules, [*trained_whole, *untouched])
    config = LoraConfig(
        task_type=task,
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout if args.dropout is None else args.dropout,
        use_dora=args.use_dora,
        use_rslora=args.use_rslora,
        target_modules=ALL_LINEAR if ALL_LINEAR in args.lora_target_modules else args.lora_target_modules,
        modules_to_save=trained_whole,
    )
    return cast(PeftModel, get_peft_model(model, config, revision=args.model_revision))


def without_effect(args: ModelArguments) -> list[str]:
    """A sentence on each value that was given for an adapter, where there is none."""
    if args.method != "full":
        return []
    plain = type(args)()
    given = [name for name in OF_MATRICES if getattr(args, name) != getattr(plain, name)]
    return [f"--{name}: has no effect with --method full." for name in given]


def check_names(shapes: PreTrainedModel, args: ModelArguments, untouched: Sequence[str]) -> None:
    """Check the names of an adapter's modules.

    Args:
        shapes: the model; its weights are not looked at.
        args: name the modules.
        untouched: modules that get no matrices.

    Raises:
        UserError: a name of `--lora_target_modules` matches no linear layer, or one of `--modules_to_save` no module,
            one within another, or one that is quantised.
    """
    problems = Problems()
    with problems.collecting():
        _check_targets(shapes, args.lora_target_modules, [*args.modules_to_save, *untouched])
    with problems.collecting():
        _check_modules_to_save(shapes, args)
    problems.raise_any()


def check_published_base(args: ModelArguments, push_to_hub: bool) -> None:
    """Refuse to push an adapter whose files and card would name a base that nobody else has, by this machine's path.

    Raises:
        UserError: the base is a folder, or a model of the package.
    """
    if push_to_hub and args.method != "full" and Path(builtin.resolve(args.model_name_or_path)).is_dir():
        raise UserError(
            f"--push_to_hub: an adapter names its base, and --model_name_or_path {args.model_name_or_path} is a "
            "folder of this machine. Give the base's name on the Hub, or leave --push_to_hub out and push what "
            "`indictune merge` makes of the two."
        )


def save_adapter_extras(model: nn.Module, folder: str | Path) -> None:
    """Write what peft leaves out of an adapter's folder: the configuration, with the label names and the quantisation
    (`adapter_base.config_file`), how answers end, and which weights the adapter belongs to.

    A model that is no adapter is left alone; its own `save_pretrained` writes everything. Call it on one process,
    beside every `save_pretrained` of the model.
    """
    if isinstance(model, PeftModel):
        base = cast(PreTrainedModel, model.get_base_model())
        base.config.architectures = [type(base).__name__]
        if base.can_generate():
            base.config.to_json_file(Path(folder) / CONFIG)
            base.generation_config.save_pretrained(folder)
        else:
            base.config.save_pretrained(folder)
        commit_hash = vars(base.config).get("_commit_hash")  # only there where the base came from the Hub
        record_base(folder, builtin.name_of(str(base.name_or_path)), _revision(model), commit_hash)


def _revision(model: PeftModel) -> str:
    return model.peft_config[model.active_adapter].revision or "main"


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


def _check_modules_to_save(model: PreTrainedModel, args: ModelArguments) -> None:
    names, modules = args.modules_to_save, dict(model.named_modules())
    unmatched = [name for name in names if not any(each == name or each.endswith(f".{name}") for each in modules)]
    if unmatched:
        there = ", ".join(sorted({each.rpartition(".")[2] for each in modules if each and not each[-1].isdigit()}))
        raise UserError(f"--modules_to_save {' '.join(unmatched)}: the model has no such module; it has {there}.")
    given = f"--modules_to_save {' '.join(names)}"
    whole = [path for path in modules if names and path.endswith(tuple(names))]  # as peft finds them (0.21)
    problems = Problems()
    inner = next(((one, other) for one in whole for other in whole if one.startswith(f"{other}.")), None)
    if inner is not None:
        problems.append(
            f"{given}: peft takes each module whose name ends so, and {inner[0]} lies in {inner[1]}. Name the inner "
            "ones."
        )
    linear = [path for path, module in modules.items() if isinstance(module, nn.Linear) and not _STAYS.search(path)]
    quantised = [path for path in linear if f"{path}.".startswith(tuple(f"{each}." for each in whole))]
    if args.method == "qlora" and quantised:
        problems.append(
            f"{given}: --method qlora keeps {quantised[0]} in 4 bits, in which it cannot be trained whole. Leave it "
            "out; --lora_target_modules gives it matrices."
        )
    problems.raise_any()


def check_precision(args: ModelArguments, planned: Callable[[str], Any]) -> None:
    """Refuse modules that are trained whole, in fp32, between layers of a quantised base, which computes in bf16.

    Args:
        args: name the modules and the method.
        planned: the value that a field of the training arguments will have.

    Raises:
        UserError: the run computes in fp32, where nothing casts between the two.
    """
    is_half = planned("bf16") is not False or planned("fp16")
    if args.method == "qlora" and args.modules_to_save and not is_half:
        raise UserError(
            f"--modules_to_save {' '.join(args.modules_to_save)}: --method qlora computes in bf16, and what is "
            "trained whole beside it needs --bf16 true."
        )

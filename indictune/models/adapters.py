"""Add LoRA adapters to a base, save them, and find the base that an adapter was trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError
from indictune.models import builtin
from indictune.models.own_code import SavesCode
from indictune.models.trusted_files import ADAPTER_CONFIG, MODEL_FLAG
from indictune.upstream import commit_of

RECORD = "base_model.json"
CONFIG = "base_config.json"
END_BYTES = 1 << 20


@dataclass(frozen=True)
class Base:
    """The base of an adapter."""

    name: str
    revision: str  # branch, tag or commit, as the user named it
    commit_hash: str | None = None  # of `revision` during the training; None if unknown
    fingerprint: str | None = None  # of a folder's weights during the training; None for the Hub, or if unknown


def config_file(folder: str | Path) -> Path:
    """The configuration of a run's model: `base_config.json` for an adapter on a language model, else `config.json`.

    transformers opens an adapter's folder together with its base only if the folder has no `config.json`. The folder
    of a classifier needs one, for the names of its labels.
    """
    own = Path(folder) / CONFIG
    return own if own.is_file() else Path(folder) / "config.json"


def continues_texts(architectures: Sequence[str] | None) -> bool:
    """Whether `architectures` name a causal language model: of transformers, or by a usual name."""
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())  # also Gemma 3, whose name is unusual
    names = map(str, architectures or ())
    return any(name in known or name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def record_base(
    folder: str | Path, model_name_or_path: str, revision: str = "main", commit_hash: str | None = None
) -> None:
    """Write `base_model.json`, the record of an adapter's base, into the adapter's folder."""
    local = Path(builtin.resolve(model_name_or_path))
    base = Base(model_name_or_path, revision, commit_hash, fingerprint(local) if local.is_dir() else None)
    (Path(folder) / RECORD).write_text(json.dumps(asdict(base), indent=2) + "\n", encoding="utf-8")


def base_of(adapter_folder: str | Path) -> Base:
    """The base of an adapter, by its record, or by `adapter_config.json`; else `base-record-unreadable`."""
    record = Path(adapter_folder) / RECORD
    path = record if record.is_file() else Path(adapter_folder) / ADAPTER_CONFIG
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        if path != record:
            noted = {"name": noted.get("base_model_name_or_path") or "", "revision": noted.get("revision") or "main"}
        base = Base(**noted)
        if not isinstance(base.name, str) or "\0" in base.name or not isinstance(base.revision, str):
            raise ValueError(f"base {base.name!r}, revision {base.revision!r}")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError("base-record-unreadable", str(path), reason=repr(error)) from error
    return base


def check_base(
    adapter_folder: str | Path, base_name_or_path: str, revision: str | None = None, flag: str = "--base_model"
) -> None:
    """Refuse to use an adapter with other weights than it was trained on.

    Args:
        base_name_or_path: the base to use; a folder may have moved since the training.
        revision: of the base, as the user named it, or None.
        flag: names the base in messages.

    Raises:
        UserError: `base-revision-differs` or `base-weights-differ`.
    """
    base, adapter = base_of(adapter_folder), adapter_folder
    if revision not in (None, base.revision, base.commit_hash):
        given = "--base_revision", revision
        raise UserError("base-revision-differs", *given, adapter=adapter, trained_on=base.revision, base=base.name)
    found = other_fingerprint(base, base_name_or_path, flag)
    if found is not None:
        trained_on, given = str(base.fingerprint)[:16], (flag, base_name_or_path)
        raise UserError("base-weights-differ", *given, adapter=adapter, trained_on=trained_on, found=found[:16])


def other_fingerprint(base: Base, name_or_path: str, flag: str = MODEL_FLAG) -> str | None:
    """The fingerprint of a base's weights if it differs from the training's; None if it is equal or unknown."""
    local = Path(builtin.resolve(name_or_path, flag))
    if base.fingerprint is None or not (local / "config.json").is_file():  # reading reports a missing folder
        return None
    found = fingerprint(local)
    return None if found == base.fingerprint else found


def fingerprint(folder: Path) -> str:
    """SHA-256 over `config.json` and each weights file's name, size, first and last MiB.

    Trained weights differ everywhere, so the ends suffice, without reading a hundred gigabytes.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted([*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]):
        size_bytes = path.stat().st_size
        digest.update(f"\n{path.name} {size_bytes}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(END_BYTES))
            file.seek(max(0, size_bytes - END_BYTES))
            digest.update(file.read(END_BYTES))
    return digest.hexdigest()


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
        # `all-linear` of peft (0.21) leaves out the head of a classifier of texts alone.
        exclude_modules=list(HEAD_NAMES) if task == TaskType.TOKEN_CLS else None,
        modules_to_save=[*trained_whole, *args.modules_to_save],
    )
    return cast(PeftModel, get_peft_model(model, config, revision=args.model_revision))


def check_published_base(args: ModelArguments, push_to_hub: bool) -> None:
    """Refuse to push an adapter on a local base (`push-of-local-base`): its files name a path of this machine."""
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
        if isinstance(base, SavesCode):
            base.save_code(folder)
        if base.can_generate():
            base.config.to_json_file(Path(folder) / CONFIG)
            base.generation_config.save_pretrained(folder)
        else:
            base.config.save_pretrained(folder)
        commit_hash = commit_of(base.config)  # set only if the base came from the Hub
        revision = model.peft_config[model.active_adapter].revision or "main"
        record_base(folder, builtin.builtin_name(str(base.name_or_path)), revision, commit_hash)

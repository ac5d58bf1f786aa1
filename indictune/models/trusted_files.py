"""Checks of a model's folder before any library reads it, and why a model cannot be read."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path, PurePath
from pickle import UnpicklingError
from typing import Any
from zipfile import ZIP_STORED, ZipFile, is_zipfile

import torch
import transformers
from huggingface_hub import is_offline_mode
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError
from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file, cached_files, has_file, resolve_revision

from indictune.config.arguments import ModelArguments
from indictune.config.early_values import unusable_model
from indictune.errors import Problem, UserError, problem
from indictune.models import builtin

logger = logging.getLogger(__name__)


INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
PICKLED_INDEX = "pytorch_model.bin.index.json"
PICKLED = "pytorch_model.bin"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

# Links to weights are allowed: weights are often kept on another disk, and no text comes from them. Every other file
# may be read as text and saved with the trained model: each tokenizer class has its own names for a vocabulary.
_WEIGHTS = frozenset({".safetensors", ".bin", ".h5", ".msgpack"})

# transformers reads the tokenizer's settings in this order. The keys listed for each file are never opened: published
# models have the paths of their authors there.
_TOKENIZER_SETTINGS: dict[str, tuple[str, ...]] = {
    "tokenizer_config.json": ("tokenizer_file", "special_tokens_map_file", "name_or_path"),
    "special_tokens_map.json": (),
}
# `tokenizers` (0.23) opens a string in these as a file, and transformers (5.23) passes it on.
_OPENED_AS_FILE = ("vocab", "merges")
_POSITIONAL_ARGUMENTS = "init_inputs"  # of the tokenizer's class; the first one is usually `vocab`


def is_outside(path: Path, folder: Path) -> bool:
    """Whether a path, after links, is outside a model's folder. Links of the Hub's cache to its blobs are inside."""
    root, target = folder.resolve(), path.resolve()
    if target.is_relative_to(root):
        return False
    is_cached = root.parent.name == "snapshots" and root.parents[1].name.startswith("models--")
    return not (is_cached and target.is_relative_to(root.parents[1] / "blobs"))


def is_inside(name: str) -> bool:
    """Whether a relative name from a file stays below the folder of that file."""
    path = PurePath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def check_links(folder: Path, flag: str) -> None:
    """Refuse links to files outside a model's folder, except links to weights.

    Raises:
        UserError: `link-outside-model`.
    """
    files = [path for path in folder.glob("*") if path.suffix not in _WEIGHTS and not path.is_dir()]
    files += folder.glob("additional_chat_templates/*")
    found = sorted(path for path in files if path.exists() and is_outside(path, folder))
    if found:
        links = ", ".join(f"{path.relative_to(folder)} ({path.resolve()})" for path in found[:3])
        raise UserError("link-outside-model", flag, folder, links=links)


def check_tokenizer_settings(name: str, revision: str | None, flag: str) -> None:
    """Refuse tokenizer settings that name files outside the model's folder: their lines would become tokens.

    Raises:
        UserError: `tokenizer-file-outside-model`.
        OSError: the settings cannot be read.
        ValueError: the settings are not JSON.
    """
    names = list(_TOKENIZER_SETTINGS)
    found = cached_files(name, names, revision=revision, _raise_exceptions_for_missing_entries=False)
    for path in map(Path, found or ()):
        settings = json.loads(path.read_text(encoding="utf-8"))
        for key, value in settings.items():
            named = None if key in _TOKENIZER_SETTINGS[path.name] else _outside_file(key, value, path)
            if named is not None:
                raise UserError("tokenizer-file-outside-model", flag, name, file=path.name, entry=f"{key} {named!r}")


def _outside_file(key: str, value: Any, settings_file: Path) -> Any:
    """The value, or the string in it, that names a file outside the folder of the settings; None where none does."""
    if (key == _POSITIONAL_ARGUMENTS and value) or (key in _OPENED_AS_FILE and isinstance(value, str)):
        return value
    folder = settings_file.parent
    for text in _strings(value):
        # A name without a separator is a file only under a key such as `vocab_file`: other strings are tokens. The
        # folder's own file of that name replaces what tokenizer_config.json says, but not the special tokens' file.
        # As of `os.path`, a text that is too long for a name, such as a chat template, is no file.
        is_own = os.path.exists(folder / text) and settings_file.name == "tokenizer_config.json"
        if os.sep in text or (key.endswith("_file") and not is_own):
            candidates = [Path(text), folder / text]
            if any(os.path.isfile(path) and is_outside(path, folder) for path in candidates):
                return text
    return None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def own_classes(config: PreTrainedConfig) -> dict[str, str]:
    """Auto class of a model -> MODULE.CLASS of its own code, perhaps after REPOSITORY--."""
    named: dict[str, object] = config.to_dict().get("auto_map") or {}
    return {name: str(each) for name, each in named.items() if name.startswith("AutoModel")}


def means_own_code(config: PreTrainedConfig) -> bool:
    """Whether a configuration names a class that transformers does not have, or brings code and names no class."""
    of_ours = {"Gemma3TextForTokenClassification", "NgramsForSequenceClassification"}
    known = {*vars(transformers)["__all__"], *of_ours}  # `dir` takes 0.2 s
    own = {each.rpartition(".")[2] for each in own_classes(config).values()}
    named = {re.sub("^(TF|Flax)", "", str(each)) for each in config.architectures or ()}
    return not own <= known or (bool(own or named) and not named & known)


def check_weights_setting(config: PreTrainedConfig, flag: str) -> None:
    """Refuse `transformers_weights` in a configuration.

    transformers (5.23) reads the file that it names instead of the usual ones, even a pickle or an index that leads
    outside the model's folder.

    Raises:
        UserError: `config-names-weights`.
    """
    named = config.to_dict().get("transformers_weights")
    if named is not None:
        raise UserError("config-names-weights", flag, config.name_or_path, named=repr(named))


def check_adapter(folder: Path, flag: str) -> None:
    """Refuse an adapter with which peft (0.21) would read or import more than safetensors and JSON of its folder.

    Other kinds than LoRA name files of other folders: MULTITASK_PROMPT_TUNING a pickle, XLORA further adapters.
    `megatron_config` makes peft import a module. peft reads a pickle where there is no safetensors file.

    Raises:
        UserError: `adapter-config-unreadable`, `adapter-kind`, `adapter-pickled` or `adapter-without-weights`.
    """
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        kind, imports = config["peft_type"], config.get("megatron_config")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError("adapter-config-unreadable", flag, folder, reason=repr(error)) from error
    if kind != "LORA" or imports:
        found = f"peft_type {kind!r}" if kind != "LORA" else "megatron_config"
        raise UserError("adapter-kind", flag, folder, found=found)
    if not (folder / ADAPTER).is_file():
        is_pickled = (folder / "adapter_model.bin").is_file()
        raise UserError("adapter-pickled" if is_pickled else "adapter-without-weights", flag, folder)


MODEL_FLAG = "--model_name_or_path"

# Errors that broken files raise while a model is made: a config.json can break any line of the model's code. Without
# RuntimeError, which torch raises when memory is short.
BROKEN = (
    *(ArithmeticError, AssertionError, AttributeError, KeyError, OSError, TypeError, ValueError),
    *(SafetensorError, UnpicklingError),
)

_OF_THE_HUB = {
    GatedRepoError: "model-gated",
    RevisionNotFoundError: "no-such-revision",
    RepositoryNotFoundError: "no-such-model",
}


@contextmanager
def explained(args: ModelArguments, *errors: type[Exception], flag: str = MODEL_FLAG) -> Iterator[None]:
    """Turn `errors` of reading a model's files into one user error, as `explanation` describes it."""
    try:
        yield
    except UserError:
        raise
    except errors as error:
        logger.debug("%s %s cannot be read", flag, args.model_name_or_path, exc_info=error)
        raise UserError(problems=[load_problem(args, error, flag)]) from error


def load_problem(args: ModelArguments, error: BaseException, flag: str = MODEL_FLAG) -> Problem:
    """The problem behind an error of reading the model that `args` names."""
    name = args.model_name_or_path
    given, folder = (flag, name), Path(name)
    if (unusable := unusable_model(name, flag)) is not None:
        return unusable
    if "trust_remote_code" in str(error):
        return problem("model-needs-its-code", *given)
    causes = tuple(_causes(error))
    for cause in causes:
        if isinstance(cause, HfHubHTTPError) and cause.response.status_code == HTTPStatus.TOO_MANY_REQUESTS:
            return problem("hub-rate-limit", *given, reason=first_line(cause))
    for kind, code in _OF_THE_HUB.items():
        if any(isinstance(cause, kind) for cause in causes):
            return problem(code, *given, revision=args.model_revision)
    if isinstance(error, OSError) and not folder.exists():
        return problem("model-not-found-offline", *given, reason=first_line(error))
    return problem("model-unreadable", *given, reason=first_line(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """The first line of an error's message, and the next one after a colon; with the error's name if it helps."""
    lines = str(error).splitlines() or [""]
    text = " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])
    explains_itself = text and isinstance(error, ImportError | OSError | ValueError)
    return text if explains_itself else f"{type(error).__name__}: {text}"


def check_indexes(folder: Path, flag: str) -> None:
    """Refuse an index of weights that names a file outside its folder: transformers 5.23 would read it.

    Raises:
        UserError: `index-outside-model` or `index-unreadable`.
    """
    for index in sorted(folder.glob("*.index.json")):
        _named_in(index, folder, flag)


def _named_in(index: Path, model: object, flag: str) -> list[str]:
    """The files that an index names; raises as `check_indexes`."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        outside = sorted(name for name in names if not is_inside(name))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError("index-unreadable", flag, model, file=index.name, reason=repr(error)) from error
    if outside:
        named = ", ".join(map(repr, outside[:3]))
        raise UserError("index-outside-model", flag, model, file=index.name, named=named)
    return sorted(names)


def weights_files(folder: Path, flag: str) -> list[Path]:
    """The safetensors files of a model.

    Raises:
        UserError: `weights-missing`, or as `check_indexes`.
    """
    names = _named_in(folder / INDEX, folder, flag) if (folder / INDEX).is_file() else [WHOLE]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UserError("weights-missing", flag, folder, files=", ".join(missing[:3]))
    return [folder / name for name in names]


def are_pickled(args: ModelArguments, flag: str = MODEL_FLAG) -> bool:
    """Whether a model's weights are pickles, as those of most models of before 2023. They are checked then.

    Pickles are fetched for it. A bot's copy in an open pull request, which transformers (5.23) would take instead, is
    not looked for: whoever opens a request chooses its weights.

    Raises:
        UserError: `weights-not-found`, `pickle-refused`, or as `check_indexes`.
    """
    name = builtin.resolve(args.model_name_or_path)
    check_indexes(Path(name), flag)
    with explained(args, Exception, flag=flag):
        revision = resolve_revision(name, args.model_revision)

        def has(file: str) -> bool:
            return bool(has_file(name, file, revision=revision, local_files_only=is_offline_mode()))

        if has(WHOLE):
            return False
        if has(INDEX):
            _named_in(Path(str(cached_file(name, INDEX, revision=revision))), args.model_name_or_path, flag)
            return False
        is_whole = has(PICKLED)
        if not is_whole and not has(PICKLED_INDEX):
            if is_offline_mode() and not Path(name).is_dir():
                cached_file(name, WHOLE, revision=revision)  # raises what is told of a file that is not in the cache
            raise UserError("weights-not-found", flag, args.model_name_or_path)
        files = [PICKLED]
        if not is_whole:
            files = _named_in(Path(str(cached_file(name, PICKLED_INDEX, revision=revision))), name, flag)
        for file in files:
            _check_pickle(Path(str(cached_file(name, file, revision=revision))), args.model_name_or_path, flag)
    # Else transformers (5.23) asks a Space, in a thread of its own, to convert a model without safetensors.
    os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "true"
    return True


def _check_pickle(path: Path, model: str, flag: str) -> None:
    """Refuse a file with anything but tensors that are as large as they say.

    torch's `weights_only` reads a few types and calls nothing else; torch.distributed adds classes of its own to them.

    Raises:
        UserError: `pickle-refused`.
    """
    size_bytes = path.stat().st_size
    try:
        if is_zip := is_zipfile(path):  # torch 1.6 and later; it is mapped into memory then, and not read
            with ZipFile(path) as file:
                if any(each.compress_type != ZIP_STORED for each in file.infolist()):
                    raise ValueError("it is compressed, so that its size is not that of its weights")
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        for key, tensor in weights.items():
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise ValueError(f"{key!r} is no tensor but {type(tensor).__name__}")
            stored_bytes = tensor.untyped_storage().nbytes()
            if not tensor.numel() * tensor.element_size() <= stored_bytes <= size_bytes:
                raise ValueError(f"{key!r} is larger than what is stored of it")
    except Exception as error:  # broken files raise any error
        found = re.search(r"(?:Unsupported|Trying to call|GLOBAL|Can only|Only) [^.]*(\.\w+)*", str(error))
        reason = found[0] if "Weights only load failed" in str(error) and found else first_line(error)
        raise UserError("pickle-refused", flag, model, file=path.name, reason=reason) from error

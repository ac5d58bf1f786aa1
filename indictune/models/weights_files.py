"""Find the files that hold a model's weights, and refuse pickled ones that hold anything else."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile, is_zipfile

import torch
from huggingface_hub import is_offline_mode
from transformers.utils.hub import cached_file, has_file, resolve_revision

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError
from indictune.models import builtin
from indictune.models.trusted_files import MODEL_FLAG, explained, first_line, is_inside

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
PICKLED_INDEX = "pytorch_model.bin.index.json"
PICKLED = "pytorch_model.bin"

# Else transformers (5.23) asks a Space, in a thread of its own, to convert a model without safetensors.
os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "true"


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

        if has(WHOLE) or has(INDEX):
            return False
        if not has(PICKLED) and not has(PICKLED_INDEX):
            raise UserError("weights-not-found", flag, args.model_name_or_path)
        files = [PICKLED]
        if not has(PICKLED):
            files = _named_in(Path(str(cached_file(name, PICKLED_INDEX, revision=revision))), name, flag)
        for file in files:
            _check_pickle(Path(str(cached_file(name, file, revision=revision))), args.model_name_or_path, flag)
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

"""The small models that come with the package: built on the first call, then read from a cache like any other."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from indictune.cache_folders import cache_folder, kept_in
from indictune.errors import UserError
from indictune.models import tiny_bert, tiny_llama

PREFIX = "builtin:"


@dataclass(frozen=True)
class BuiltIn:
    """How a model is made.

    Attributes:
        texts: that its tokenizer learns from.
        build: writes a model made from texts to a folder; the same texts give the same bytes.
        version: raise it whenever `build` makes something else from the same texts, so that no old cache is read.
    """

    texts: Callable[[], list[str]]
    build: Callable[[Sequence[str], Path], None]
    version: int = 1


MODELS = {
    "tiny-indic-bert": BuiltIn(tiny_bert.sample_texts, tiny_bert.build),
    "tiny-indic-llama": BuiltIn(tiny_llama.sample_texts, tiny_llama.build),
}


def resolve(model_name_or_path: str) -> str:
    """The folder of a built-in model, made on the first call; any other name or path as it came.

    A built-in model is never made in memory: parameters that are sharded while a model is constructed (ZeRO-3) start
    from other random numbers than whole ones, so every run loads the same files instead.

    Raises:
        UserError: there is no built-in model of this name, or the cache's folder cannot be written.
    """
    if not model_name_or_path.startswith(PREFIX):
        return model_name_or_path
    name = model_name_or_path.removeprefix(PREFIX)
    if name not in MODELS:
        known = ", ".join(f"{PREFIX}{other}" for other in MODELS)
        raise UserError(f"--model_name_or_path {model_name_or_path}: no such built-in model; there is {known}.")
    texts = MODELS[name].texts()
    folder = cache_folder() / f"{name}-{_fingerprint(texts, MODELS[name].version)}"
    with kept_in(folder.parent, "The built-in model"):
        if not folder.exists():
            _build_atomically(MODELS[name], texts, folder)
    return str(folder)


def name_of(path: str) -> str:
    """The name of the built-in model in a folder, which is the same on every machine; any other path as it is."""
    names = [name for name in MODELS if Path(path).parent == cache_folder() and Path(path).name.startswith(f"{name}-")]
    return f"{PREFIX}{names[0]}" if names else path


def _fingerprint(texts: Sequence[str], version: int) -> str:
    """16 hexadecimal digits that change with anything the files are made from."""
    return hashlib.sha256(json.dumps([version, list(texts)]).encode()).hexdigest()[:16]


def _build_atomically(model: BuiltIn, texts: Sequence[str], folder: Path) -> None:
    """Build beside `folder` and rename: a reader sees all or nothing, also when several processes build at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.build(texts, unfinished)
        with suppress(OSError):  # a file system may refuse modes
            unfinished.chmod(0o755)
        unfinished.rename(folder)
    except OSError:
        # Another process was first, with the same bytes; any other reason leaves no folder and is told.
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)

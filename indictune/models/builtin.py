"""The package's small models: built on the first call, then read from a cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from indictune.cache_folders import cache_folder, kept_in
from indictune.errors import UserError
from indictune.file_locks import locked
from indictune.models import tiny_models

PREFIX = "builtin:"


@dataclass(frozen=True)
class BuiltIn:
    """How a model is made.

    Attributes:
        texts: the tokenizer learns from them.
        build: writes a model made from texts to a folder; the same texts give the same bytes.
        version: raise it when `build` changes, so that no stale cache is read.
    """

    texts: Callable[[], list[str]]
    build: Callable[[Sequence[str], Path], None]
    version: int = 1


MODELS = {
    "tiny-indic-bert": BuiltIn(tiny_models.tweet_texts, tiny_models.build_tiny_bert),
    "tiny-indic-llama": BuiltIn(tiny_models.tweet_and_chat_texts, tiny_models.build_tiny_llama),
}


def resolve(model_name_or_path: str) -> str:
    """The folder of a built-in model, made on the first call. Any other name or path is returned unchanged.

    Every run loads the same files: ZeRO-3 shards parameters during construction, which changes their random numbers.

    Raises:
        UserError: `no-such-name`, or the cache's folder cannot be written.
    """
    if not model_name_or_path.startswith(PREFIX):
        return model_name_or_path
    name = model_name_or_path.removeprefix(PREFIX)
    if name not in MODELS:
        known = ", ".join(f"{PREFIX}{other}" for other in MODELS)
        raise UserError("no-such-name", "--model_name_or_path", model_name_or_path, kind="built-in model", known=known)
    texts = MODELS[name].texts()
    fingerprint = hashlib.sha256(json.dumps([MODELS[name].version, texts]).encode()).hexdigest()[:16]
    folder = cache_folder() / f"{name}-{fingerprint}"
    build_model_once(folder, partial(MODELS[name].build, texts))
    return str(folder)


def build_model_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Fill a folder of the cache, unless it is there. One process fills it; the others wait.

    Raises:
        UserError: `cache-not-written`.
    """
    what = "The built-in model"
    with kept_in(folder.parent, what):
        if folder.exists():
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder, what):
            if not folder.exists():
                _build_atomically(build, folder)


def builtin_name(path: str) -> str:
    """The name of the built-in model in a folder, the same on every machine. Other paths are returned unchanged."""
    names = [name for name in MODELS if Path(path).parent == cache_folder() and Path(path).name.startswith(f"{name}-")]
    return f"{PREFIX}{names[0]}" if names else path


def _build_atomically(build: Callable[[Path], None], folder: Path) -> None:
    """Build in a temporary folder and rename it, so that a reader sees all or nothing. Without locks several may."""
    with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        unfinished = Path(temporary, "model")
        build(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():  # else another process has built the same bytes
                raise

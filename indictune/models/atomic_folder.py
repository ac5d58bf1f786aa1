"""Write a folder with a model whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from indictune.errors import UserError
from indictune.files import check_outside_checkpoints
from indictune.models.trusted_files import is_outside

TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*.jinja", "chat_template.json"),
    # Vocabularies, by the names of the tokenizer classes of transformers 5.23. A test looks for others.
    *("vocab.*", "vocab-*.json", "*_vocab.json", "merges.txt", "bpe.codes", "dict.txt", "*.model", "*.spm"),
    *("prophetnet.tokenizer", "byte_maps.json", "emoji.json", "normalizer.json"),
    *("word_shape.json", "word_pronunciation.json"),
)
# What a model needs to be used. `training_args.bin` is a pickle and is not among it.
MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "*.py"),
    *("adapter_config.json", "base_config.json", "base_model.json"),
    *TOKENIZER_FILES,
)


def check_output_folder(folder: Path, flag: str) -> None:
    """Refuse an output folder that holds files, is inside a checkpoint, or cannot be replaced by a rename.

    Raises:
        UserError: `folder-not-empty`, `folder-cannot-be-replaced`, or as `check_outside_checkpoints`.
    """
    check_outside_checkpoints(folder, flag)
    if not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise UserError("folder-not-empty", flag, folder)
    if os.path.ismount(os.path.realpath(folder)) or folder.samefile("."):
        raise UserError("folder-cannot-be-replaced", flag, folder)


@contextmanager
def whole_folder(folder: Path, flag: str, size_bytes: int, way_out: str | None = None) -> Iterator[Path]:
    """Yield a path for the model, and rename it to `folder` at the end of the block.

    The model is written in a hidden folder next to `folder`, which is removed also after an error. It remains only
    where the process is killed; the next run refuses then, and names it.

    Args:
        folder: for the model, or a link to it. It is absent or empty.
        way_out: if the disk is too small; None takes the one of the catalogue.

    Raises:
        UserError: the folder cannot be made or is in use, the disk is too small, or the block failed to write.
    """
    target = Path(os.path.realpath(folder))
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir(mode=0o700)
    except OSError as error:
        if os.path.lexists(unfinished):
            raise UserError("folder-in-use", flag, folder, unfinished=unfinished) from None
        raise UserError("folder-not-writable", flag, folder, reason=error.strerror) from error
    try:
        free_bytes = shutil.disk_usage(target.parent).free
        if free_bytes < size_bytes:
            sizes = {"needed": f"{size_bytes / 1e9:.1f}", "free": f"{free_bytes / 1e9:.1f}"}
            raise UserError("disk-too-small", flag, folder, way_out, **sizes)
        model = unfinished / "model"
        yield model
        model.rename(target)
    except (OSError, SafetensorError) as error:
        raise UserError("folder-not-written", flag, folder, reason=error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def copy_model_files(source: Path, patterns: Sequence[str], folder: Path) -> None:
    """Copy the files of `source` that match a pattern, except links that lead outside of it."""
    for pattern in patterns:
        for path in source.glob(pattern):
            if path.is_file() and not is_outside(path, source):
                shutil.copyfile(path, folder / path.name)


def match_config_mode(model: Path) -> None:
    """Give weights the file mode of the configuration: safetensors (0.8) writes them for their owner only."""
    mode = min(model.glob("*config.json")).stat().st_mode
    for path in model.glob("*.safetensors"):
        if path.stat().st_mode != mode:
            with suppress(OSError):  # CIFS and exFAT refuse modes
                path.chmod(mode)

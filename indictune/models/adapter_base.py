"""Which base an adapter belongs to: noted beside the adapter, compared and found again when it is used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError
from indictune.models import builtin
from indictune.models.load_errors import explained, explanation

RECORD = "base_model.json"
CONFIG = "base_config.json"
END_BYTES = 1 << 20

# What merging needs of a base on the Hub: a repository often holds the same weights in other formats too.
FILES = (
    *("model.safetensors", "model-*.safetensors", "*.json", "*.jinja", "*.py"),
    *("tokenizer*", "vocab*", "merges.txt", "*.model"),
)


@dataclass(frozen=True)
class Base:
    """The base of an adapter.

    Attributes:
        name: on the Hub, a folder, or a model of the package.
        revision: branch, tag or commit that was asked for.
        commit_hash: the commit that `revision` was on the Hub in training; None where it is not known.
        fingerprint: of a folder's weights in training; None for a model of the Hub, or where it is not known.
    """

    name: str
    revision: str
    commit_hash: str | None = None
    fingerprint: str | None = None


def config_file(folder: str | Path) -> Path:
    """Where the configuration of a run's model stands: of an adapter on a language model in a file of its own.

    transformers opens an adapter's folder as a model with its base, unless there is a `config.json` in it. A
    classifier's needs one all the same, for the names of its labels.
    """
    own = Path(folder) / CONFIG
    return own if own.is_file() else Path(folder) / "config.json"


def continues_texts(architectures: Sequence[str] | None) -> bool:
    """Whether a configuration's `architectures` name a causal language model of transformers, or one with code of its
    own that is called as most of those are; else it is a classifier's, or nothing's."""
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())  # Gemma 3 is among them, called as if it were another kind
    return any(name in known or name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures or [])


def record_base(
    folder: str | Path, model_name_or_path: str, revision: str = "main", commit_hash: str | None = None
) -> None:
    """Write `base_model.json` into an adapter's folder: the base that it was trained on."""
    local = Path(builtin.resolve(model_name_or_path))
    base = Base(model_name_or_path, revision, commit_hash, fingerprint(local) if local.is_dir() else None)
    (Path(folder) / RECORD).write_text(json.dumps(asdict(base), indent=2) + "\n", encoding="utf-8")


def base_of(adapter_folder: str | Path) -> Base:
    """The base that an adapter was trained on; by `adapter_config.json` alone where other tools made it.

    Raises:
        UserError: the file that names its base cannot be read.
    """
    record = Path(adapter_folder) / RECORD
    own = Path(adapter_folder) / "adapter_config.json"
    path = record if record.is_file() else own
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        if path == own:
            noted = {"name": noted.get("base_model_name_or_path") or "", "revision": noted.get("revision") or "main"}
        base = Base(**noted)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: does not tell the adapter's base ({error!r}).") from error
    if not isinstance(base.name, str) or "\0" in base.name or not isinstance(base.revision, str):
        raise UserError(f"{path}: names no base of an adapter: {base.name!r}, revision {base.revision!r}.")
    return base


def check_base(adapter_folder: str | Path, base_name_or_path: str, revision: str | None = None) -> None:
    """Refuse to use an adapter with other weights than it was trained on.

    Args:
        adapter_folder: of the adapter.
        base_name_or_path: the base that it is to be used with; a folder may have moved since training.
        revision: of the base, as the user asked for it; None where nothing was asked.

    Raises:
        UserError: another revision was asked for, or the folder's weights are not those of the training.
    """
    base = base_of(adapter_folder)
    if revision not in (None, base.revision, base.commit_hash):
        raise UserError(
            f"--base_revision {revision}: {adapter_folder} was trained on revision {base.revision} of {base.name}. "
            f"Give --base_revision {base.revision}, or leave it out."
        )
    found = other_fingerprint(base, base_name_or_path)
    if found is not None:
        raise UserError(
            f"{adapter_folder} was trained on {base.name} when its files had the fingerprint "
            f"{str(base.fingerprint)[:16]}; those of {base_name_or_path} have {found[:16]}. Give --base_model the "
            "folder with the weights of the training, or train the adapter again."
        )


def other_fingerprint(base: Base, name_or_path: str) -> str | None:
    """The fingerprint of a folder's weights where they are not those of the training; None where none can tell."""
    local = Path(builtin.resolve(name_or_path))
    if base.fingerprint is None or not (local / "config.json").is_file():  # if it should be there, reading tells
        return None
    found = fingerprint(local)
    return None if found == base.fingerprint else found


def find_base(name: str, revision: str, flag: str, trust_remote_code: bool = False) -> Path:
    """The folder with a base's files, brought from the Hub where it is no folder.

    Args:
        name: on the Hub, a folder, or a model of the package.
        revision: branch, tag or commit on the Hub.
        flag: what a message puts in front of the name.
        trust_remote_code: whether the user allows the model's own code, for the messages.

    Raises:
        UserError: there is no such model, or no way to it.
    """
    args = ModelArguments(model_name_or_path=name, model_revision=revision, trust_remote_code=trust_remote_code)
    folder = Path(builtin.resolve(name))
    if not folder.is_dir():
        with explained(args, OSError, ValueError, flag=flag):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
    if not (folder / "config.json").is_file():
        raise UserError(explanation(args, FileNotFoundError("config.json"), flag))
    return folder


def fingerprint(folder: Path) -> str:
    """SHA-256 over `config.json` and each weights file's name, size, first and last MiB.

    Other weights differ everywhere, so the ends tell them apart without reading a hundred gigabytes.
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

"""Record which base an adapter was trained on, and find and compare that base later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from indictune.errors import UserError
from indictune.models import builtin
from indictune.models.trusted_files import ADAPTER_CONFIG

RECORD = "base_model.json"
CONFIG = "base_config.json"
END_BYTES = 1 << 20


@dataclass(frozen=True)
class Base:
    """The base of an adapter.

    Attributes:
        name: on the Hub, a folder, or a model of the package.
        revision: branch, tag or commit, as the user named it.
        commit_hash: the commit of `revision` during the training; None if unknown.
        fingerprint: of a folder's weights during the training; None for a model of the Hub, or if unknown.
    """

    name: str
    revision: str
    commit_hash: str | None = None
    fingerprint: str | None = None


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
    return any(name in known or name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures or [])


def record_base(
    folder: str | Path, model_name_or_path: str, revision: str = "main", commit_hash: str | None = None
) -> None:
    """Write `base_model.json`, the record of an adapter's base, into the adapter's folder."""
    local = Path(builtin.resolve(model_name_or_path))
    base = Base(model_name_or_path, revision, commit_hash, fingerprint(local) if local.is_dir() else None)
    (Path(folder) / RECORD).write_text(json.dumps(asdict(base), indent=2) + "\n", encoding="utf-8")


def base_of(adapter_folder: str | Path) -> Base:
    """The base of an adapter, from its record, or from `adapter_config.json` if another tool made the adapter.

    Raises:
        UserError: `base-record-unreadable`.
    """
    record = Path(adapter_folder) / RECORD
    path = record if record.is_file() else Path(adapter_folder) / ADAPTER_CONFIG
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        if path != record:
            noted = {"name": noted.get("base_model_name_or_path") or "", "revision": noted.get("revision") or "main"}
        base = Base(**noted)
        if not isinstance(base.name, str) or "\0" in base.name or not isinstance(base.revision, str):
            raise ValueError(f"base {base.name!r}, revision {base.revision!r}")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError("base-record-unreadable", str(path), reason=repr(error)) from error
    return base


def check_base(adapter_folder: str | Path, base_name_or_path: str, revision: str | None = None) -> None:
    """Refuse to use an adapter with other weights than it was trained on.

    Args:
        adapter_folder: of the adapter.
        base_name_or_path: the base to use; a folder may have moved since the training.
        revision: of the base, as the user named it, or None.

    Raises:
        UserError: `base-revision-differs` or `base-weights-differ`.
    """
    base, adapter = base_of(adapter_folder), adapter_folder
    if revision not in (None, base.revision, base.commit_hash):
        given = "--base_revision", revision
        raise UserError("base-revision-differs", *given, adapter=adapter, trained_on=base.revision, base=base.name)
    found = other_fingerprint(base, base_name_or_path)
    if found is not None:
        trained_on, given = str(base.fingerprint)[:16], ("--base_model", base_name_or_path)
        raise UserError("base-weights-differ", *given, adapter=adapter, trained_on=trained_on, found=found[:16])


def other_fingerprint(base: Base, name_or_path: str) -> str | None:
    """The fingerprint of a base's weights if it differs from the training's; None if it is equal or unknown."""
    local = Path(builtin.resolve(name_or_path))
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

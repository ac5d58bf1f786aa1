"""An adapter is used with the base that it was trained on, and with no other."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from transformers import BertModel, GPT2LMHeadModel, LlamaForCausalLM, LlamaForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from indictune.models import builtin
from indictune.models.adapters import END_BYTES, Base, base_of, check_base, continues_texts, fingerprint, record_base
from tests.refusals import refused

MIB = 1 << 20


def base(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def adapter(folder: Path, name: Path | str, revision: str | None = None) -> Path:
    """An adapter of another tool: it names its base, and has no record."""
    folder.mkdir()
    config = {"base_model_name_or_path": str(name), "revision": revision}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_is_recorded_by_its_files_and_a_hub_model_by_its_commit(tmp_path: Path) -> None:
    local = base(tmp_path / "base")
    record_base(tmp_path, str(local), "main", None)
    digest = hashlib.sha256(b"{}" + b"\nmodel.safetensors 7\n" + b"weights" + b"weights").hexdigest()
    written = json.loads((tmp_path / "base_model.json").read_text())
    assert written == {"name": str(local), "revision": "main", "commit_hash": None, "fingerprint": digest}
    assert base_of(tmp_path) == Base(str(local), "main", None, digest)
    record_base(tmp_path, "org/model", "v2", "c0ffee")
    assert base_of(tmp_path) == Base("org/model", "v2", "c0ffee", None)


def test_the_record_is_believed_before_the_adapters_configuration(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", "/cache/somewhere", "v1")
    assert base_of(folder) == Base("/cache/somewhere", "v1")
    record_base(folder, "org/model", "v2", "c0ffee")
    assert base_of(folder).name == "org/model"


def test_a_builtin_model_is_recorded_by_its_name_and_files(tmp_path: Path) -> None:
    record_base(tmp_path, "builtin:tiny-indic-bert")
    recorded = base_of(tmp_path)
    assert recorded.name == "builtin:tiny-indic-bert"
    assert recorded.fingerprint == fingerprint(Path(builtin.resolve(recorded.name)))
    check_base(tmp_path, recorded.name)


def test_the_ends_the_size_and_the_names_of_weights_count() -> None:
    assert END_BYTES == MIB


@pytest.mark.parametrize("where", [0, MIB - 1, 2 * MIB, 3 * MIB - 1])
def test_a_changed_end_is_another_fingerprint(tmp_path: Path, where: int) -> None:
    weights = bytearray(3 * MIB)
    before = fingerprint(base(tmp_path / "one", bytes(weights)))
    weights[where] = 1
    assert fingerprint(base(tmp_path / "other", bytes(weights))) != before


def test_what_else_changes_the_fingerprint_and_what_does_not(tmp_path: Path) -> None:
    folder = base(tmp_path / "base", bytes(3 * MIB))
    found = {fingerprint(folder)}
    (folder / "model.safetensors").write_bytes(bytes(3 * MIB + 1))
    found.add(fingerprint(folder))
    (folder / "config.json").write_text("{ }")
    found.add(fingerprint(folder))
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    found.add(fingerprint(folder))
    (folder / "pytorch_model.bin").write_bytes(b"")
    found.add(fingerprint(folder))
    assert len(found) == 5
    (folder / "README.md").write_text("words")
    (folder / "training_args.bin").write_bytes(b"")
    assert fingerprint(folder) in found


def test_a_moved_base_is_the_same_and_a_changed_one_is_not(tmp_path: Path) -> None:
    local = base(tmp_path / "base")
    folder = adapter(tmp_path / "adapter", local)
    record_base(folder, str(local))
    check_base(folder, str(local))
    moved = local.rename(tmp_path / "moved")
    check_base(folder, str(moved))
    check_base(folder, str(local))  # reading it will tell
    trained_on = fingerprint(moved)
    (moved / "model.safetensors").write_bytes(b"retrained")
    with refused("base-weights-differ", trained_on[:16], fingerprint(moved)[:16], flag="--base_model"):
        check_base(folder, str(moved))


@pytest.mark.parametrize(("recorded", "trained_on"), [(True, "v2"), (False, "v2"), (False, "main")])
def test_another_revision_is_refused(tmp_path: Path, recorded: bool, trained_on: str) -> None:
    folder = adapter(tmp_path / "adapter", "org/model", None if trained_on == "main" else trained_on)
    if recorded:
        record_base(folder, "org/model", trained_on, "c0ffee")
        check_base(folder, "org/model", "c0ffee")
    check_base(folder, "org/model")
    check_base(folder, "org/model", trained_on)
    with refused("base-revision-differs", f"revision {trained_on} of org/model", flag="--base_revision"):
        check_base(folder, "org/model", "v3")


def test_an_adapter_of_another_tool_goes_with_any_folder(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", "org/model")
    check_base(folder, str(base(tmp_path / "base")))


@pytest.mark.parametrize(
    ("kind", "is_one"),
    [(LlamaForCausalLM, True), (GPT2LMHeadModel, True), (LlamaForSequenceClassification, False), (BertModel, False)],
)
def test_a_causal_language_model_is_known_by_the_name_of_its_class(kind: type, is_one: bool) -> None:
    assert continues_texts([kind.__name__]) == is_one
    assert not continues_texts(None)


def test_whatever_transformers_makes_to_continue_texts_is_known_as_such() -> None:
    assert [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if not continues_texts([name])] == []
    assert [name for name in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values() if continues_texts([name])] == []
    assert continues_texts(["GPTLMHeadModel"])  # with code of its own

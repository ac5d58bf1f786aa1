"""When a run has an active vocabulary, and what it says of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, Trainer

from indictune.config.arguments import SentimentTrainingArguments
from indictune.distributed.vocabulary_choice import use_active_vocabulary
from indictune.models.active_vocabulary import (
    ELEMENTWISE,
    UNUSED,
    ActiveEmbedding,
    active_embedding,
    save_row_ids,
    unused_digest,
)
from tests.models.tiny import CONFIGS, words_tokenizer
from tests.refusals import refused

SPECIAL = [0, 1, 2]


def arguments(folder: Path, **settings: Any) -> SentimentTrainingArguments:
    given = {"use_cpu": True, "bf16": False, "optim": "adamw_torch", **settings}
    return SentimentTrainingArguments(output_dir=str(folder), **given)


def classifier() -> Any:
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(CONFIGS["bert"]())  # type: ignore[no-untyped-call]


def rows(*ids: int) -> Dataset:
    return Dataset.from_dict({"input_ids": [list(ids)]})


def used(args: SentimentTrainingArguments, *ids: int, model: Any = None, checkpoint: Path | None = None) -> int | None:
    """How many rows are trained; None where all are."""
    model = classifier() if model is None else model
    use_active_vocabulary(model, args, (rows(*ids), None), words_tokenizer(), checkpoint)
    active = active_embedding(model)
    return None if active is None else len(active[1].row_ids)


@pytest.mark.parametrize(
    ("choice", "used_rows", "expected"),
    [("auto", 115, 115), ("auto", 116, None), ("on", 116, 116), ("on", 128, 128), ("off", 10, None)],
)
def test_auto_is_on_where_a_tenth_of_the_rows_is_unused(
    tmp_path: Path, choice: str, used_rows: int, expected: int | None
) -> None:
    args = arguments(tmp_path, active_vocabulary=choice)
    assert used(args, *range(used_rows)) == expected


def test_an_optimizer_that_looks_at_whole_weights_trains_the_whole_embedding(tmp_path: Path) -> None:
    assert used(arguments(tmp_path, optim="adafactor"), 9) is None
    with refused("active-vocabulary-impossible", "--optim adafactor", flag="--active_vocabulary"):
        used(arguments(tmp_path, optim="adafactor", active_vocabulary="on"), 9)


@pytest.mark.parametrize("optim", ELEMENTWISE)
def test_rows_without_gradient_do_not_matter_to_the_optimizers_that_are_listed(tmp_path: Path, optim: str) -> None:
    """Gradients differ by much between steps, so that a clip by the mean of a whole weight would show."""
    args = arguments(tmp_path, optim=optim, learning_rate=0.01)
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    settings["weight_decay"] = 0.0
    whole = torch.nn.Parameter(torch.randn(40, 8, generator=torch.Generator().manual_seed(0)))
    few = torch.nn.Parameter(whole.detach()[:4].clone())
    optimizers = [kind([whole], **settings), kind([few], **settings)]
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        few.grad = torch.randn(4, 8, generator=generator) * (4 if step % 5 == 0 else 1)
        whole.grad = torch.cat([few.grad, torch.zeros(36, 8)])
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(whole.detach()[:4], few.detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(whole.detach()[4:], torch.randn(40, 8, generator=torch.Generator().manual_seed(0))[4:])


@pytest.mark.parametrize("choice", ["auto", "off"])
def test_a_frozen_embedding_stays_whole(tmp_path: Path, choice: str) -> None:
    model = classifier()
    model.get_input_embeddings().weight.requires_grad_(False)
    assert used(arguments(tmp_path, active_vocabulary=choice), 9, model=model) is None


def test_on_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = classifier()
    model.get_input_embeddings().weight.requires_grad_(False)
    with refused("active-vocabulary-impossible", "on", "the embedding is not trained", flag="--active_vocabulary"):
        used(arguments(tmp_path, active_vocabulary="on"), 9, model=model)


def test_a_checkpoint_of_other_rows_is_refused_before_anything_changes(tmp_path: Path) -> None:
    before = classifier()
    use_active_vocabulary(before, arguments(tmp_path), (rows(9, 10),), words_tokenizer(), None)
    save_row_ids(before, tmp_path)
    assert used(arguments(tmp_path), 9, 10, checkpoint=tmp_path) == 5
    assert used(arguments(tmp_path), 10, checkpoint=tmp_path) == 5  # a row that no text uses any more
    model = classifier()
    with refused("checkpoint-lacks-rows", "trains 5 rows", "1 tokens"):
        used(arguments(tmp_path), 11, model=model, checkpoint=tmp_path)
    assert not isinstance(model.get_input_embeddings(), ActiveEmbedding)


def test_a_checkpoint_that_began_with_another_model_is_refused_by_the_rows_that_it_does_not_hold(
    tmp_path: Path,
) -> None:
    before = classifier()
    used(arguments(tmp_path), 9, 10, model=before)
    save_row_ids(before, tmp_path)

    def goes_on(change: Callable[[torch.Tensor], object]) -> int | None:
        model = classifier()
        change(model.get_input_embeddings().weight.data)
        return used(arguments(tmp_path), 9, 10, model=model, checkpoint=tmp_path)

    assert goes_on(lambda whole: whole[9].zero_()) == 5  # the checkpoint has this row
    assert goes_on(lambda whole: whole.copy_(whole.bfloat16())) == 5  # as ZeRO-3 reads it
    with refused("checkpoint-of-other-weights", str(tmp_path), flag="--resume_from_checkpoint"):
        goes_on(lambda whole: whole[127, 63].mul_(-1))
    (tmp_path / UNUSED).unlink()  # of an earlier version
    assert goes_on(lambda whole: whole[127].zero_()) == 5


def test_what_is_read_in_fp16_is_compared_with_nothing() -> None:
    start, row_ids = torch.randn(40, 8), torch.tensor([0, 3])
    assert unused_digest(start.bfloat16(), row_ids) == unused_digest(start, row_ids)
    assert unused_digest(start.half(), row_ids) is None


def test_processes_that_save_keep_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for saves in (True, False):
        monkeypatch.setattr(SentimentTrainingArguments, "should_save", saves)
        model = classifier()
        whole = model.get_input_embeddings().weight.detach().clone()
        used(arguments(tmp_path), 9, model=model)
        start = model.get_input_embeddings().start
        assert torch.equal(start, whole) if saves else start is None


def test_the_log_says_how_many_rows_are_trained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="indictune"):
        used(arguments(tmp_path), 9)
    assert caplog.messages == ["active vocabulary: 4 of 128 embedding rows are trained"]

"""When a run has an active vocabulary, and what it says of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DeepSpeedPlugin
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, Trainer

from indictune.config.arguments import SentimentTrainingArguments
from indictune.config.plan import Launch
from indictune.distributed import vocabulary_choice
from indictune.distributed.vocabulary_choice import check_active_vocabulary, saved_bytes, use_active_vocabulary
from indictune.errors import UserError
from indictune.models.active_vocabulary import (
    ELEMENTWISE,
    UNUSED,
    ActiveEmbedding,
    active_embedding,
    save_row_ids,
    unused_digest,
)
from tests.models.tiny import CONFIGS, words_tokenizer

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
    with pytest.raises(UserError, match="--active_vocabulary on: --optim adafactor"):
        used(arguments(tmp_path, optim="adafactor", active_vocabulary="on"), 9)


@pytest.mark.parametrize(
    ("optimizer", "suits"),
    [("Adam", True), ("AdamW", True), ("SGD", True), ("Adagrad", True), ("Lamb", False), ("OneBitAdam", False)],
)
def test_an_optimizer_of_the_deepspeed_file_counts_instead_of_the_flag(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, optimizer: str, suits: bool
) -> None:
    file = {"optimizer": {"type": optimizer}, "zero_optimization": {"stage": 2}, "train_batch_size": "auto"}
    args = arguments(tmp_path, optim="adafactor" if suits else "adamw_torch")
    args.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=file)
    with caplog.at_level(logging.INFO, logger="indictune"):
        assert used(args, 9) == (4 if suits else None)
    reason = f"optimizer.type = {optimizer} of the DeepSpeed file is not known to change each weight by its own"
    assert (f"active vocabulary: not used: {reason}" in caplog.text) is not suits
    asked = "on", "full", "adamw_torch", Launch("zero2", deepspeed=file)
    if suits:
        check_active_vocabulary(*asked)
        return
    args.active_vocabulary = "on"
    with pytest.raises(UserError, match=f"--active_vocabulary on: {reason}"):
        used(args, 9)
    with pytest.raises(UserError, match=f"--active_vocabulary on: {reason}"):
        check_active_vocabulary(*asked)


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
    with pytest.raises(UserError) as raised:
        used(arguments(tmp_path, active_vocabulary="on"), 9, model=model)
    assert raised.value.message == (
        "--active_vocabulary on: the embedding is not trained (--method full trains it). Leave it out, or type "
        "--active_vocabulary off."
    )


def test_a_checkpoint_of_other_rows_is_refused_before_anything_changes(tmp_path: Path) -> None:
    before = classifier()
    use_active_vocabulary(before, arguments(tmp_path), (rows(9, 10),), words_tokenizer(), None)
    save_row_ids(before, tmp_path)
    assert used(arguments(tmp_path), 9, 10, checkpoint=tmp_path) == 5
    assert used(arguments(tmp_path), 10, checkpoint=tmp_path) == 5  # a row that no text uses any more
    model = classifier()
    with pytest.raises(UserError, match=r"trains 5 rows .* 1 tokens .*\[checkpoint-lacks-rows\]"):
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
    with pytest.raises(UserError) as raised:
        goes_on(lambda whole: whole[127, 63].mul_(-1))
    assert raised.value.message.startswith(
        f"--resume_from_checkpoint {tmp_path}: it began with other weights than --model_name_or_path "
    )
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


# 124 rows of 64 are left out: 7,936 numbers. All 128 are kept beside.
KEPT = "; 0.03 MB more memory of the CPU where models are saved"


@pytest.mark.parametrize(
    ("settings", "less", "more"),
    [
        ({}, "0.13 MB less for weights, gradient and AdamW's states on each process", ""),
        ({"optim": "sgd"}, "0.06 MB less for weights and gradient on each process", ""),
        (
            {"weight_decay": 0.01},
            "0.13 MB less for weights, gradient and AdamW's states on each process",
            ". Rows that no text uses keep their start, where --weight_decay 0.01 would shrink them",
        ),
    ],
)
def test_the_log_tells_what_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], less: str, more: str
) -> None:
    with caplog.at_level(logging.INFO, logger="indictune"):
        used(arguments(tmp_path, **settings), 9)
    assert caplog.messages == [f"active vocabulary: 4 of 128 rows of 64: {less}{KEPT}{more}"]


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_the_memory_that_is_told_is_that_of_the_tensors(tmp_path: Path, optim: str) -> None:
    args = arguments(tmp_path, optim=optim)
    sizes = []
    for ids in (None, [9]):
        model = classifier()
        if ids is not None:
            used(args, *ids, model=model)
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
        optimizer = kind(model.parameters(), **settings)
        model(input_ids=torch.tensor([[9, 2]]), labels=torch.tensor([0])).loss.backward()
        optimizer.step()
        states = [each for state in optimizer.state.values() for each in state.values()]
        tensors = [each for weight in model.parameters() for each in (weight, weight.grad)] + states
        sizes.append(sum(each.nbytes for each in tensors if each is not None))
    assert sizes[0] - sizes[1] == saved_bytes(124 * 64, args)[0]
    kept = active_embedding(model)
    assert kept is not None
    assert kept[1].start is not None
    assert kept[1].start.nbytes == 128 * 64 * 4  # 0.03 MB


@pytest.mark.parametrize(
    ("family", "settings", "memory", "sent", "sent_over_gloo"),
    [
        ("ddp", {}, 16, 4, 4),
        ("ddp", {"bf16": True}, 16, 4, 4),
        ("ddp", {"reduce_dtype": "bfloat16"}, 16, 2, 2),
        ("fsdp2", {}, 8, 6, 8),
        ("fsdp2", {"bf16": True}, 8, 4, 6),
        ("fsdp2", {"gradient_accumulation_steps": 3}, 8, 14, 16),
        ("zero1", {}, 12, 6, 6),
        ("zero2", {}, 10, 6, 6),
        ("zero3", {}, 8, 4, 6),
        ("zero3", {"bf16": True}, 8, 3, 5),
        ("zero2", {"bf16": True}, 9, 5, 5),
        ("zero2", {"gradient_accumulation_steps": 2}, 10, 10, 10),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_two_processes_save_of_each_number(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    settings: dict[str, Any],
    memory: int,
    sent: int,
    sent_over_gloo: int,
    device: str,
) -> None:
    args = arguments(tmp_path, **settings)
    monkeypatch.setattr(vocabulary_choice, "came_up", lambda args: family)
    monkeypatch.setattr(SentimentTrainingArguments, "world_size", 2)
    monkeypatch.setattr(SentimentTrainingArguments, "device", torch.device(device))
    sent = sent if device == "cuda" else sent_over_gloo
    assert saved_bytes(1000, args) == (1000 * memory, 1000 * sent)

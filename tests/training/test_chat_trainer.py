"""The trainer of language models: packs and micro-batches change nothing, and the logits are never whole in memory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3nForConditionalGeneration,
    Gemma4ForConditionalGeneration,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from indictune.data.collation import IndexedRows, JoinRows, PadToLongest
from indictune.models.attention import ATTENTION
from indictune.tasks.chat import compute_dtype
from indictune.training.chat_trainer import LlamaTrainer
from tests.data.packs import pack
from tests.models.tiny import words_tokenizer
from tests.training.tiny import VOCABULARY, answer_rows, tiny_llama, tiny_trainer, trained_weights

ROWS = answer_rows(9, 5, 12, 7, 3)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("base"))


def one_step(trainer: LlamaTrainer) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the run, and how far its weights moved: the gradients, times the learning rate."""
    before = trained_weights(trainer)
    loss = trainer.train().training_loss
    after = trained_weights(trainer)
    return loss, {name: after[name] - before[name] for name in before}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, moved in one.items():
        torch.testing.assert_close(other[name], moved, rtol=1e-4, atol=tolerance, msg=name)


@pytest.mark.more
def test_micro_batches_without_a_row_are_in_no_mean_of_the_log(base: str, tmp_path: Path) -> None:
    """Of the second step's two micro-batches one is empty: TRL takes its accuracy and entropy for 0."""
    logged = []
    for size in (2, 1):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 2 // size, "max_steps": 2}
        trainer = tiny_trainer(base, tmp_path, ROWS.select(range(3)), global_batch_size=2, **settings)
        trainer.train()
        logged.append([entry["entropy"] for entry in trainer.state.log_history if "entropy" in entry])
    assert logged[0][1] == pytest.approx(logged[1][1], rel=1e-4)
    assert len(logged[0]) == 2
    trainer._metrics["train"].clear()
    no_answer = {name: torch.full((1, 4), value) for name, value in (("input_ids", 5), ("labels", -100))}
    no_answer["attention_mask"] = torch.ones(1, 4, dtype=torch.long)
    trainer.compute_loss(trainer.model, no_answer, num_items_in_batch=torch.tensor(1))
    trainer.log({"loss": 0.0})
    assert "entropy" not in trainer.state.log_history[-1]


@pytest.mark.more
def test_a_mixture_of_experts_is_trained_alike_in_one_micro_batch_and_in_five(tmp_path: Path) -> None:
    """TRL adds what balances the experts: means of each micro-batch."""
    torch.manual_seed(1)
    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    config = MixtralConfig(vocab_size=VOCABULARY, initializer_range=0.3, **shape, **heads, **experts)
    base = tmp_path / "base"
    MixtralForCausalLM(config).save_pretrained(base)
    words_tokenizer(None).save_pretrained(base)
    moved = []
    for size in (5, 1):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 5 // size}
        trainer = tiny_trainer(str(base), tmp_path / str(size), ROWS, **settings)
        moved.append(one_step(trainer))
    assert moved[0][0] == pytest.approx(moved[1][0], abs=1e-6)
    assert_same(moved[0][1], moved[1][1])
    trainer.save_model(str(tmp_path / "saved"))
    read = [json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in (base, tmp_path / "saved")]
    assert [(each["router_aux_loss_coef"], each["output_router_logits"]) for each in read] == [(0.5, False)] * 2


@torch.no_grad()
def mean_loss(model: Any, rows: Dataset) -> float:
    """torch's cross-entropy over the labels of each row alone, on the model's plain logits."""
    losses = [
        functional.cross_entropy(
            model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1],
            torch.tensor(row["labels"][1:]),
            reduction="none",
        )
        for row in rows
    ]
    counted = sum(label != -100 for row in rows for label in row["labels"])
    return float(torch.cat(losses).sum() / counted)


class TestPacks:
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_a_document_reads_nothing_of_its_neighbours(self, base: str, attention: str) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(base, attn_implementation=attention)
        packs = pack(ROWS, 16)
        assert packs["seq_lengths"][:] == [[12, 3], [9, 7], [5]]
        inputs = JoinRows()([IndexedRows(packs)[index] for index in range(len(packs))])
        del inputs["labels"]
        with torch.no_grad():
            alone = torch.cat(
                [
                    model(input_ids=torch.tensor([ROWS[row]["input_ids"]]), use_cache=False).logits
                    for rows in packs["rows"]
                    for row in rows
                ],
                1,
            )
            together = model(**inputs, use_cache=False).logits
            # With a mask, even one of ones, transformers no longer reads where documents begin.
            leaking = model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]), use_cache=False).logits
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
        torch.testing.assert_close(leaking[:, :12], alone[:, :12], rtol=0, atol=1e-5)
        assert (leaking[:, 12:] - alone[:, 12:]).abs().max() > 0.1

    @pytest.mark.parametrize(
        ("method", "gradient_checkpointing"),
        [
            ("lora", True),
            pytest.param("full", False, marks=pytest.mark.more),
            pytest.param("full", True, marks=pytest.mark.more),
            pytest.param("lora", False, marks=pytest.mark.more),
        ],
    )
    def test_a_step_on_packs_is_the_step_on_their_rows(
        self, base: str, tmp_path: Path, method: str, gradient_checkpointing: bool
    ) -> None:
        settings = {"method": method, "gradient_checkpointing": gradient_checkpointing}
        padded = tiny_trainer(base, tmp_path, ROWS, **settings)
        start = mean_loss(padded.model, ROWS)
        loss, moved = one_step(padded)
        packed_loss, packed_moved = one_step(tiny_trainer(base, tmp_path, pack(ROWS, 16), **settings))
        assert loss == pytest.approx(start, abs=1e-5)
        assert packed_loss == pytest.approx(start, abs=1e-5)
        assert max(float(each.abs().max()) for each in moved.values()) > 1e-3
        assert_same(moved, packed_moved)

    @pytest.mark.parametrize("attention", [None, pytest.param("eager", marks=pytest.mark.more)])
    def test_a_step_on_joined_rows_is_the_step_on_padded_ones(
        self, base: str, tmp_path: Path, attention: str | None
    ) -> None:
        rows = {"train": pack(ROWS, 16), "padded": False} if attention else {"train": ROWS, "padded": False}
        trainer = tiny_trainer(base, tmp_path, **rows, attn_implementation=attention)
        model: Any = trainer.model
        assert model.config._attn_implementation == (attention or ATTENTION)
        loss, moved = one_step(tiny_trainer(base, tmp_path, ROWS))
        joined_loss, joined_moved = one_step(trainer)
        assert joined_loss == pytest.approx(loss, abs=1e-5)
        assert_same(moved, joined_moved)

    def test_evaluation_of_a_packed_run_is_not_packed(self, base: str, tmp_path: Path) -> None:
        trainer = tiny_trainer(base, tmp_path, pack(ROWS, 16), ROWS)
        assert isinstance(trainer.objective.collator(evaluating=False), JoinRows)
        assert isinstance(trainer.objective.collator(evaluating=True), PadToLongest)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(mean_loss(trainer.model, ROWS), abs=1e-5)


class TestMicroBatches:
    @pytest.mark.parametrize("steps", [pytest.param(2, marks=pytest.mark.more), 5])
    def test_a_step_does_not_depend_on_how_its_rows_are_cut(self, base: str, tmp_path: Path, steps: int) -> None:
        whole = one_step(tiny_trainer(base, tmp_path, ROWS))
        size = math.ceil(len(ROWS) / steps)
        cut = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        in_pieces = one_step(tiny_trainer(base, tmp_path, ROWS, **cut, global_batch_size=size * steps))
        assert in_pieces[0] == pytest.approx(whole[0], abs=1e-5)
        assert_same(whole[1], in_pieces[1])

    @pytest.mark.more
    @pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.more)])
    def test_nor_where_the_model_takes_no_count_of_tokens(
        self, base: str, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As Gemma 3n and Gemma 4 say, and code of its own whose forward has no **kwargs."""
        monkeypatch.setattr(LlamaForCausalLM, "accepts_loss_kwargs", False, raising=False)
        whole = one_step(tiny_trainer(base, tmp_path, ROWS, method=method))
        cut = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 5}
        in_pieces = one_step(tiny_trainer(base, tmp_path, ROWS, method=method, **cut))
        assert in_pieces[0] == pytest.approx(whole[0], abs=1e-5)
        assert_same(whole[1], in_pieces[1])

    def test_trl_still_leaves_such_a_model_without_the_count(
        self, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Once this fails, `LlamaTrainer` need not set `model_accepts_loss_kwargs` (transformers 5.23, TRL 1.16)."""
        assert not Gemma3nForConditionalGeneration.accepts_loss_kwargs
        assert not Gemma4ForConditionalGeneration.accepts_loss_kwargs
        monkeypatch.setattr(LlamaForCausalLM, "accepts_loss_kwargs", False, raising=False)
        args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[])
        rows = ROWS.select_columns(["input_ids", "labels"])
        trainer = SFTTrainer(base, args, train_dataset=rows, processing_class=words_tokenizer())
        batch = next(iter(trainer.get_train_dataloader()))
        assert trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))[1] is None

    def test_a_loss_without_the_count_is_none(self, base: str, tmp_path: Path) -> None:
        trainer = tiny_trainer(base, tmp_path, ROWS)
        batch = next(iter(trainer.get_train_dataloader()))
        with pytest.raises(ValueError, match="did not count the tokens of the global batch"):
            trainer.compute_loss(trainer.model, batch)

    @pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.more), True])
    def test_a_micro_batch_without_rows_changes_nothing(self, base: str, tmp_path: Path, packed: bool) -> None:
        """Two rows for four micro-batches: two of them hold the row that stands for nothing."""
        rows = answer_rows(9, 8)
        rows = pack(rows, 9) if packed else rows
        whole = one_step(tiny_trainer(base, tmp_path, rows))
        settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "global_batch_size": 4}
        in_pieces = one_step(tiny_trainer(base, tmp_path, rows, **settings))
        assert in_pieces[0] == pytest.approx(whole[0], abs=1e-5)
        assert_same(whole[1], in_pieces[1])


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the most numbers that one tensor had which an operation gave back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, list | tuple) else [result]
        self.numel = max([self.numel, *(each.numel() for each in outputs if isinstance(each, torch.Tensor))])
        return result


TOKENS, WIDE = 200, 50_000
PIECE = 32_768  # tokens of the vocabulary that TRL computes at once (`_CHUNKED_LOGPROB_CHUNK_SIZE`)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("wide"), WIDE)


class TestMemory:
    @pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.more)])
    def test_training_never_holds_all_logits(self, wide: str, tmp_path: Path, method: str) -> None:
        rows = answer_rows(TOKENS, vocab_size=WIDE)
        trainer = tiny_trainer(wide, tmp_path, rows, method=method)
        with LargestTensor() as largest:
            trainer.train()
        assert WIDE * 16 <= largest.numel <= TOKENS * PIECE  # of the embedding at least; all logits are 10,000,000

    def test_neither_does_evaluation(self, wide: str, tmp_path: Path) -> None:
        rows = answer_rows(TOKENS, vocab_size=WIDE)
        trainer = tiny_trainer(wide, tmp_path, rows, rows)
        with LargestTensor() as largest:
            trainer.evaluate()
        assert largest.numel <= TOKENS * PIECE

    def test_a_plain_forward_pass_would(self, wide: str) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(wide)
        ids = torch.tensor(answer_rows(TOKENS, vocab_size=WIDE)["input_ids"][:])
        with torch.no_grad(), LargestTensor() as largest:
            model(input_ids=ids, labels=ids)
        assert largest.numel >= (TOKENS - 1) * WIDE


class TestEvaluation:
    @pytest.mark.parametrize("batch_size", [1, 2, 64])
    def test_metrics_are_those_of_each_row_alone(self, base: str, tmp_path: Path, batch_size: int) -> None:
        trainer = tiny_trainer(base, tmp_path, ROWS, ROWS, per_device_eval_batch_size=batch_size)
        flat = trainer.evaluate()
        metrics = trainer.detailed_metrics["eval"]
        loss = mean_loss(trainer.model, ROWS)
        assert (metrics["num_examples"], metrics["num_tokens"]) == (5, 4 + 2 + 6 + 3 + 1)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
        assert metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        assert metrics["answer_token_accuracy"] == right_tokens(trainer.model, ROWS) / 16
        telugu = ROWS.select([1, 4])
        assert metrics["per_language"]["te"]["loss"] == pytest.approx(mean_loss(trainer.model, telugu), abs=1e-5)
        assert flat["eval_loss"] == metrics["loss"]
        assert flat["eval_answer_token_accuracy"] == metrics["answer_token_accuracy"]
        assert flat["eval_perplexity"] == metrics["perplexity"]

    def test_other_rows_than_those_of_the_run_may_be_evaluated(self, base: str, tmp_path: Path) -> None:
        trainer = tiny_trainer(base, tmp_path, ROWS, ROWS)
        other = answer_rows(6, 8)
        flat = trainer.evaluate(other, metric_key_prefix="test")
        assert flat["test_loss"] == pytest.approx(mean_loss(trainer.model, other), abs=1e-5)
        assert trainer.detailed_metrics["test"]["num_examples"] == 2

    def test_an_accuracy_that_is_not_zero(self, base: str, tmp_path: Path) -> None:
        """Answers that the model itself gives are all right; one that ends otherwise has one wrong."""
        trainer = tiny_trainer(base, tmp_path, ROWS, ROWS)
        model: Any = trainer.model
        ids = [7, 8, 9]
        with torch.no_grad():
            for _ in range(4):
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        labels = [-100] * 3 + ids[3:]
        rows = Dataset.from_dict(
            {"input_ids": [ids, ids], "labels": [labels, [*labels[:6], (ids[6] + 1) % 64]], "length": [7, 7],
             "language": ["hi", "ta"]}
        )  # fmt: skip
        trainer.evaluate(rows)
        metrics = trainer.detailed_metrics["eval"]
        assert metrics["answer_token_accuracy"] == 7 / 8
        assert metrics["per_language"]["hi"]["answer_token_accuracy"] == 1.0
        assert metrics["per_language"]["ta"]["answer_token_accuracy"] == 0.75


def right_tokens(model: Any, rows: Dataset) -> int:
    right = 0
    for row in rows:
        predicted = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].argmax(-1)
        right += int((predicted == torch.tensor(row["labels"][1:])).sum())
    return right


class TestAdapters:
    @pytest.mark.more
    def test_computing_activations_again_gives_the_same_gradients(self, base: str, tmp_path: Path) -> None:
        moved, passes = {}, {}
        for again in (False, True):
            settings: dict[str, Any] = {"method": "lora", "max_steps": 3, "gradient_checkpointing": again}
            trainer = tiny_trainer(base, tmp_path, ROWS, **settings)
            model: Any = trainer.model
            layer = model.get_submodule("base_model.model.model.layers.0")
            calls: list[None] = []
            layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
            moved[again] = one_step(trainer)
            passes[again] = len(calls)
        assert passes == {False: 3, True: 6}
        assert layer._gradient_checkpointing_func.keywords == {"use_reentrant": False}
        assert moved[True][0] == pytest.approx(moved[False][0], abs=1e-6)
        assert all(each.abs().max() > 0 for each in moved[False][1].values())
        assert_same(moved[False][1], moved[True][1], tolerance=1e-7)

    def test_an_output_layer_that_is_trained_whole_moves(self, base: str, tmp_path: Path) -> None:
        trainer = tiny_trainer(base, tmp_path, ROWS, method="lora", modules_to_save=["lm_head", "embed_tokens"])
        _, moved = one_step(trainer)
        whole = {name: each for name, each in moved.items() if "modules_to_save" in name}
        assert len(whole) == 2
        assert all(each.abs().max() > 1e-4 for each in whole.values())

    def test_matrices_on_a_quantised_base_stay_in_fp32(self, base: str, tmp_path: Path) -> None:
        trainer = tiny_trainer(base, tmp_path, ROWS, method="qlora")
        assert {weights.dtype for weights in trained_weights(trainer).values()} == {torch.float32}
        _, moved = one_step(trainer)
        assert max(float(each.abs().max()) for each in moved.values()) > 0
        assert {weights.dtype for weights in trained_weights(trainer).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [({"bf16": True}, torch.bfloat16), ({"bf16": None}, torch.bfloat16), ({"bf16": False}, torch.float32)],
)
def test_activations_are_computed_in_bf16_unless_something_else_is_said(
    base: str, tmp_path: Path, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    trainer = tiny_trainer(base, tmp_path, ROWS, **settings)
    assert compute_dtype(trainer.args) == dtype
